"""Experts, same numbers: on any mesh that splits experts, those of a plain model in which every expert sees all."""

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.mesh import AXES
from tests.numerics import reference
from tests.numerics.test_equality import TOLERANCE, moments

STEPS = 4
QUICK = [
    ("mixtral", {}),
    ("mixtral", dict(mesh__expert=8)),
    ("mixtral", dict(mesh__expert=2, mesh__tensor=2, mesh__fsdp=2, train__remat="full")),
    ("qwen3_moe", dict(mesh__expert=4, mesh__data=2, train__accumulation=2)),
    ("deepseek_v3", {}),
    ("deepseek_v3", dict(mesh__expert=4, mesh__tensor=2, train__accumulation=2)),
]
REST = [
    ("qwen3_moe", {}),
    ("mixtral", dict(mesh__tensor=8)),
    ("mixtral", dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, optimizer__zero_stage=3)),
    ("mixtral", dict(mesh__data=2, mesh__expert=4, optimizer__zero_stage=2, train__unroll=0)),
    ("mixtral", dict(mesh__expert=8, mesh__overrides__experts="none")),
    ("qwen3_moe", dict(mesh__expert=2, mesh__tensor=4, train__remat="attention_and_dots")),
    ("qwen3_moe", dict(mesh__expert=8, train__remat="full")),
    ("qwen3_moe", dict(mesh__fsdp=4, mesh__expert=2, train__loss_chunks=4)),
    ("deepseek_v3", dict(mesh__expert=2)),
    ("deepseek_v3", dict(mesh__expert=8, train__remat="full", train__accumulation=4)),
    ("deepseek_v3", dict(mesh__data=2, mesh__fsdp=2, mesh__expert=2, optimizer__zero_stage=1)),
    ("deepseek_v3", dict(mesh__fsdp=2, mesh__tensor=4, train__unroll=0)),
    ("deepseek_v3", dict(mesh__context=2, mesh__expert=2)),
    ("qwen3_moe", dict(mesh__context=2, mesh__expert=2, mesh__tensor=2)),
    ("mixtral", dict(mesh__stage=2, mesh__expert=2)),
    ("deepseek_v3", dict(mesh__stage=2, mesh__expert=2, mesh__tensor=2)),
]


def build(family, keys):
    config = reference.tiny(family, **keys)
    mesh = [getattr(config.mesh, axis) for axis in AXES]
    return jt.build(config, devices=jax.devices()[: int(np.prod(mesh))])


def name(case):
    return "-".join([case[0], *(f"{key.split('__')[-1]}{value}" for key, value in case[1].items())])


def check(run, family):
    want, gradient, norm = reference.trained(family)
    step, state = reference.compiled(run), reference.start(run, family)
    for n in range(STEPS):
        state, metrics = step(state, run.place(reference.batch(n)))
        assert float(metrics["loss"]) == pytest.approx(want[n], rel=TOLERANCE), f"the loss of step {n} differs"
        if n == 0:
            c, size = run.config.optimizer, float(metrics["grad_norm"])
            assert size == pytest.approx(float(norm), rel=TOLERANCE), "the gradient's norm differs"
            scale = 1 / (1 - c.b1) / min(1, c.clip_norm / size)
            got = by_path(jax.tree.map(lambda m: np.asarray(m) * scale, moments(state)))
            wanted = {path: leaf for path, leaf in by_path(gradient).items() if "['bias']" not in path}
            assert got.keys() == wanted.keys(), "Adam has moments of other parameters"
            error, leaf = reference.worst(got, wanted, floor=1e-3 * float(norm))
            assert error < TOLERANCE, f"the first gradient of {leaf} is off by {error:.1e} of its largest element"
    return state


def by_path(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


@pytest.mark.parametrize("case", QUICK, ids=name)
def test_experts_on_any_mesh_give_the_numbers_of_the_plain_model(case):
    family, keys = case
    state = check(build(family, keys), family)
    if family == "deepseek_v3":
        bias = np.asarray(state.params["blocks"]["layer"]["mlp"]["router"]["bias"])
        want = reference.router_biases(family)[STEPS - 1]
        np.testing.assert_allclose(bias, want, atol=1e-6, err_msg="the bias did not follow the load")
        assert len(np.unique(bias)) > 2


@pytest.mark.slow
@pytest.mark.parametrize("case", REST, ids=name)
def test_experts_on_any_mesh_give_the_numbers_of_the_plain_model_everywhere(case):
    test_experts_on_any_mesh_give_the_numbers_of_the_plain_model(case)
