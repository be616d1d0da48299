"""Training with gradients that are compressed over one mesh axis: the numbers, the bytes, what is remembered."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.checkpoint import CheckpointManager
from jaxtrain.parallel.compression import codecs, exchange
from jaxtrain.parallel.compression.compressed_gradients import NAME, CompressedGradients
from jaxtrain.plan import hlo
from jaxtrain.sharding import mesh_context
from jaxtrain.train_step.hooks import extras_of
from tests.numerics import reference
from tests.objectives import plain_vision
from tests.parallel.compression.plain_exchange import Devices

PEERS, INNER, ROWS = 2, 2, 8
METHODS = {"exact": {}, "int8": {"block": 32}, "int4": {"block": 16}, "top_k": {"ratio": 0.1, "block": 500},
           "random_k": {"ratio": 0.1}, "power_sgd": {"rank": 2}}
BY_TIER = [*(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "power_sgd")),
           *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("int4", "top_k", "random_k"))]


def build(method, mesh=(PEERS, INNER, 1), **keys):
    own = {f"compression__{key}": value for key, value in METHODS[method].items()}
    return reference.build("gpt2", mesh, compression__method=method, model__num_layers=1,
                           **(dict(data__global_batch_size=ROWS) | own | keys))


@cache
def training(method):
    """A run whose first moments are its gradients, and its step."""
    run = build(method, optimizer__b1=0.0, optimizer__clip_norm=0.0)
    return run, reference.compiled(run)


def compressed(run):
    return CompressedGradients(run.config.compression, 0, run.layout, run.abstract.params)


@cache
def plain_gradient():
    model = reference.tiny("gpt2", model__num_layers=1).model
    return jax.jit(jax.grad(lambda p, batch: reference.loss(model, p, batch)))


def given(params, batch):
    """Return what each peer has to send: the gradient of its rows, by their share of the batch's weight."""
    rows = ROWS // PEERS
    for peer in range(PEERS):
        own = {key: x[peer * rows:(peer + 1) * rows] for key, x in batch.items()}
        share = own["weights"].sum() / batch["weights"].sum()
        yield [np.asarray(g) * share for g in jax.tree.leaves(plain_gradient()(params, own))]


def parts(run):
    """Return for each parameter its codec, and the parts that the devices of one peer hold, by device."""
    own = compressed(run)
    peer = run.mesh.devices.reshape(PEERS, -1)[0]
    for (codec, shape), leaf, where in zip(own.parts, *map(jax.tree.leaves, (own.params, own.crossing)), strict=True):
        yield codec, shape, [where.devices_indices_map(leaf.shape)[device] for device in peer]


@pytest.mark.parametrize("method", BY_TIER)
def test_gradients_are_those_of_the_plain_simulation(method):
    """Three steps on two peers, whose parameters are split in two, are compared, from plain float32 gradients."""
    run, step = training(method)
    state = reference.start(run)
    remembered = jax.tree.structure(run.abstract.params).flatten_up_to(state.extras[NAME])
    plain = [[Devices(codec, shape, PEERS, np.asarray(own["right"])[i] if "right" in own else None)
              for i in range(INNER)] for (codec, shape, _), own in zip(parts(run), remembered, strict=True)]
    assert sum(codec.name == method for codec, *_ in parts(run)) >= 4
    for n in range(3):
        batch = reference.batch(n, ROWS)
        sent = list(given(jax.device_get(state.params), batch))
        state, _ = step(state, run.sharded.place(batch))
        off = values = 0
        for i, (got, (_, _, places)) in enumerate(zip(jax.tree.leaves(reference.moments(state)), parts(run),
                                                      strict=True)):
            want = np.zeros(got.shape)
            for devices, place in zip(plain[i], places, strict=True):
                want[place] = devices.summed([peer[i][place] for peer in sent])
            off += (np.abs(np.asarray(got) - want) > 1e-4 * max(np.abs(want).max(), 1e-2)).sum()
            values += want.size
        # A value half-way between two levels may go to either, and so may the scale of its block; what that loses is
        # remembered, and both catch up. The same is true of the smallest of the largest.
        assert off <= values * (0.005 if method in ("int8", "int4", "top_k") else 0), (n, off, values)


@pytest.mark.exhaustive
def test_layers_of_an_encoder_that_all_stages_compute_are_matrices_of_their_own():
    """A step of a decoder that reads images, whose encoder has such a stack, from plain gradients of each peer."""
    run = jt.build(plain_vision.config("vision_language", mesh__data=PEERS, compression__method="power_sgd",
                                       compression__rank=2, optimizer__b1=0.0, optimizer__clip_norm=0.0),
                   devices=jax.devices()[:PEERS])
    rng, batch, sent = np.random.default_rng(0), plain_vision.batch("vision_language"), []
    params = jax.tree.map(lambda a: rng.normal(0, 0.15, a.shape).astype(np.float32), run.abstract.params)
    state = reference.start_from(run, params)
    before = jax.tree.structure(params).flatten_up_to(jax.device_get(state.extras[NAME]))
    for part in np.split(np.arange(len(batch["weights"])), PEERS):
        own = {key: x[part] for key, x in batch.items()}
        share = own["weights"].sum() / batch["weights"].sum()
        gradient = jax.jit(jax.grad(lambda p, own=own: plain_vision.loss(run.config.model, p, own)))
        found = gradient.lower(params).compile(reference.QUICKLY)(params)
        sent.append([np.asarray(g) * share for g in jax.tree.leaves(found)])
    state, _ = reference.compiled(run)(state, run.sharded.place(batch))
    for got, given, own, (path, x) in zip(jax.tree.leaves(reference.moments(state)), zip(*sent, strict=True), before,
                                          jax.tree_util.tree_leaves_with_path(params), strict=True):
        codec = codecs.for_shape(codecs.make("power_sgd", {"rank": 2}, stacked=int("blocks" in str(path))), x.shape)
        right = own["right"][0] if codec.name == "power_sgd" else None
        want = Devices(codec, x.shape, PEERS, right).summed(list(given))
        np.testing.assert_allclose(got, want, atol=1e-4 * max(np.abs(want).max(), 1e-2), err_msg=str(path))


@pytest.mark.parametrize("method", BY_TIER)
def test_what_crosses_the_axis_is_the_formula(method):
    run, step = training(method)
    own, moved = compressed(run), {}
    for one in hlo.collectives(step.as_text()):
        if one.joins("data", run.mesh.shape):
            moved[one.kind] = moved.get(one.kind, 0) + one.bytes
    want = exchange.received(*zip(*own.parts, strict=True), PEERS)
    # Loss, weight, three further sums, and whether all is finite.
    want["all-reduce"] = want.get("all-reduce", 0) + 4 * (2 + 3 + 1)
    assert moved == want
    whole = [one for one in hlo.collectives(step.as_text()) if one.operation.endswith("(step)/shard_map")]
    assert jax.__version_info__ < (0, 11) or not whole, hlo.table(whole)
    exact = sum(4 * leaf.size // INNER for leaf in jax.tree.leaves(run.abstract.params))
    assert sum(moved.values()) < 0.6 * 2 * exact  # an all-reduce moves its result twice


@pytest.mark.parametrize("keys", [
    pytest.param(dict(mesh=(2, 2, 2), train__accumulation=2), marks=pytest.mark.slow),
    pytest.param(dict(mesh=(2, 2, 1), mesh__rules="data", compression__axis="fsdp"), marks=pytest.mark.exhaustive),
    pytest.param(dict(mesh=(2, 1, 2), mesh__context=2), marks=pytest.mark.exhaustive)], ids=str)
def test_exact_sums_are_those_of_one_device(keys):
    """Loss and gradients by the same way, without what compression loses."""
    run = reference.build("gpt2", **({"compression__method": "exact"} | keys))
    reference.check(run, "gpt2", steps=3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("keys", [dict(sparsity__targets=["blocks/*"], sparsity__decay=0.05),
                                  dict(lora__rank=2, train__precision="float16", train__accumulation=2)], ids=str)
def test_exact_sums_with_what_else_changes_a_step(keys):
    """Three steps with kernels that become sparse, or of adapters with a loss scale, are those without a method."""
    found = []
    for method in ("", "exact"):
        run = reference.build("llama", (2, 1, 1), compression__method=method, model__num_layers=1,
                              data__global_batch_size=ROWS, **keys)
        state, step, losses = run.init(), reference.compiled(run), []
        for n in range(3):
            state, metrics = step(state, run.sharded.place(reference.batch(n, ROWS)))
            losses.append(float(metrics["loss"]))
        found.append((losses, jax.device_get(state.params), jax.device_get(state.loss_scale)))
    (losses, params, scale), (want, others, same) = found
    np.testing.assert_allclose(losses, want, rtol=1e-3 if scale else 1e-5)
    assert scale == same
    assert reference.worst(params, others)[0] < (0.05 if scale else 1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_exact_sums_of_other_families(family):
    reference.check(reference.build(family, (2, 2, 1), compression__method="exact"), family, steps=3)


@pytest.mark.slow
def test_accumulated_gradients_cross_once():
    """However many micro-batches; without compression they are summed over the axis in each."""
    run = build("int8", train__accumulation=4, data__global_batch_size=16)
    crossed = [one for one in hlo.collectives(run.lower().compile().as_text())
               if one.joins("data", run.mesh.shape) and one.bytes > 64]
    assert {(one.kind, one.times) for one in crossed} == {("all-to-all", 1), ("all-gather", 1)}


@pytest.mark.slow
def test_what_is_remembered_is_saved(tmp_path):
    """A resumed run is bit-identical on the same mesh; on another one it begins with no errors."""
    run, step = training("int8")
    state = reference.start(run)
    for n in range(2):
        state, _ = step(state, run.sharded.place(reference.batch(n, ROWS)))
    assert any(np.asarray(error).any() for error in jax.tree.leaves(state.extras[NAME]))
    store = CheckpointManager(tmp_path / "c", extras=extras_of(run.extensions))
    store.save(2, state, {})
    store.wait()
    batch = run.sharded.place(reference.batch(2, ROWS))
    again, _ = step(store.restore(2, run.abstract), batch)
    state, _ = step(state, batch)
    assert jax.tree.all(jax.tree.map(np.array_equal, state, again))
    other = build("int8", (1, 4, 1), optimizer__b1=0.0, optimizer__clip_norm=0.0)
    moved = CheckpointManager(tmp_path / "c", extras=extras_of(other.extensions)).restore(2, other.abstract)
    assert int(moved.step) == 2
    assert not any(np.asarray(error).any() for error in jax.tree.leaves(moved.extras[NAME]))
    store.close()


@pytest.mark.slow
def test_a_step_that_is_not_taken_is_not_remembered():
    run, step = training("int8")
    state, _ = step(reference.start(run), run.sharded.place(reference.batch(0, ROWS)))
    before = jax.device_get(state.extras[NAME])
    nothing = reference.batch(1, ROWS)
    nothing = nothing | {"weights": nothing["weights"] * 0}
    state, metrics = step(state, run.sharded.place(nothing))
    assert int(metrics["skipped"]) == 1
    assert jax.tree.all(jax.tree.map(np.array_equal, before, jax.device_get(state.extras[NAME])))


@pytest.mark.slow
def test_what_one_peer_cannot_send_stops_all():
    """Random-k would not pass on most of what is not finite."""
    run = reference.build("gpt2", (PEERS, 1, 1), compression__method="random_k", data__global_batch_size=ROWS)

    def gradient(state, batch):
        wrong = jnp.where(jnp.arange(64) == 5, batch["weights"].sum(), 1.0)
        grads = jax.tree.map(lambda p: jnp.ones(p.shape), state.params)
        grads["embed"]["table"] *= jnp.where(wrong > 1e6, jnp.nan, 1.0)[:, None]
        return (jnp.ones(()), jnp.ones(()), {}), grads

    weights = jax.ShapeDtypeStruct((ROWS, 16), np.float32, sharding=run.layout.batch(2))
    with mesh_context.use(run.mesh, run.sharded.rules):
        step = jax.jit(lambda state, batch: compressed(run).of(gradient)(state, batch)[1]["embed"]["table"])
        step = step.lower(replace(run.abstract, opt_state=()), {"weights": weights}).compile()
    state = replace(jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), run.abstract),
                    opt_state=())
    for bad in (0.0, 1e7):
        batch = np.zeros((ROWS, 16), np.float32)
        batch[-1, -1] = bad
        got = np.asarray(step(state, {"weights": jax.device_put(batch, weights.sharding)}))
        assert np.isnan(got).all() if bad else np.isfinite(got).all()


@pytest.mark.slow
def test_what_an_update_rule_counts_crosses_exactly():
    """A router's bias has the sign of its experts' excess load for an update: of all of them in each step."""
    run = reference.build("deepseek_v3", (2, 1, 1), compression__method="top_k")
    for updates in run.sharded.computation.updates, None:
        biases = [state for path, state in jax.tree_util.tree_leaves_with_path(
            jax.eval_shape(CompressedGradients(
                run.config.compression, 0, run.layout, run.abstract.params, updates).begin, None))
            if "['router']['bias']" in jax.tree_util.keystr(path)]
        assert (not biases) == (updates is not None)
    assert not [path for path, _ in jax.tree_util.tree_leaves_with_path(run.abstract.extras[NAME])
                if "['router']['bias']" in jax.tree_util.keystr(path)]


@pytest.mark.parametrize("keys, sentence", [
    ({"compression.block": 8}, "compression.block: compression.method='' does not read it"),
    ({"compression.method": "int8", "compression.rank": 2}, "compression.rank: compression.method='int8' does not"),
    ({"compression.method": "int8", "optimizer.zero_stage": 1}, "optimizer.zero_stage: what is spread over data"),
    ({"compression.method": "int8", "mesh.stage": 2}, r"compression.axis: a pipeline \(mesh.stage=2\)"),
    ({"compression.method": "int8", "compression.axis": "fsdp", "mesh.fsdp": 2}, "compression.axis: parameters are"),
    ({"compression.method": "int8", "mesh.overrides": {"batch": "fsdp+expert"}}, "compression.axis: data does not"),
    ({"compression.method": "zip"}, "compression.method: 'zip'")])
def test_what_cannot_be_combined_is_one_sentence(keys, sentence):
    with pytest.raises(jt.UserError, match=f"^{sentence}"):
        jt.build(jt.load_config("configs/gpt.py:tiny", {"mesh.data": 1} | keys),
                 devices=keys.get("mesh.stage", 1) * keys.get("mesh.fsdp", 1))


def test_an_axis_of_one_is_told():
    with pytest.warns(UserWarning, match=r"compression.method: mesh.data is 1, so no gradient crosses it"):
        jt.build(jt.load_config("configs/gpt.py:tiny", {"mesh.data": 1, "compression.method": "int8"}), devices=1)


def test_an_axis_of_one_beside_others_is_traced():
    """JAX 0.12 refused rows that are spread over it, where rows that lie whole were given."""
    with pytest.warns(UserWarning, match="mesh.data is 1"):
        run = jt.build(jt.load_config("configs/gpt.py:tiny", {
            "mesh.data": 1, "mesh.context": 2, "compression.method": "exact"}), devices=2)
    assert run.lower()
