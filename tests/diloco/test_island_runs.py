"""Whole runs that are islands: plain training where there is one, and exact whenever one is killed, late or new."""

import functools
import itertools
import signal
import tempfile
import threading
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.diloco.joining import Joining
from jaxtrain.diloco.outer_exchange import Exchange
from jaxtrain.diloco.waiting_meeting import WaitingMeeting
from jaxtrain.distributed import exit_codes
from jaxtrain.extensions import of_kind
from jaxtrain.trainer.loop import train
from jaxtrain.trainer.session import Interrupted
from tests.diloco.archipelago import numbers, outer_state
from tests.diloco.memory_meeting import MemoryMeeting, OutOfReach
from tests.tiers import slow_if

STEPS, ROWS = 12, 4


def rows_of(step, island):
    rng = np.random.default_rng([step, island])
    x = rng.normal(size=(ROWS, 3)).astype(np.float32)
    return {"x": x, "y": np.tanh(x @ np.arange(6, dtype=np.float32).reshape(3, 2) / 5)}


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["into"])
    return ((hidden @ params["out"] - batch["y"]) ** 2).mean()


def built(island=0, batch=rows_of, optimizer=None, **keys):
    """A tiny run of a model of its own."""
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in (("into", (3, 8)), ("out", (8, 2)))}
    config = jt.make_config({"train": {"steps": STEPS, "progress": False}, "checkpoint": {"every": 5},
                             "optimizer": {"clip_norm": 0.0}, **keys})
    return jt.build(config, model=params, loss_fn=loss, optimizer=optimizer or optax.adamw(1e-2),
                    data=jt.BatchFunction(lambda step: batch(step, island), identity=island), devices=jax.devices()[:1])


def with_meeting(run, meeting, island=0, kind=Exchange):
    section = replace(run.config.diloco, index=island)
    meeting = WaitingMeeting(meeting) if section.overlap else meeting  # so that offers are made in the background
    return joined(run, kind(section, run.abstract, run.layout.axes, meeting, run.train_batches.tokens))


def joined(run, exchange):
    """The run with this exchange."""
    return replace(run, extensions=tuple(replace(one, exchange=exchange) if isinstance(one, Joining) else one
                                         for one in run.extensions))


def islands(count, **keys):
    """The config's section as a dict."""
    return {"diloco": dict(count=count, every=3) | keys}


class Beside(threading.Thread):
    """An island that trains in a thread of its own, without a workdir."""

    def __init__(self, run, steps=STEPS):
        super().__init__(daemon=True)
        self._run, self._steps, self.state = run, steps, None
        self.start()

    def run(self):
        exchange = of_kind(self._run, Joining).exchange
        state = exchange.begin(0, self._run.init())
        for step in range(self._steps):
            state, _ = self._run.step(state, self._run.batch(step))
            if exchange.due(step + 1, step + 1 == self._steps):
                state = exchange.after(step + 1, state, step + 1 == self._steps)
        self.state = state

    def ended(self):
        self.join(600)
        assert self.state is not None
        return self.state


def test_one_island_that_talks_after_every_step_is_plain_training_to_the_bit(tmp_path):
    plain = train(built(), tmp_path / "plain")
    run = built(**islands(1, every=1, learning_rate=1, momentum=0))
    state = train(with_meeting(run, MemoryMeeting(1)), tmp_path / "island")
    chex.assert_trees_all_equal(numbers(state.params), numbers(plain.params))
    chex.assert_trees_all_equal(outer_state(state)["params"], numbers(plain.params))


@pytest.mark.slow
def test_two_islands_that_average_each_step_of_sgd_are_data_parallel_training(tmp_path):
    def both(step, _):
        return jax.tree.map(lambda a, b: np.concatenate([a, b]), rows_of(step, 0), rows_of(step, 1))

    plain = train(built(batch=both, optimizer=optax.sgd(0.1)), tmp_path / "plain")
    meeting = MemoryMeeting(2)
    one, two = (with_meeting(built(i, optimizer=optax.sgd(0.1), **islands(2, every=1, learning_rate=1, momentum=0)),
                             meeting, i) for i in range(2))
    other = Beside(two)
    state = train(one, tmp_path / "island")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), numbers(state.params),
                 numbers(plain.params))
    chex.assert_trees_all_equal(numbers(other.ended().params), numbers(state.params))


class Dies:
    """An observer that ends a run as a kill would, once, before or after the exchange of a step."""

    def __init__(self, step, hook):
        self._step, self._hook = step, hook

    def on_batch(self, step, batch):
        self._die(step, "on_batch")

    def on_dispatch(self, step, metrics):
        self._die(step, "on_dispatch")

    def on_complete(self, record):
        pass

    def _die(self, step, hook):
        if (step, hook) == (self._step, self._hook):
            self._step = None
            raise RuntimeError("killed")


MODES = {"sync": {}, "streaming": dict(every=4, fragments=2, overlap=1), "int4": dict(compression="int4"),
         "power_sgd": dict(compression="power_sgd", rank=1, every=4, fragments=2, overlap=1),
         "gossip": dict(mode="gossip", overlap=1)}


KILLED = [(4, "on_batch"), (6, "on_batch"), (6, "on_dispatch"), (8, "on_batch"), (9, "on_dispatch")]
# The first one dies before its first checkpoint. All others are more of the same.
SLOW = [((4, "on_batch"), "sync"), ((6, "on_batch"), "int4"), ((8, "on_batch"), "streaming"),
        ((8, "on_batch"), "gossip"), ((9, "on_dispatch"), "power_sgd")]


@functools.cache
def pair(mode):
    """Two runs, and an island that only trains beside the first one."""
    return [built(i, **islands(2, snapshot_every=2, **MODES[mode])) for i in range(2)]


def trained(mode, attempts):
    """Return what `attempts` make of the first island, the others' parameters, and the log."""
    meeting, (one, two) = MemoryMeeting(2), pair(mode)
    other = Beside(with_meeting(two, meeting, 1))
    state = attempts(one, meeting)
    return numbers((state, other.ended().params)), meeting.log


@functools.cache
def straight(mode):
    with tempfile.TemporaryDirectory() as workdir:
        return trained(mode, lambda one, meeting: train(with_meeting(one, meeting), workdir))


def same(mode, attempts):
    ((want, others), log), ((got, too), again) = straight(mode), trained(mode, attempts)
    chex.assert_trees_all_equal(got, want)
    chex.assert_trees_all_equal(too, others)
    if mode != "gossip":
        chex.assert_trees_all_equal(got.params, too)
    assert again == log


@pytest.mark.parametrize("killed, mode", [
    pytest.param(*both, marks=slow_if(both in SLOW))
    for both in itertools.product(KILLED, MODES)], ids=str)
def test_an_island_that_is_killed_goes_on_to_the_same_bits(tmp_path, killed, mode):
    def attempts(one, meeting):
        with pytest.raises(RuntimeError, match="killed"):
            train(with_meeting(one, meeting), tmp_path, observers=[Dies(*killed)])
        return train(with_meeting(one, meeting), tmp_path)

    same(mode, attempts)


UNANSWERED = [*itertools.product(("offer", "entries", "content"), (1, 2, 4), MODES), ("put_snapshot", 2, "sync"),
              ("offer", 6, "streaming"), ("entries", 6, "streaming"), ("content", 7, "streaming")]
FIRST = [("offer", 2, "int4"), ("content", 2, "sync"), ("offer", 4, "sync"), ("entries", 2, "streaming")]


@pytest.mark.parametrize("call, offers, mode", [
    pytest.param(*case, marks=slow_if(case in FIRST)) for case in UNANSWERED])
def test_an_island_that_is_stopped_while_nobody_answers_goes_on_to_the_same_bits(tmp_path, call, offers, mode):
    """It stops at any exchange, the last one too, which it repeats from the checkpoint before; and once more."""
    def attempts(one, meeting):
        away = OutOfReach(meeting, call, offers, lambda: signal.raise_signal(signal.SIGTERM))
        for _ in range(2):
            with pytest.raises(Interrupted) as stopped:
                train(with_meeting(one, away), tmp_path)
            assert stopped.value.code == exit_codes.SAVED
        return train(with_meeting(one, meeting), tmp_path)

    same(mode, attempts)
