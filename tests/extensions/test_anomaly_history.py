"""The definition of a spike, and that detection changes no number of a run: not one bit."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxtrain.extensions.anomaly_history import ENOUGH, SIZE, History
from jaxtrain.run import shapes_of
from jaxtrain.train_step.step import make_step
from tests.numerics import reference
from tests.tiny import SAME_BITS


@jax.jit
def judge(history, loss, norm, finite=True, overflow=False, skip=False):
    taken, after, told = history.judge(loss, norm, jax.numpy.asarray(finite), overflow, 8.0, False)
    left_out, without, _ = history.judge(loss, norm, jax.numpy.asarray(finite), overflow, 8.0, True)
    pick = lambda a, b: jax.tree.map(lambda x, y: jax.numpy.where(skip, y, x), a, b)  # noqa: E731
    return pick(taken, left_out), pick(after, without), told | {"skipped_in_a_row": pick(after, without).rejected}


def fed(losses, norms, **keys):
    """Return the history behind these steps, and what was told of each."""
    history, seen = History.empty(), []
    for loss, norm in zip(losses, norms, strict=True):
        taken, history, told = judge(history, np.float32(loss), np.float32(norm), **keys)
        seen.append({key: value.item() for key, value in jax.device_get(told).items()} | {"taken": bool(taken)})
    return history, seen


def steady(count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(3, 0.1, count).astype(np.float32), rng.normal(1, 0.2, count).astype(np.float32)


def test_the_score_is_the_robust_one():
    losses, norms = steady(300)
    _, seen = fed(losses, norms)
    for values, key in ((losses, "loss_z"), (norms, "grad_norm_z")):
        assert [step[key] for step in seen[:ENOUGH]] == [0] * ENOUGH
        for n in (ENOUGH, 51, 127, 128, 129, 299):
            last = values[max(0, n - SIZE): n].astype(np.float64)
            spread = 1.4826 * np.median(np.abs(last - np.median(last)))
            assert seen[n][key] == pytest.approx((values[n] - np.median(last)) / spread, rel=1e-3, abs=1e-4)
    assert not any(step["spike"] for step in seen)


@pytest.mark.parametrize("which", [0, 1], ids=["loss", "grad_norm"])
def test_a_spike_is_one_in_either_and_upwards_only(which):
    values = np.stack(steady(40))
    values[which, 35] += 5
    values[which, 37] -= 5
    _, seen = fed(*values)
    assert [n for n, step in enumerate(seen) if step["spike"]] == [35]
    assert all(step["taken"] for step in seen), "what is only recorded must be made"
    history, seen = fed(*values, skip=True)
    assert [n for n, step in enumerate(seen) if not step["taken"]] == [35]
    assert int(history.seen) == 39 and int(history.rejected) == 0


def test_spikes_do_not_hide_each_other():
    losses, norms = steady(200)
    losses[60::4] += 5  # every fourth
    _, seen = fed(losses, norms)
    assert [n for n, step in enumerate(seen) if step["spike"]] == list(range(60, 200, 4))


def test_what_hardly_varies_has_no_spikes():
    _, seen = fed(np.full(80, 2.0) + np.arange(80) % 2 * 1e-6, np.ones(80))
    assert not any(step["spike"] for step in seen)


def test_a_new_level_is_soon_what_is_usual_unless_all_of_it_is_left_out():
    losses, norms = steady(300)
    losses[150:] += 4
    _, seen = fed(losses, norms)
    spikes = [n for n, step in enumerate(seen) if step["spike"]]
    assert spikes == list(range(150, 150 + len(spikes))) and 40 < len(spikes) <= SIZE / 2 + 1
    _, seen = fed(losses, norms, skip=True)
    assert seen[-1]["skipped_in_a_row"] == 150, "the limit has nothing to count"


def test_not_finite_is_left_out_and_counted_but_an_overflow_is_no_anomaly():
    losses, norms = steady(50)
    history, _ = fed(losses, norms)
    for value in (np.nan, np.inf):
        taken, after, told = judge(history, np.float32(value), np.float32(1), finite=False)
        assert not taken and int(after.rejected) == 1 and not told["spike"]
        np.testing.assert_array_equal(after.values_2S, history.values_2S)
    taken, after, told = judge(history, np.float32(3), np.float32(np.inf), finite=False, overflow=True)
    assert not taken and int(after.rejected) == 0 and not told["spike"] and int(after.seen) == 50


@pytest.mark.parametrize("keys", [
    pytest.param({}, id="one device", marks=pytest.mark.exhaustive),
    pytest.param(dict(mesh=(2, 2, 2), train__accumulation=2, optimizer__zero_stage=1), id="eight, accumulated, zero 1",
                 marks=pytest.mark.exhaustive),
    pytest.param(dict(mesh=(2, 1, 1), mesh__stage=2), id="pipeline", marks=pytest.mark.exhaustive),
])
def test_the_numbers_are_to_the_bit_those_without_a_history(keys):
    run = reference.build("gpt2", model__num_layers=1, **keys)
    options = {**reference.QUICKLY, **SAME_BITS}
    layout = dataclasses.replace(run.layout, state=dataclasses.replace(run.layout.state, extras={}))
    plain = make_step(run.sharded.gradient, run.sharded.settings, layout)
    state = reference.start(run)
    without = dataclasses.replace(reference.start(run), extras={})
    with run.sharded.context():
        plain = jax.jit(plain, out_shardings=(layout.state, None)).lower(without, shapes_of(run).abstract()).compile(
            compiler_options=options)
        step = run.lower().compile(compiler_options=options)
    for n in range(4):
        batch = run.sharded.place(reference.batch(n))
        state, metrics = step(state, batch)
        without, fewer = plain(without, batch)
        for key in fewer:
            np.testing.assert_array_equal(metrics[key], fewer[key])
    for ours, theirs in zip(jax.tree.leaves((state.params, state.opt_state)),
                            jax.tree.leaves((without.params, without.opt_state)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert int(state.extras["history"].seen) == 4
