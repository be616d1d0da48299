"""Experts' arithmetic: what devices compute of it, as their compilers make it, and what the rough sum says."""

import math

import jax
import jax.numpy as jnp
import pytest

import jaxtrain as jt
from jaxtrain.config.load import load_config
from jaxtrain.kernels.grouped_matmul import grouped_matmul
from jaxtrain.parallel import expert_products, experts
from jaxtrain.parallel.expert_options import ExpertOptions
from jaxtrain.plan.cost import rough
from jaxtrain.plan.estimate import estimate
from jaxtrain.plan.targets import TARGETS
from jaxtrain.plan.trace import kernels, reader
from jaxtrain.sharding import axis_rules, mesh_context
from jaxtrain.sharding.mesh import AXES
from tests.kernels.interpreted import needs_mosaic
from tests.tiers import slow_if

ROWS, WIDTH, WIDER, COUNT = 512, 64, 192, 4
ONE = 2 * ROWS * WIDTH * WIDER  # FLOP of a product in which each row goes through one expert


@pytest.mark.parametrize(("platform", "filled", "times"), [("tpu", 1.0, 1), ("tpu", 0.25, 0.25), ("cuda", 0.25, COUNT)])
def test_a_product_there_and_back_is_three(platform, filled, times):
    """XLA for TPUs computes rows that hold tokens; for GPUs all rows with all of a device's experts."""
    def loss(x, weights, sizes):
        return (jax.lax.ragged_dot(x, weights, sizes) ** 2).sum()

    traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(
        jnp.zeros((ROWS, WIDTH)), jnp.zeros((COUNT, WIDTH, WIDER)), jnp.zeros(COUNT, jnp.int32))
    block = reader.read(traced, dict.fromkeys(AXES, 1), platform, filled=filled)
    work = [op.flops for op, _ in block.all() if op.name == "ragged_dot"]
    assert work == pytest.approx([times * ONE] * 3)


@pytest.mark.parametrize("platform", [pytest.param("cuda:9", marks=needs_mosaic), "cuda:8", "cuda:10"])
def test_gpus_compute_the_rows_that_are_in_groups(platform):
    def loss(x, weights, sizes):
        return (grouped_matmul(x, weights, sizes, filled=ROWS // 4).astype(jnp.float32) ** 2).sum()

    rows, weights, sizes = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (
        ((ROWS, WIDTH), jnp.bfloat16), ((COUNT, WIDTH, WIDER), jnp.bfloat16), ((COUNT,), jnp.int32)))
    with kernels.stand_ins(), mesh_context.use(jt.make_mesh(devices=1), axis_rules.rules(), platform):
        traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(rows, weights, sizes)
    block = reader.read(traced, dict.fromkeys(AXES, 1), "cuda")
    assert [op.flops for op, _ in block.all() if op.flops] == [ONE / 4] * 3


MESHES = {"fsdp": 8, "expert": 2}, {"fsdp": 2, "expert": 8}, {"tensor": 2, "expert": 8}, {"fsdp": 16}


@pytest.mark.parametrize(("target", "factor", "mesh", "every"), [
    *(pytest.param(*target, mesh, 1, marks=[] if i == j != 2 else slow_if(i == j))
      for j, mesh in enumerate(MESHES)
      for i, target in enumerate((("h200", 0.0), ("h200", 1.25), ("v5p", 0.0)))),
    pytest.param("h200", 0.0, MESHES[3], 4, marks=pytest.mark.slow)], ids=str)
def test_the_rough_sum_counts_what_is_traced(target, factor, mesh, every):
    sizes = {f"mesh.{axis}": mesh.get(axis, 1) for axis in AXES}
    config = load_config("configs/mixtral_8x7b.py", {
        **sizes, "data.global_batch_size": 64, "train.accumulation": 1, "train.remat": "full",
        "model.capacity_factor": factor, "model.experts_every": every})
    said = rough.work(config, TARGETS[target], sizes, rough.Size.of(config, TARGETS[target].platform))
    assert said == pytest.approx(estimate(config, TARGETS[target], math.prod(mesh.values())).time.flops, rel=0.1)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("factor", [0.0, 1.25])
@pytest.mark.parametrize("buffer", [0.0, 2.0])
def test_rows_that_hold_tokens(devices, factor, buffer):
    """The buffer's rows are counted where every expert is chosen as often as every other."""
    choices, count, tokens = 2, 8, 64
    model = load_config("configs/mixtral_8x7b.py", {"model.num_experts": count, "model.experts_per_token": choices,
                                                    "model.capacity_factor": factor}).model
    seen = []

    def product(rows, weights, sizes, **_):
        seen.append(rows.shape[0])
        return jnp.zeros((rows.shape[0], weights.shape[-1]))

    held = count // devices
    limit = int(factor * tokens * choices / count) * held if factor else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_products, "grouped_matmul", product)
        mesh = jax.sharding.AbstractMesh((devices,), ("expert",))
        inner = jax.shard_map(
            lambda x, chosen, weights, kept, *w: experts.through_experts(
                x, chosen, weights, kept, *w, axis=("expert",) if devices > 1 else (), limit=limit,
                options=ExpertOptions(buffer=buffer)),
            mesh=mesh, in_specs=jax.sharding.PartitionSpec(), out_specs=jax.sharding.PartitionSpec(), check_vma=False)
        full = jnp.zeros((tokens, choices))
        jax.eval_shape(inner, jnp.zeros((tokens, 4)), full.astype(int), full, full > 0,
                       *[jnp.zeros((held, 4, 4))] * 3)
    assert experts.filled(model.experts, devices, buffer) == pytest.approx(min(1, tokens * choices / seen[0]))
