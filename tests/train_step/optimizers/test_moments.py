"""Moments in bfloat16 and 8 bits: unbiased, the same bits on every mesh, and nearly the losses of float32."""

import functools
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.checkpoint.restore import find_good
from jaxtrain.config.schema import OptimizerConfig
from jaxtrain.main import main
from jaxtrain.plan.estimate import estimate
from jaxtrain.plan.targets import TARGETS
from jaxtrain.sharding import mesh_context
from jaxtrain.train_step.optimizers import moments
from jaxtrain.train_step.step import make_step
from tests.numerics import reference
from tests.tiers import exhaustive, slow, slow_if
from tests.tiny import devices, tiny_flags

DTYPES = ("bfloat16", "int8")


def test_rounding_is_right_on_average_and_to_a_neighbour():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 300)) * 10.0 ** rng.uniform(-3, 3, (3, 300)), jnp.float32)

    @jax.jit
    def rounded(seed):
        bits = moments._random_bits(x.shape, seed, jnp.int32(0))
        return (moments.from_codes(*moments.to_codes(x, jnp.int8, bits)),
                moments.from_codes(*moments.to_codes(jnp.abs(x), jnp.uint8, bits)),
                moments.to_bfloat16(x, bits).astype(jnp.float32))

    draws = 1000
    found = [np.stack(values) for values in zip(*map(rounded, np.arange(draws, dtype=np.uint32)), strict=True)]
    blocks = np.abs(np.pad(x, ((0, 0), (0, 84)))).reshape(3, 3, 128).max(-1)
    scale = np.repeat(blocks, 128, axis=1)[:, :300]
    for values, want, most in zip(found, (x, np.abs(x), x), (127, 255, 0), strict=True):
        assert max(len(np.unique(values[:, i, j])) for i in range(3) for j in range(300)) == 2
        share = np.abs(want) / scale
        step = scale * 4 * (share**0.25 + 1 / most) ** 3 / most if most else np.abs(want) * 2**-7  # between codes
        floor = scale / 255**4 if most == 255 else 0  # squares never become 0
        assert (np.abs(values - want) <= step + floor).all()
        assert (np.abs(values.mean(0) - want) < 5 * step / 2 / np.sqrt(draws) + floor).all()


def test_the_largest_of_a_block_and_zero_are_exact():
    x = jnp.asarray([[0.0, -3.0, 1e-13, 2.0] + [0.0] * 200], jnp.float32)
    down = jnp.full(x.shape, 0xFFFFFFFF, jnp.uint32)
    codes, scale = moments.to_codes(x, jnp.int8, down)
    back = np.asarray(moments.from_codes(codes, scale))
    np.testing.assert_array_equal(scale, [[3.0, 0.0]])
    assert back[0, 1] == -3 and (back[0, 4:] == 0).all() and back[0, 0] == 0
    assert moments.to_codes(jnp.abs(x), jnp.uint8, down)[0][0, 2] == 1  # not 0: it is divided by


# ------------------------------------------------------------------------------------------------------------ any mesh

def drawn(run, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: (rng.normal(size=p.shape) * 10.0 ** rng.uniform(-3, 0, p.shape)).astype(np.float32),
                        run.abstract.params)


def after_three_updates(name, dtype, mesh, **keys):
    """Parameters and the optimizer's state after three updates by given gradients, through the run's own step."""
    run = reference.build("llama", mesh, model__mlp_dim=288, model__vocab_size=136, optimizer__name=name,
                          optimizer__moment_dtype=dtype, **keys)
    step = make_step(lambda state, grads: ((jnp.ones(()), jnp.ones(()), {}), grads),
                     replace(run.sharded.settings, clip_norm=0.0, schedule=None), run.layout, hooks=run.sharded.hooks,
                     updates=run.sharded.computation.updates)
    with mesh_context.use(run.mesh, run.sharded.rules):
        step = jax.jit(step, out_shardings=(run.layout.state, None))
        state = reference.start_from(run, drawn(run, 0))
        for n in range(1, 4):
            grads = jax.tree.map(jax.device_put, drawn(run, n), run.layout.gradients)
            state, _ = step(state, grads)
    return jax.device_get((state.params, state.opt_state))


alone = functools.cache(lambda name, dtype: after_three_updates(name, dtype, (1, 1, 1)))
MESHES = [((2, 2, 2), {"optimizer__zero_stage": 1}), ((1, 2, 4), {}), ((8, 1, 1), {"optimizer__zero_stage": 3}),
          ((2, 2, 2), {"optimizer__offload": True})]


@pytest.mark.parametrize(("name", "dtype", "mesh", "keys"), [
    pytest.param(name, dtype, mesh, keys, marks=slow_if(i == 0 and (name, dtype) == ("adamw", "int8")))
    for name, dtype in [("adamw", "int8"), ("adamw", "bfloat16"), ("lion", "int8"), ("sgd", "bfloat16")]
    for i, (mesh, keys) in enumerate(MESHES[:None if name == "adamw" else 1])])
def test_the_same_bits_on_any_mesh(name, dtype, mesh, keys):
    """They are equal even where a device's part of a dimension is not whole blocks, as with 288 and 32 columns here.

    Parameters are float32, and compilers fuse their update in several ways, which may differ in the last bit.
    """
    (params, state), (want_params, want_state) = after_three_updates(name, dtype, mesh, **keys), alone(name, dtype)
    for (path, got), want in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(want_state), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want, err_msg=jax.tree_util.keystr(path))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} > (
        {"bfloat16"} if dtype == "bfloat16" else {"int8", "uint8"} if name == "adamw" else {"int8"})
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6), params, want_params)


@pytest.mark.slow
def test_layers_and_steps_round_differently():
    _, state = alone("adamw", "int8")
    bits = [np.asarray(moments._random_bits((2, 64), jnp.uint32(seed), jnp.int32(first))) for seed, first in (
        (0, 0), (0, 1), (1, 0))]
    np.testing.assert_array_equal(bits[0][1], bits[1][0])  # layer 1, whether it comes alone or not
    assert not np.array_equal(bits[0], bits[2]) and not np.array_equal(bits[0][0], bits[0][1])
    assert int(state.count) == 3


# ----------------------------------------------------------------------------------------------------- training with it

def losses(dtype, steps, family="gpt2", **keys):
    run = reference.build(family, optimizer__moment_dtype=dtype, train__steps=steps, **keys)
    step, state, found = reference.compiled(run), reference.start(run, family), []
    for n in range(steps):
        state, metrics = step(state, run.sharded.place(reference.batch(n)))
        found.append(metrics["loss"])
    return np.array(jax.device_get(found))


@pytest.mark.parametrize("dtype", [*slow("int8"), *exhaustive("bfloat16")])
def test_losses_are_nearly_those_of_float32(dtype):
    want, got = losses("float32", 30), losses(dtype, 30)
    assert 0 < np.abs(got / want - 1).max() < {"bfloat16": 2e-3, "int8": 2e-2}[dtype] and want[-1] < want[0] - 0.5


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_thousand_steps_reach_the_loss_of_float32(dtype, capsys):
    """The mean of the last 200 losses: docs/training.md has the figures."""
    keys = dict(optimizer__learning_rate=3e-3, optimizer__warmup_steps=100)
    want, got = (losses(kind, 2000, **keys)[-200:].mean() for kind in ("float32", dtype))
    with capsys.disabled():
        print(f"\n{dtype} moments: {got:.5f} after 2,000 steps; float32: {want:.5f}; {got / want - 1:+.3%}")
    assert got / want - 1 < 1e-3


@pytest.mark.exhaustive
@pytest.mark.usefixtures("cache")
@devices(4)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path, tmp_path_factory):
    flags = tiny_flags(tmp_path_factory, [
        "model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.eval_every=0",
        "mesh.data=2", "mesh.tensor=2", "data.global_batch_size=8", "checkpoint.every=2",
        "train.steps=4", "resilience.check_every=0", "optimizer.moment_dtype=int8", "optimizer.zero_stage=1"])
    assert main([*flags, f"--workdir={tmp_path}/straight"]) == 0
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "4")
    assert main([*flags, f"--workdir={tmp_path}/resumed"]) == 0
    assert find_good(tmp_path / "resumed", 4) == find_good(tmp_path / "straight", 4) is not None


@pytest.mark.parametrize(("dtype", "bytes_each"), [
    ("float32", 8.0), pytest.param("bfloat16", 4.0, marks=pytest.mark.exhaustive), ("int8", 2.0625)])
def test_the_planner_knows_their_size(dtype, bytes_each):
    config = reference.tiny("llama", model__embed_dim=256, model__num_heads=2, model__num_kv_heads=2,
                            model__head_dim=128, model__mlp_dim=512, optimizer__moment_dtype=dtype)
    run = reference.build("llama", **{f"model__{key}": getattr(config.model, key) for key in (
        "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")})
    count = sum(leaf.size for leaf in jax.tree.leaves(run.abstract.params))
    found = estimate(config, TARGETS["h100"], 1).memory["optimizer"]
    assert bytes_each <= found / count < bytes_each + 0.06


@pytest.mark.slow
def test_the_peak_of_a_step_falls_too():
    """Layers are updated one by one, so that float32 copies exist of one layer's moments only."""
    def peak(dtype):
        run = reference.build("llama", model__mlp_dim=512, model__embed_dim=128, model__num_layers=8,
                              optimizer__moment_dtype=dtype, data__global_batch_size=1)
        memory = reference.compiled(run).memory_analysis()
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert peak("int8") < 0.9 * peak("float32")


@pytest.mark.parametrize(("name", "dtype", "layerwise"), [
    ("adamw", "float32", False), ("adamw", "bfloat16", False), ("adamw", "int8", True), ("muon", "bfloat16", True),
    ("muon", "float32", False)])
def test_which_are_updated_layer_by_layer(name, dtype, layerwise):
    """Parameters that pass through float32 as whole arrays are."""
    run = reference.build("gpt2", optimizer__name=name, optimizer__moment_dtype=dtype)
    assert run.layout.layerwise == layerwise


def test_adafactor_has_no_moments_to_round():
    with pytest.raises(ValueError, match=r"^optimizer.moment_dtype: adafactor keeps no moments that this would round"):
        OptimizerConfig(name="adafactor", moment_dtype="int8")


def test_updates_are_counted_where_all_that_is_trained_lies_in_layers():
    """With adapters, or with what is outside of the layers frozen: the schedule and Adam's corrections go on."""
    run = reference.build("gpt2", optimizer__moment_dtype="int8", train__freeze=["embed/*", "positions/*", "norm/*"])
    assert run.layout.layerwise and all("blocks" in jax.tree_util.keystr(path) for path, _ in
                                        jax.tree_util.tree_leaves_with_path(run.abstract.params))
    step, state = reference.compiled(run), reference.start(run)
    for n in range(2):
        state, _ = step(state, run.sharded.place(reference.batch(n)))
    counts = [int(x) for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state)
              if jax.tree_util.keystr(path).endswith(".count")]
    assert counts and set(counts) == {2}
