"""Experts, same numbers: on any mesh that splits experts, those of a plain model in which every expert sees all."""

import functools

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.run import shapes_of
from jaxtrain.sharding.mesh import AXES
from tests.kernels.interpreted import needs_mosaic
from tests.numerics import reference
from tests.tiers import exhaustive, slow

STEPS = 4
QUICK = [
    ("mixtral", dict(mesh__expert=2, mesh__tensor=2, mesh__fsdp=2, train__remat="full")),
]
SLOW = [
    ("qwen3_moe", dict(mesh__context=2, mesh__expert=2, mesh__tensor=2)),
]
EXHAUSTIVE = [
    ("alternating", dict(mesh__stage=2, mesh__expert=2, mesh__tensor=2, pipeline__schedule="zb_h1",
                         train__remat="attention")),
    ("gpt_oss", dict(mesh__stage=2, mesh__expert=2, mesh__tensor=2)),  # test_gpt_oss.py has that mesh
    ("deepseek_v3", dict(mesh__expert=4, mesh__tensor=2, train__accumulation=2)),
    ("qwen3_moe", dict(mesh__expert=4, mesh__data=2, train__accumulation=2)),
    ("alternating", dict(mesh__fsdp=2, mesh__expert=2, mesh__context=2, train__unroll=2, train__remat="full")),
    ("deepseek_v3", {}),
    ("deepseek_v3", dict(mesh__stage=2, mesh__expert=2, mesh__tensor=2)),
    ("mixtral", dict(mesh__data=2, mesh__expert=4, optimizer__zero_stage=2, train__unroll=0)),
    ("mixtral", {}),
    ("gpt_oss", {}),
    ("qwen3_moe", {}),
    ("alternating", {}),
    ("mixtral", dict(mesh__expert=8)),
    ("mixtral", dict(mesh__tensor=8)),
    ("mixtral", dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, optimizer__zero_stage=3)),
    ("mixtral", dict(mesh__expert=8, mesh__overrides__experts="none")),
    ("qwen3_moe", dict(mesh__expert=2, mesh__tensor=4, train__remat="attention_and_dots")),
    ("qwen3_moe", dict(mesh__expert=8, train__remat="full")),
    ("qwen3_moe", dict(mesh__fsdp=4, mesh__expert=2, train__loss_chunks=4)),
    ("deepseek_v3", dict(mesh__expert=2)),
    ("deepseek_v3", dict(mesh__expert=8, train__remat="full", train__accumulation=4)),
    ("deepseek_v3", dict(mesh__data=2, mesh__fsdp=2, mesh__expert=2, optimizer__zero_stage=1)),
    ("deepseek_v3", dict(mesh__fsdp=2, mesh__tensor=4, train__unroll=0)),
    ("deepseek_v3", dict(mesh__context=2, mesh__expert=2)),
    ("mixtral", dict(mesh__stage=2, mesh__expert=2)),
]


def build(family, keys):
    config = reference.tiny(family, **keys)
    mesh = [getattr(config.mesh, axis) for axis in AXES]
    return jt.build(config, devices=jax.devices()[: int(np.prod(mesh))])


def name(case):
    return "-".join([case[0], *(f"{key.split('__')[-1]}{value}" for key, value in case[1].items())])


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW), *(
    pytest.param(case, marks=pytest.mark.exhaustive) for case in EXHAUSTIVE)], ids=name)
def test_experts_on_any_mesh_give_the_numbers_of_the_plain_model(case):
    family, keys = case
    reference.check(build(family, keys), family, STEPS)


WIDE = dict(model__embed_dim=64, model__expert_mlp_dim=64, data__global_batch_size=16)  # what the kernels can compute


@functools.cache
def by_xla():
    """Loss and gradients of one device, which the tests above compare with the plain model."""
    run = build("mixtral", WIDE | dict(train__grouped_matmul="xla"))
    return jax.device_get(run.value_and_grad(run.init(), reference.batch(0, 16)))


@pytest.mark.parametrize(
    "keys", [*slow(dict(mesh__expert=2, mesh__tensor=2)), *exhaustive(dict(mesh__expert=2))], ids=str)
def test_the_kernels_of_triton_give_the_same_gradients_in_the_real_step(keys):
    """Pallas interprets them on any mesh."""
    run = build("mixtral", WIDE | dict(train__grouped_matmul="triton") | keys)
    assert "grouped_matmul_" in f"{run.sharded.trace(shapes_of(run).abstract()).jaxpr}"
    agrees(run)


def agrees(run):
    (loss, gradients), (want, wanted) = jax.device_get(run.value_and_grad(run.init(), reference.batch(0, 16))), by_xla()
    assert loss == pytest.approx(want, rel=1e-5)
    for (path, got), exact in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, exact, atol=1e-5 * np.abs(exact).max(), err_msg=jax.tree_util.keystr(path))


@needs_mosaic
@pytest.mark.parametrize("keys", [*slow(dict(train__remat="full")), *exhaustive(dict(train__accumulation=2))], ids=str)
def test_the_kernels_of_gpus_give_the_same_gradients_in_the_real_step(keys, interpreted):
    """The test has one device: Pallas's interpreter cannot run on several at once."""
    run = build("mixtral", WIDE | dict(train__grouped_matmul="mosaic") | keys)
    assert "grouped_matmul_" in f"{run.sharded.trace(shapes_of(run).abstract()).jaxpr}"
    agrees(run)
