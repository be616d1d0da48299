"""Muon's options in float64, in bfloat16 and on meshes; what devices exchange does not depend on the iterations."""

import collections
import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.config.schema import OptimizerConfig
from jaxtrain.errors import UserError
from jaxtrain.train_step.optimizers import make_optimizer, newton_schulz
from tests.numerics import reference
from tests.tiers import exhaustive, slow
from tests.train_step.optimizers import muon_truth
from tests.train_step.test_optimizers import newton_schulz as plain_newton_schulz

AXES = {"q": ("layers", "embed", "heads", "head_dim"), "out": ("layers", "heads", "head_dim", "embed"),
        "up": ("embed", "mlp"), "experts": ("layers", "experts", "embed", "expert_mlp")}
SHAPES = {"q": (2, 12, 3, 4), "out": (2, 3, 4, 12), "up": (12, 20), "experts": (2, 3, 12, 5)}
B2, MOMENTUM = 0.9, 0.7


def as_matrices(key, x, split):
    """The matrices of a parameter, inputs x outputs."""
    if key == "q":
        return x.transpose(0, 2, 1, 3).reshape(6, 12, 4) if split else x.reshape(2, 12, 12)
    if key == "out":
        return x.reshape(6, 4, 12) if split else x.reshape(2, 12, 12)
    return x.reshape(-1, *x.shape[-2:])


def as_parameter(key, x, split):
    if key == "q" and split:
        return x.reshape(2, 3, 12, 4).transpose(0, 2, 1, 3)
    return x.reshape(SHAPES[key])


def rounded(x):
    return x.astype(jnp.bfloat16).astype(np.float64)


@pytest.mark.parametrize(("split", "neurons", "dtype", "tolerance"), [
    (True, False, "float32", 2e-6), (False, True, "float32", 1e-5), (True, True, "float32", 1e-5),
    (False, False, "bfloat16", 2.0**-8)])
def test_steps_are_those_of_the_formulas_in_float64(split, neurons, dtype, tolerance):
    c = OptimizerConfig(name="muon", weight_decay=0.0, b2=B2, momentum=MOMENTUM, split_heads=split,
                        normalize_neurons=neurons, orthogonal_dtype=dtype)
    optimizer = make_optimizer(c, lambda n: 1.0, AXES)
    rng = np.random.default_rng(0)
    params = {key: jnp.zeros(shape) for key, shape in SHAPES.items()}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    first, squares = ({key: 0.0 for key in SHAPES} for _ in range(2))
    for _ in range(3):
        grads = {key: rng.normal(size=shape) for key, shape in SHAPES.items()}
        moved, state = update(jax.tree.map(jnp.float32, grads), state, params)
        for key, grad in grads.items():
            first[key] = MOMENTUM * first[key] + grad
            nesterov = as_matrices(key, MOMENTUM * first[key] + grad, split)
            step = np.stack([plain_newton_schulz(matrix, rounded if dtype == "bfloat16" else np.asarray)
                             for matrix in nesterov])
            if neurons:  # NorMuon, algorithm 1: a neuron is an output
                squares[key] = B2 * squares[key] + (1 - B2) * np.square(step).mean(1, keepdims=True)
                step = step / (np.sqrt(squares[key]) + 1e-8)
                norms = np.linalg.norm(step, axis=(1, 2), keepdims=True)
                step = 0.2 * np.sqrt(step[0].size) * step / norms
            else:
                step = 0.2 * np.sqrt(max(step.shape[1:])) * step
            want = -as_parameter(key, step, split)
            off = np.abs(np.asarray(moved[key]) - want).max() / np.abs(want).max()
            assert off < tolerance, f"{key}: {off:.1e}"


@pytest.mark.parametrize("shape", [(12, 12), (4, 12), (12, 5), (64, 96)])
def test_bfloat16_rounds_what_is_stored_and_nothing_else(shape):
    """A float64 model that rounds what matrix units store gives the same but for roundings that sums in float32 tip.

    So the distance from float64 is that of bfloat16 itself: about ten roundings of 2^-9 a step and element, which the
    polynomial's slope (up to 3.4) enlarges while values grow. Coefficients in bfloat16 would make it three times that.
    """
    x = np.random.default_rng(0).normal(size=shape)
    (found,) = jax.jit(lambda x: newton_schulz.orthogonalized([x], 1e-8, jnp.bfloat16))(jnp.float32(x)[None])
    model, unit, norm = plain_newton_schulz(x, rounded), 2.0**-8, np.linalg.norm
    assert norm(np.asarray(found[0], np.float64) - model) < 4 * unit * norm(model)
    assert norm(model - plain_newton_schulz(x)) < 8 * unit * norm(model)


def test_steps_are_those_of_torch():
    """The judge is torch.optim.Muon, recorded by muon_truth.py.

    Its momentum is (1 - momentum) times ours, which changes no step. torch rounds in other places, so both
    are as far from each other as two results in bfloat16.
    """
    want = json.loads(muon_truth.PATH.read_text())["steps"]
    c = OptimizerConfig(name="muon", weight_decay=muon_truth.DECAY, momentum=muon_truth.MOMENTUM)
    for dtype, roundings in ("bfloat16", 10), ("float32", 5):
        axes = dict.fromkeys(muon_truth.SHAPES, ("mlp", "embed"))
        optimizer = make_optimizer(replace(c, orthogonal_dtype=dtype), lambda n: muon_truth.LEARNING_RATE, axes)
        params = jax.tree.map(jnp.asarray, muon_truth.initial())
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for n, theirs in enumerate(want):
            before = params
            moved, state = update(muon_truth.gradients(n), state, params)
            params = optax.apply_updates(params, moved)
            for key, matrix in theirs.items():
                step = np.linalg.norm(np.asarray(params[key]) - before[key])
                off = np.linalg.norm(np.asarray(params[key]) - np.array(matrix)) / step
                assert off < (n + 1) * roundings * 2.0**-8, f"{key} after step {n}: {off:.1e}"


def test_stacks_of_one_shape_share_rounds():
    """Matrices of several parameters on four devices, some of them transposed, are those that each would be alone."""
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    stacks = [jnp.float32(rng.normal(size=shape)) for shape in ((3, 6, 10), (2, 10, 6), (2, 6, 6), (3, 6, 10))]
    with jax.set_mesh(mesh):
        made = jax.jit(lambda *stacks: newton_schulz.orthogonalized(stacks, 1e-8, jnp.float32))
        found, text = made(*stacks), made.lower(*stacks).as_text()
    for stack, got in zip(stacks, found, strict=True):
        want = np.stack([*map(plain_newton_schulz, np.float64(stack))])
        np.testing.assert_allclose(got, want, atol=1e-5)
    # Eight matrices of 6 x 10 are two rounds, apart they were three.
    assert "tensor<2x4x6x10xf32>" in text and text.count("stablehlo.while") == 2, "a loop for each shape"


def losses(mesh, **keys):
    sizes = {f"mesh__{axis}": size for axis, size in mesh.items()}
    run = reference.build("llama", optimizer__name="muon", optimizer__learning_rate=1e-2, optimizer__warmup_steps=0,
                          model__num_layers=3, **sizes, **keys)
    state, step, found = run.init(), reference.compiled(run), []
    for n in range(3):
        state, metrics = step(state, run.sharded.place(reference.batch(n)))
        found.append(float(metrics["loss"]))
    return np.array(found)


@pytest.mark.parametrize(("mesh", "stage"), [
    ({"fsdp": 2, "tensor": 2, "data": 2}, 1), *slow(({"fsdp": 8}, 0)),
    *exhaustive(({"tensor": 2, "stage": 3}, 0))])
def test_options_on_a_mesh_are_those_of_one_device(mesh, stage):
    """Three layers are laid out over four or eight devices, so some have none."""
    keys = dict(optimizer__split_heads=True, optimizer__normalize_neurons=True)
    np.testing.assert_allclose(losses(mesh, optimizer__zero_stage=stage, **keys), losses({}, **keys), rtol=1e-5)


def collectives(steps, monkeypatch, **keys):
    monkeypatch.setattr(newton_schulz, "STEPS", steps)
    text = reference.compiled(reference.build("llama", optimizer__name="muon", model__num_layers=4, **keys)).as_text()
    kinds = r" (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)\("
    return collections.Counter(found[1] for line in text.splitlines()
                               if "optimizer" in line and (found := re.search(kinds, line)))


@pytest.mark.parametrize("mesh", [*slow({"mesh__fsdp": 8}), *exhaustive({"mesh__fsdp": 4, "mesh__tensor": 2})])
def test_devices_exchange_nothing_within_the_iterations(mesh, monkeypatch):
    few, many = (collectives(steps, monkeypatch, **mesh) for steps in (1, 6))
    assert few == many
    alone = [collectives(steps, monkeypatch, optimizer__moment_dtype="bfloat16", **mesh) for steps in (1, 6)]
    assert alone[0] == alone[1] and alone[0], "layers that are updated one by one are gathered once"
    if mesh == {"mesh__fsdp": 8}:  # each of three shapes goes to whole matrices and back
        assert many["all-to-all"] == 6 and not many["all-gather"]


def test_layers_go_to_as_few_devices_as_hold_one_each():
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        found = [{name for name, _ in newton_schulz.spread_over(matrices)} for matrices in (1, 2, 3, 8, 100)]
    assert list(map(len, found)) == [0, 1, 2, 3, 3]


def test_other_optimizers_refuse_its_options():
    with pytest.raises(UserError, match=r"optimizer\.split_heads: adamw does not read it; leave it out, or at False"):
        OptimizerConfig(split_heads=True)
