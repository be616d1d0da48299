"""The layer of experts by itself: on meshes, in a pipeline's manual region, at the worst imbalance, full experts."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.config.remat_policies import policy
from jaxtrain.models import rematerialization
from jaxtrain.models.experts import moe
from jaxtrain.models.experts.clamped_swiglu import clamped_swiglu
from jaxtrain.models.make_model import make_model
from jaxtrain.parallel.cut_rows import balanced_order
from jaxtrain.parallel.expert_options import ExpertOptions
from jaxtrain.parallel.experts import OVERFLOW
from jaxtrain.plan import hlo
from jaxtrain.run import shapes_of
from jaxtrain.sharding import activations, axis_rules, mesh_context
from jaxtrain.train_step import optimizers, precision
from jaxtrain.train_step.state import Skeleton
from tests.numerics import plain_experts, reference
from tests.tiers import exhaustive, slow, slow_if

ROWS, SEQ, DIM = 8, 16, 32
MANUAL = ("data", "fsdp", "stage", "context", "expert")
MESHES = {
    "one": {}, "expert": dict(expert=8), "context": dict(context=8), "tensor": dict(tensor=4),
    "expert_context_tensor": dict(expert=2, context=2, tensor=2),
    "fsdp_expert_context": dict(fsdp=2, expert=2, context=2),
}
SOFTMAX, SIGMOID, BIASED = (reference.tiny(family).model for family in ("mixtral", "deepseek_v3", "gpt_oss"))
CAPPED = dataclasses.replace(SOFTMAX, capacity_factor=0.75)
SLOW = pytest.mark.slow
CONFIGS = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "capacity": CAPPED, "biased": BIASED}
# Between them and the tests below, every layer is on every axis.
QUICK, SLOW_ONES = [("capacity", "expert")], [("sigmoid", "expert_context_tensor"), ("biased", "context")]
SPREAD = dict(expert=2, context=4)


def layer(c, exchange="auto", buffer=2.0):
    more = dict(biased=True, activation=functools.partial(
        clamped_swiglu, limit=c.swiglu_limit, alpha=c.swiglu_alpha)) if c.name == "gpt_oss" else {}
    return moe.MoE(c, out_std=0.02, options=ExpertOptions(exchange, buffer=buffer), rngs=nnx.Rngs(params=0), **more)


def initial(module):
    """The layer's parameters, of which no bias is zero where experts have some."""
    params = module.params()
    return reference.with_biases(params) if "down_bias" in params else params


def inputs():
    """Activations, segments with padding, and something to weigh the result by."""
    batch, rng = reference.batch(0, ROWS, SEQ), np.random.default_rng(0)
    x, pull = rng.standard_normal((2, ROWS, SEQ, DIM)).astype(np.float32)
    return x, batch["segments"], pull, rng.random((ROWS, SEQ)).astype(np.float32)


def numbers(module, params, x, segments, pull, weight):
    """A scalar of result and penalties whose gradient reaches everything, and the totals."""
    y, aux = module.merge(params)(x, segments)
    scalar = (y * pull).sum() + (aux.pop("penalty") * weight.sum(1)).sum()
    return scalar, jax.tree.map(lambda a: a.sum((0, 1)), aux)


def gradients(module):
    return jax.value_and_grad(functools.partial(numbers, module), (0, 1), has_aux=True)


@functools.cache
def alone(name):
    """Value, totals and gradients on one device."""
    module = Skeleton.of(layer(CONFIGS[name]))
    return jax.device_get(jax.jit(gradients(module))(initial(module), *inputs()))


def close(got, want, tolerance=1e-5):
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(jax.device_get(got))[0], jax.tree.leaves(want),
                            strict=True):
        scale = np.abs(b).max() or 1
        np.testing.assert_allclose(a / scale, b / scale, atol=tolerance, err_msg=jax.tree_util.keystr(path))


def order(mesh):
    """Return the order of tokens in arrays whose sequence is spread over `context`."""
    n = mesh.shape["context"]
    return np.concatenate([balanced_order(i, n, SEQ // n) for i in range(n)])


def in_order(result, mesh):
    """The gradient of x has its tokens where x has them; here they come back."""
    sums, (params, x) = jax.device_get(result)
    return sums, (params, x[:, np.argsort(order(mesh))])


def placed(module, mesh, rules, params=None, arguments=None):
    """Parameters and inputs as they lie at rest and between blocks."""
    def put(value, *names):
        return jax.device_put(value, axis_rules.parameter_sharding(names, value.shape, rules, mesh, "an array"))
    params = jax.tree.map(lambda value, names: put(value, *names), params or initial(module), module.axes())
    x, segments, pull, weight = (a[:, order(mesh)] for a in arguments or inputs())
    between = "batch", "block_seq", None
    return params, put(x, *between), put(segments, "batch", "seq"), put(pull, *between), put(weight, "batch", "seq")


@pytest.mark.parametrize(("name", "mesh"), [
    case if case in QUICK else pytest.param(*case, marks=slow_if(case in SLOW_ONES))
    for case in itertools.product(CONFIGS, MESHES)])
def test_any_mesh_gives_the_numbers_of_one_device(name, mesh):
    want, module, rules = alone(name), Skeleton.of(layer(CONFIGS[name])), axis_rules.rules()
    mesh = jt.make_mesh(**MESHES[mesh])
    with mesh_context.use(mesh, rules):
        close(in_order(jax.jit(gradients(module))(*placed(module, mesh, rules)), mesh), want)


def test_matrices_are_gathered_over_fsdp_by_expert():
    """At rest split by expert, they need no transpose behind the gather; the numbers are those of one device."""
    want, module, rules, mesh = alone("softmax"), Skeleton.of(layer(SOFTMAX)), axis_rules.rules(), jt.make_mesh(fsdp=8)
    with mesh_context.use(mesh, rules):
        arguments = placed(module, mesh, rules)
        assert {w.sharding.spec[0] for w in map(arguments[0].get, moe.MATRICES)} == {"fsdp"}
        step = jax.jit(gradients(module)).lower(*arguments).compile()
        close(in_order(step(*arguments), mesh), want)
    gathers = [line for line in step.as_text().splitlines() if f"= f32[{SOFTMAX.num_experts}," in line
               and " all-gather(" in line]
    assert len(gathers) >= len(moe.MATRICES) and all("dimensions={0}" in line for line in gathers), gathers


def test_what_is_kept_by_name_is_not_computed_again():
    """There are nine grouped products, forward and for all gradients, and `full` repeats two of them."""
    module, (x, segments, *_) = Skeleton.of(layer(SOFTMAX)), inputs()

    def repeated(remat):
        apply = rematerialization.wrap(policy(remat))(lambda params: module.merge(params)(x, segments)[0])
        traced = jax.make_jaxpr(jax.grad(lambda params: (apply(params)**2).sum()))(module.params())
        return str(traced).count("= ragged_dot") - 9

    assert repeated("full") == 2 and repeated("attention+expert_mlp") == 0


@SLOW
def test_biases_and_the_clamped_activation_are_those_of_the_plain_layer():
    module, (x, segments, *_) = Skeleton.of(layer(BIASED)), map(jnp.asarray, inputs())
    params = initial(module)
    assert np.abs(x @ params["gate"][0] + params["gate_bias"][0]).max() > BIASED.swiglu_limit  # some are clamped
    found, wanted = (jax.jit(jax.value_and_grad(f))(params) for f in (
        lambda p: (module.merge(p)(x, segments)[0] ** 2).sum(),
        lambda p: (plain_experts.experts(BIASED, p, x, segments)[0] ** 2).sum()))
    close(found, wanted)


def only(specs, axes):
    """Specs less all other axes."""
    def one(spec):
        kept = [tuple(axis for axis in axis_rules.axes_of(entry) if axis in axes) for entry in spec]
        return P(*(axes[0] if len(axes) == 1 else axes or None for axes in kept))
    return jax.tree.map(one, specs, is_leaf=lambda spec: isinstance(spec, P))


@pytest.mark.parametrize(("name", "axis"), [
    pytest.param(name, axis, marks=slow_if((name, axis) == ("biased", "context")))  # test_gpt_oss.py has `tensor`
    for name in CONFIGS for axis in ("tensor", "context")])
def test_inside_a_pipeline(name, axis):
    """Manual over all axes but `tensor`, on one stage only, in a branch that the others do not take."""
    sizes = {"stage": 2, "expert": 2, axis: 2}
    module, rules, mesh = Skeleton.of(layer(CONFIGS[name])), axis_rules.rules(), jt.make_mesh(**sizes)
    in_use = jax.tree.map(lambda names: rules.spec(names, gathered=True), module.axes(),
                          is_leaf=lambda names: isinstance(names, tuple))
    rows = P(("data", "fsdp", "expert"), "context")
    between = P(rows[0], ("context", "tensor"), None)
    arguments = in_use, between, rows, between, rows
    results = jax.tree.map(lambda _: P(), alone(name)[0]), arguments[:2]

    def step(*arguments):
        def nothing(arguments):
            return jax.tree.map(jnp.zeros_like, alone(name)[0]), jax.tree.map(jnp.zeros_like, arguments[:2])
        result = lax.cond(lax.axis_index("stage") == 1, lambda a: gradients(module)(*a), nothing, arguments)
        return activations.manual_region(add_up, (only(results, free),), only(results, free))(result)

    def add_up(result):
        """Over the devices that hold parts of the same thing."""
        def one(x, spec):
            split = {axis for entry in spec for axis in axis_rules.axes_of(entry)}
            return lax.psum(x, tuple(axis for axis in MANUAL if axis not in split))
        return jax.tree.map(one, result, results)

    # The types of arguments name no axes of size 1.
    used, free = (tuple(axis for axis in axes if axis in sizes) for axes in (MANUAL, ("tensor",)))
    run = jax.shard_map(step, in_specs=only(arguments, used), out_specs=only(results, used),
                        axis_names=set(MANUAL), check_vma=False)
    with mesh_context.use(mesh, rules):
        params, *rest = placed(module, mesh, rules)
        params = jax.tree.map(lambda value, spec: jax.reshard(value, axis_rules.without_trivial_axes(spec, mesh)),
                              params, in_use)
        close(in_order(jax.jit(run)(params, *rest), mesh), alone(name))


# ------------------------------------------------------------------------------------------------- ways and imbalances

def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`lax.ragged_all_to_all`, which CPUs do not have: everybody sees everything and takes what is for him."""
    operand, starts, sizes, to = (lax.all_gather(a, axis_name) for a in (
        operand, input_offsets, send_sizes, output_offsets))
    devices, i = len(operand), jnp.arange(operand.shape[1])
    each = len(input_offsets) // devices  # parts of what one device sends to another
    for sender, part in itertools.product(range(devices), range(each)):
        mine = lax.axis_index(axis_name) * each + part
        rows = jnp.where(i < sizes[sender, mine], to[sender, mine] + i, output.shape[0])
        output = output.at[rows].set(operand[sender, starts[sender, mine] + i], mode="drop")
        # What a receiver expects is what its senders send.
        wrong = jnp.array(jnp.nan if jnp.issubdtype(output.dtype, jnp.floating) else 2**31 - 1, output.dtype)
        output = jnp.where(recv_sizes[sender * each + part] == sizes[sender, mine], output, wrong)
    return output


@pytest.mark.parametrize(("name", "sizes"), [
    pytest.param(name, sizes, marks=slow_if((name, several) == ("capacity", 1)))  # one of the others has a buffer, too
    for name in CONFIGS for several, sizes in enumerate((dict(expert=8), dict(expert=4, tensor=2)))], ids=str)
def test_the_ragged_exchange_gives_the_same_numbers(name, sizes, monkeypatch):
    called = []
    monkeypatch.setattr(lax, "ragged_all_to_all", lambda *a, **k: called.append(1) or emulated(*a, **k))
    want = alone(name)
    module, rules, mesh = Skeleton.of(layer(CONFIGS[name], "ragged")), axis_rules.rules(), jt.make_mesh(**sizes)
    with mesh_context.use(mesh, rules):
        close(in_order(jax.jit(gradients(module))(*placed(module, mesh, rules)), mesh), want)
    assert called


@pytest.mark.parametrize("platform", [pytest.param("cuda", marks=pytest.mark.exhaustive), "tpu"])
def test_the_ragged_exchange_lowers_where_it_exists(platform):
    """Each pair of a device and an expert of it is one part of the exchange, so that rows arrive by expert."""
    run = jt.build(reference.tiny("mixtral", mesh__expert=4, train__expert_exchange="ragged"), devices=4)
    step = jax.jit(jax.grad(lambda params, batch: run.objective.loss(params, batch)[0]))
    with mesh_context.use(run.mesh, run.sharded.rules):
        traced = step.trace(run.abstract.params, shapes_of(run).abstract())
        lowered = traced.lower(lowering_platforms=(platform,)).as_text()
    sent = [line for line in lowered.splitlines() if "@ragged_all_to_all" in line]
    assert len(sent) >= 4  # there and back, and the same for gradients
    assert all(line.count(f"tensor<{run.config.model.num_experts}xi32>") == 4 for line in sent)


@pytest.mark.parametrize("experts", exhaustive(2, 4))
def test_the_gathering_exchange_says_what_its_formula_says(experts):
    """All devices' tokens gathered and one device's sums scattered, in each layer, forward and, mirrored, backward."""
    run = reference.build("mixtral", mesh__expert=experts)
    found = hlo.collectives(reference.compiled(run).as_text())
    D, tokens = run.config.model.embed_dim, reference.BATCH * SEQ
    A = tokens // experts * D * 4
    for kind, rows, want in (("all-gather", tokens, 2 * experts * A), ("reduce-scatter", tokens // experts, 2 * A)):
        tokens_only = [c for c in found if c.kind == kind and c.arrays == (("f32", (rows, D)),)]
        assert hlo.total(tokens_only, kind) == run.config.model.num_layers * want, hlo.table(found)


def rigged(c):
    """Parameters and inputs that send every token to the first experts."""
    module, (x, segments, *rest) = Skeleton.of(layer(c)), inputs()
    params = module.params()
    params["router"]["kernel"] = params["router"]["kernel"].at[0, :2].set(5.0)
    x = x.copy()
    x[..., 0] = 4
    return module, params, (x, segments, *rest)


@pytest.mark.parametrize(("sizes", "exchange"), [
    *exhaustive((dict(expert=4, context=2), "ragged"), (dict(expert=4), "gather"), (dict(expert=4), "ragged"),
                (dict(expert=4, context=2), "gather"))], ids=str)
def test_nothing_is_dropped_when_all_tokens_want_the_same_device(sizes, exchange, monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated)
    module, params, arguments = rigged(SOFTMAX)
    want = jax.jit(gradients(module))(params, *arguments)
    real = (arguments[1] > 0).sum()
    totals = want[0][1]
    assert totals["load"].tolist() == [real, real, 0, 0, 0, 0, 0, 0] and totals["kept"] == 2 * real
    plain, *_ = plain_experts.experts(SOFTMAX, params, arguments[0], arguments[1])
    close(jax.jit(lambda p, x, s: module.merge(p)(x, s)[0])(params, *arguments[:2]), plain)
    rules, mesh = axis_rules.rules(), jt.make_mesh(**sizes)
    rigged_module = Skeleton.of(layer(SOFTMAX, exchange))
    with mesh_context.use(mesh, rules):
        result = jax.jit(gradients(rigged_module))(*placed(rigged_module, mesh, rules, params, arguments))
        close(in_order(result, mesh), want)


@pytest.mark.parametrize(("name", "exchange", "sizes", "buffer"), [
    ("softmax", "auto", {}, 0.3),
    *slow(("sigmoid", "gather", dict(expert=4, tensor=2), 0.3), ("biased", "ragged", dict(expert=4, tensor=2), 0.3)),
    *exhaustive(("softmax", "auto", {}, 0.0), ("capacity", "ragged", dict(expert=8), 1.0),
                ("softmax", "auto", {}, 1.0), ("sigmoid", "gather", dict(expert=4, tensor=2), 1.0),
                ("sigmoid", "gather", dict(expert=4, tensor=2), 0.0),
                ("biased", "ragged", dict(expert=4, tensor=2), 1.0), ("capacity", "ragged", dict(expert=8), 0.3),
                ("softmax", "ragged", dict(expert=4, fsdp=2), 0.3),
                ("softmax", "ragged", dict(expert=4, fsdp=2), 1.0))], ids=str)
def test_rows_that_the_buffer_does_not_hold_take_further_passes(name, exchange, sizes, buffer, monkeypatch):
    """Value, totals and all gradients are those of one pass; 0.3 needs at least four passes, 0 has room for all."""
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated)
    want, rules, mesh = alone(name), axis_rules.rules(), jt.make_mesh(**sizes)
    module = Skeleton.of(layer(CONFIGS[name], exchange, buffer))
    with mesh_context.use(mesh, rules):
        step = jax.jit(gradients(module)).lower(*placed(module, mesh, rules))
        assert (OVERFLOW in step.as_text(debug_info=True)) == (buffer == 0.3) or buffer == 1
        close(in_order(step.compile()(*placed(module, mesh, rules)), mesh), want)


@pytest.mark.parametrize(("factor", "sizes"), [
    (0.8, {}), (0.8, SPREAD), *slow((3.9, SPREAD)),
    *exhaustive((0.25, {}), (0.25, SPREAD), (1.0, {}), (1.0, SPREAD), (3.9, {}))], ids=str)
def test_a_full_expert_drops_the_latest_tokens_of_a_row(factor, sizes):
    c = dataclasses.replace(SOFTMAX, capacity_factor=factor)
    module, (x, segments, *_) = Skeleton.of(layer(c)), inputs()
    *_, hit = plain_experts.choice(c, module.params()["router"], x, segments)
    kept = 0
    for row in np.asarray(hit):
        room = np.full(c.num_experts, int(np.ceil(factor * SEQ * c.experts_per_token / c.num_experts)))
        for token in row:
            kept += (token & (room > 0)).sum()
            room -= token
    rules, mesh = axis_rules.rules(), jt.make_mesh(**sizes)
    with mesh_context.use(mesh, rules):
        totals = jax.jit(gradients(module))(*placed(module, mesh, rules))[0][1]
    assert int(totals["kept"]) == kept and int(totals["load"].sum()) == hit.sum()
    assert (kept < hit.sum()) == (factor < 3), "the case proves little"


# --------------------------------------------------------------------------------------------------- what is kept apart

@pytest.mark.parametrize("name", [
    "adamw", pytest.param("muon", marks=SLOW), *(
        pytest.param(name, marks=pytest.mark.exhaustive) for name in ("adafactor", "lion", "sgd"))])
def test_the_bias_moves_against_the_load_whatever_the_optimizer(name):
    config = reference.tiny("deepseek_v3", optimizer__name=name)
    model = Skeleton.of(nnx.eval_shape(lambda: make_model(config.model, rngs=nnx.Rngs(params=0))))
    optimizer = optimizers.make_optimizer(config.optimizer, lambda step: 1.0, model.axes())
    optimizer = optimizers.with_update_rules(optimizer, model.metadata("update"), 0.5)
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), model.params())
    grads = jax.tree.map(np.ones_like, params)
    grads["blocks"]["layer"]["mlp"]["router"]["bias"] = np.tile(np.float32([0.3, -1e-3, 1e-8, 0]), (2, 2))
    updates = jax.jit(lambda params, grads: optimizer.update(grads, optimizer.init(params), params)[0])(params, grads)
    np.testing.assert_array_equal(updates["blocks"]["layer"]["mlp"]["router"]["bias"], [[-0.5, 0.5, 0, 0] * 2] * 2)


@pytest.mark.exhaustive
def test_clipping_leaves_the_load_alone():
    """However small the norm is made, the bias moves by its rate."""
    keys = dict(data__global_batch_size=8, data__seq_len=8)
    runs = [reference.build("deepseek_v3", optimizer__clip_norm=clip, **keys) for clip in (0, 1e-7)]
    batch = reference.batch(0, 8, 8)
    states = [reference.compiled(run)(reference.start(run, "deepseek_v3"), run.sharded.place(batch))[0]
              for run in runs]
    biases = [state.params["blocks"]["layer"]["mlp"]["router"]["bias"] for state in states]
    assert np.abs(biases[0]).max() > 0
    np.testing.assert_array_equal(*biases)


@pytest.mark.slow
def test_the_router_computes_in_float32():
    module, (x, segments, *_) = Skeleton.of(layer(SIGMOID)), inputs()
    half = precision.cast(module.params(), "bfloat16", module.metadata("compute_dtype"))
    assert {leaf.dtype for leaf in jax.tree.leaves(half["router"])} == {jnp.dtype("float32")}
    assert half["gate"].dtype == jnp.bfloat16
    x = jnp.asarray(x, jnp.bfloat16)
    y, aux = module.merge(half)(x, segments)
    _, exact = module.merge(module.params())(x.astype(jnp.float32), segments)
    assert y.dtype == jnp.bfloat16
    for name in aux:
        assert aux[name].dtype == jnp.float32
        np.testing.assert_allclose(aux[name], exact[name], rtol=1e-6, atol=1e-6, err_msg=name)


def test_the_load_of_the_busiest_device_is_over_all_of_its_experts():
    load = np.float32([[3, 1, 0, 0, 1, 1, 1, 1], [1] * 8])  # two experts on each of four devices
    sums = {"load": load, **dict.fromkeys(("tokens", "kept", "entropy", "balance"), np.float32([8, 8]))}
    assert "moe_max_device_load" not in moe.metrics(sums, 1)
    with mesh_context.use(jt.make_mesh(expert=4), axis_rules.rules()):
        found = moe.metrics(sums, 1)
    assert found["moe_max_load"] == 3 and found["moe_max_device_load"] == 2


@pytest.mark.slow
def test_evaluation_has_no_penalties_and_steps_tell_of_the_load():
    keys = dict(model__balance_loss=0.5, model__capacity_factor=1.0, data__global_batch_size=8)
    run, without = (jt.build(reference.tiny("mixtral", **keys | more), devices=jax.devices()[:1])
                    for more in ({}, dict(model__balance_loss=0, model__router_z_loss=0)))
    params, batch = reference.initial("mixtral"), reference.batch(0, 8)
    total, weight = jax.jit(run.sharded.evaluation)(params, batch)
    plain = jax.jit(without.objective.loss)(params, batch)
    assert float(total) == float(plain[0]) and float(weight) == float(plain[1])
    assert float(jax.jit(run.objective.loss)(params, batch)[0]) > float(total) + 0.4 * float(weight)
    _, metrics = reference.compiled(run)(reference.start(run, "mixtral"), run.sharded.place(batch))
    assert 1 < metrics["moe_max_load"] < 4 and 0 <= metrics["moe_min_load"] < 1
    assert 0 < metrics["moe_dropped"] < 0.5
    assert metrics["moe_router_entropy"] == pytest.approx(np.log(8), rel=0.01)
    assert metrics["balance_loss"] == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(("keys", "message"), [
    (dict(model__num_experts=0), "model.balance_loss: the model has no experts"),
    (dict(model__experts_per_token=9), "model.experts_per_token: 9 exceeds the 8 experts"),
    (dict(model__expert_groups=3), "model.expert_groups: 3 does not divide model.num_experts=8"),
    (dict(model__expert_groups=2, model__expert_groups_used=3), "model.expert_groups_used: 3 exceeds"),
    (dict(model__expert_groups=4, model__experts_per_token=3), "model.experts_per_token: 3 exceeds the 2 experts"),
    (dict(model__router="hash"), "model.router: 'hash' is not supported"),
    (dict(model__dense_layers=2), "model.dense_layers: 2 of 2 layers leaves no layer"),
    (dict(model__capacity_factor=-1), "model.capacity_factor: -1.0 is negative"),
    (dict(model__kv_rank=8), "model.kv_rank: mixtral has no such key; remove it, or use deepseek_v2 or deepseek_v3"),
    (dict(model__name="deepseek_v3"), "model.kv_rank: deepseek_v3 needs a latent"),
    (dict(model__name="gpt2"), "gpt2 has no such key; remove it, or use mixtral or qwen3_moe"),
    (dict(train__expert_exchange="post"), "train.expert_exchange: 'post' is not supported"),
    (dict(mesh__overrides__mlp="stage", mesh__overrides__act_mlp="stage"), "mesh.overrides.mlp: nothing but layers"),
    (dict(mesh__overrides__act_mlp="data"), "mesh.overrides.act_mlp: data splits tokens already"),
    (dict(model__num_experts=6, mesh__expert=4), "model.num_experts: 6 does not divide over mesh axes expert=4"),
    (dict(model__expert_mlp_dim=9, mesh__tensor=4), "model.expert_mlp_dim: 9 does not divide over mesh axes tensor=4"),
    (dict(mesh__expert=2, mesh__overrides__batch="data"), "mesh.overrides.batch: it leaves out expert"),
])
def test_what_cannot_be_is_refused(keys, message):
    with pytest.raises(jt.UserError, match=message.replace(".", r"\.").replace("(", r"\(")):
        config = reference.tiny("mixtral", **keys)
        jt.build(config, devices=config.mesh.expert * config.mesh.tensor)
