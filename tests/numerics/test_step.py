"""The step around the gradient: accumulation, clipping, the guard against what is not finite, precision."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxtrain.train_step.precision import LossScale
from tests.numerics import reference
from tests.tiers import exhaustive, slow

CUBE = (2, 2, 2)


@functools.cache
def sgd(mesh=(1, 1, 1), **keys):
    """A step whose update is the gradient itself: plain descent at a rate of 1, nothing else."""
    run = reference.build("gpt2", mesh, optimizer__name="sgd", optimizer__b1=0, optimizer__weight_decay=0,
                          optimizer__learning_rate=1, optimizer__schedule="constant", optimizer__warmup_steps=0, **keys)
    return run, reference.compiled(run)


def descend(batch, **keys):
    """Return the gradient that was applied, and the metrics."""
    run, step = sgd(**keys)
    state, metrics = step(reference.start(run), run.sharded.place(batch))
    gradient = jax.tree.map(lambda old, new: old - np.asarray(new), reference.initial(), jax.device_get(state.params))
    return gradient, jax.device_get(metrics)


def uneven(accumulation):
    """Micro-batches of very unequal weight, and one of none at all."""
    batch = reference.batch(0)
    of_rows = np.array([100, 0, 1, 0.01], np.float32)[np.arange(reference.BATCH) % accumulation]
    batch["weights"] *= of_rows[:, None]
    return batch


@functools.cache
def plain():
    c = reference.tiny().model
    value, gradient = jax.jit(jax.value_and_grad(lambda p: reference.loss(c, p, uneven(4))))(reference.initial())
    return float(value), jax.device_get(gradient)


@pytest.mark.parametrize("mesh", [(1, 1, 1), pytest.param(CUBE, marks=pytest.mark.slow)], ids=str)
def test_micro_batches_of_unequal_weight_add_up_to_the_gradient_of_the_whole(mesh):
    gradient, metrics = descend(uneven(4), mesh=mesh, train__accumulation=4, optimizer__clip_norm=0.0)
    value, want = plain()
    assert float(metrics["loss"]) == pytest.approx(value, rel=1e-5)
    # old - new of parameters of size 1 is good to about 1e-7
    error, leaf = reference.worst(gradient, want, floor=0.02 * float(metrics["grad_norm"]))
    assert error < 3e-5, f"the gradient of {leaf} is off by {error:.1e}"


@pytest.mark.parametrize("clip", [0.25, *exhaustive(0.0, 1e3)])
def test_clipping_scales_the_whole_gradient_and_reports_its_norm_before(clip):
    gradient, metrics = descend(reference.batch(0), optimizer__clip_norm=clip)
    norm = float(reference.trained()[2])
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5), "grad_norm is that of the clipped gradient"
    want = jax.tree.map(lambda g: g * (min(1, clip / norm) if clip else 1), reference.trained()[1])
    error, leaf = reference.worst(gradient, want, floor=0.02 * float(reference.norm_of(want)))
    assert error < 3e-5, f"the applied gradient of {leaf} is off by {error:.1e}"


# --------------------------------------------------------------------------------------------------- what is not finite

@pytest.mark.parametrize(("mesh", "accumulation"), [
    ((1, 1, 1), 1), *exhaustive((CUBE, 4))], ids=str)  # test_offload.py has such a step on a mesh
def test_a_step_that_is_not_finite_changes_nothing_but_the_counters(mesh, accumulation):
    run = reference.build("gpt2", mesh, train__accumulation=accumulation)
    step, place = reference.compiled(run), run.sharded.place
    bad = reference.batch(1)
    bad["weights"][5, 3] = np.inf

    state, _ = step(reference.start(run), place(reference.batch(0)))
    before = jax.device_get(state)
    state, metrics = step(state, place(bad))
    after = jax.device_get(state)
    for part in ("params", "opt_state"):
        for (path, old), new in zip(jax.tree_util.tree_flatten_with_path(getattr(before, part))[0],
                                    jax.tree.leaves(getattr(after, part)), strict=True):
            assert np.array_equal(old, new), f"{part}{jax.tree_util.keystr(path)} changed in a skipped step"
    assert (int(after.step), int(after.skipped), int(metrics["skipped"])) == (2, 1, 1)

    state, metrics = step(state, place(reference.batch(1)))
    after_skip = float(metrics["loss"]), float(metrics["learning_rate"])
    other, _ = step(reference.start(run), place(reference.batch(0)))
    other, metrics = step(other, place(reference.batch(1)))
    never = float(metrics["loss"]), float(metrics["learning_rate"])
    assert after_skip == never, "learning does not go on as if the bad batch had not been"
    assert reference.worst(state.params, other.params)[0] == 0


# ------------------------------------------------------------------------------------------------------------ precision

@functools.cache
def rounded(precision):
    run = reference.build("gpt2", train__precision=precision)
    return run, reference.compiled(run)


@pytest.mark.parametrize("precision", [*slow("float16"), *exhaustive("bfloat16")])
def test_half_precision_learns_as_float32_does_on_float32_master_weights(precision):
    run, step = rounded(precision)
    state, losses = reference.start(run), []
    for n in range(reference.STEPS):
        state, metrics = step(state, run.sharded.place(reference.batch(n)))
        losses.append(float(metrics["loss"]))
    off = np.abs(np.array(losses) / reference.trained()[0] - 1)
    assert off.max() < 1e-2, f"{precision} is off by {off.max():.1%} at step {off.argmax()}"
    assert off.max() > 1e-6, f"nothing was computed in {precision}"
    kinds = {str(x.dtype) for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim}
    assert kinds == {"float32"}, f"master weights and moments are {kinds}"


def with_scale(state, scale, good_steps):
    put = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding),
                       LossScale(np.float32(scale), np.int32(good_steps)), state.loss_scale)
    return dataclasses.replace(state, loss_scale=put)


def test_the_loss_scale_halves_on_overflow_and_doubles_after_patience():
    run, step = rounded("float16")
    assert jax.tree.leaves(run.abstract.loss_scale), "the loss scale is not part of the state, so of no checkpoint"
    state = reference.start(run)
    assert float(state.loss_scale.scale) == 2.0**15
    state = with_scale(state, 2.0**24, 7)  # gradients overflow float16
    state, metrics = step(state, run.sharded.place(reference.batch(0)))
    assert (float(metrics["loss_scale"]), int(state.loss_scale.good_steps), int(state.skipped)) == (2.0**23, 0, 1)
    assert (int(metrics["skipped_in_a_row"]), int(metrics["spike"])) == (0, 0), "an overflow is told as an anomaly"
    before = reference.initial()
    assert reference.worst(state.params, before)[0] == 0, "an overflow moved the parameters"

    state = with_scale(state, 2.0**10, LossScale.PATIENCE - 2)
    state, metrics = step(state, run.sharded.place(reference.batch(0)))
    assert (float(metrics["loss_scale"]), int(state.loss_scale.good_steps)) == (2.0**10, LossScale.PATIENCE - 1)
    state, metrics = step(state, run.sharded.place(reference.batch(1)))
    assert (float(metrics["loss_scale"]), int(state.loss_scale.good_steps), int(state.skipped)) == (2.0**11, 0, 1)


def test_the_loss_scale_does_not_show_in_norm_or_update():
    run, step = rounded("float16")
    norms = []
    for scale in (2.0**8, 2.0**12):
        _, metrics = step(with_scale(reference.start(run), scale, 0), run.sharded.place(reference.batch(0)))
        norms.append(float(metrics["grad_norm"]))
    np.testing.assert_allclose(norms, float(reference.trained()[2]), rtol=1e-2)
