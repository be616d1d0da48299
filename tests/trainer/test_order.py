"""Test that the events of a run come in the order that the loop promises:

on_batch -> step (donates) -> timed for stragglers -> extensions after the step -> metrics pushed -> stop agreed ->
checks -> metrics flushed -> saved -> evaluated -> next batch

The tests compare whole recorded runs, so an event that is missing, repeated or out of place fails them.
"""

import contextlib
import dataclasses
import importlib
import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest

from jaxtrain import observe
from jaxtrain.builder import build
from jaxtrain.checkpoint import CheckpointManager, manager
from jaxtrain.config.load import load_config
from jaxtrain.data import Batches
from jaxtrain.data.loading.skipped_batches import SkippedBatches
from jaxtrain.observe.events import events
from jaxtrain.resilience.corruption.replays import Replays
from jaxtrain.resilience.corruption.replicas import Replicas
from jaxtrain.resilience.stragglers import Stragglers
from jaxtrain.resilience.watchdog import Watchdog
from jaxtrain.run import Run
from jaxtrain.trainer import extended
from jaxtrain.trainer.rollback import AnomalyGuard
from jaxtrain.trainer.shutdown import Interrupt
from tests.tiny import tiny_flags

pytestmark = pytest.mark.usefixtures("cache")
loop = importlib.import_module("jaxtrain.trainer.loop")  # `from jaxtrain import train` would give the function

# Nothing follows steps 1 and 5; evaluations follow 2 and 4, a save follows 3, and both follow 6.
STEPS, SAVE_EVERY, EVAL_EVERY = 6, 3, 2
TINY = ["model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.eval_batches=1",
        "data.global_batch_size=8", f"train.steps={STEPS}", f"train.eval_every={EVAL_EVERY}",
        f"checkpoint.every={SAVE_EVERY}", "train.progress=false", "resilience.spikes=rollback",
        "resilience.max_skips=1", "resilience.skip_batches=1"]

Event = tuple[str, int]  # what happened, and the step (counted from 1) that it belongs to
EVERY_STEP = ("batch asked for", "on_batch", "step", "timed", "extensions", "metrics pushed", "stop agreed",
              "checks")
SAVE = ("metrics flushed", "saved")
EVALUATION = ("evaluated", "evaluation written")
END = ("saved for good",)  # Checkpoints.insist: waits for the last save, and repeats one that failed
# "seen": by data that are made with the state.
# The places of these are the subject of their own tests.
LOOKS = ("anomaly look", "all anomalies looked at", "seen", "compiling left out of the next step's time")


# ------------------------------------------------------------------------------------------------------- the recorder

@dataclasses.dataclass
class Asked:
    """An iterator of batches, and what begins to prepare them ahead."""

    batches: Iterator
    begin: Callable[[], None]

    def __iter__(self):
        return self.batches


class Recorder:
    """A recorder of the events in a run, in order, which can call a function at an event."""

    def __init__(self):
        self.all: list[Event] = []
        self.when: dict[Event, Callable[[], None]] = {}
        self.donated: set[int] = set()  # the steps that left nothing of the state that they were given

    def add(self, name: str, step: int | None = None) -> None:
        """`step`: where the event does not know it, that of the event before."""
        event = name, step if step is not None else self.all[-1][1]
        self.all.append(event)
        if event in self.when:
            self.when[event]()

    @property
    def events(self) -> list[Event]:
        """All but the looks at anomalies and at the state."""
        return [event for event in self.all if event[0] not in LOOKS]


@contextlib.contextmanager
def recording(run: Run) -> Iterator[Recorder]:
    """Record what happens in the loop; the loop trains `run`, which all tests share, so that it is compiled once.

    This function alone knows which collaborators the loop has and what they are called.
    """
    recorder = Recorder()

    with pytest.MonkeyPatch.context() as patch:
        def record(owner, method, name, step_of=lambda step, *rest: step):
            original = getattr(owner, method)

            def recorded(self, *arguments):
                recorder.add(name, step_of(*arguments))
                return original(self, *arguments)

            patch.setattr(owner, method, recorded)

        def unknown(*arguments):
            return None

        @contextlib.contextmanager
        def drawn(run, data, start, stop, original=extended.drawn):
            with original(run, data, start, stop) as batches:
                def asked():
                    for step in range(start + 1, stop + 1):
                        recorder.add("batch asked for", step)
                        yield next(batches)

                yield Asked(asked(), batches.begin)

        def step(self, number, compiled, state, batch, original=Replays.run):
            recorder.add("step", number)
            given = jax.tree.leaves(state)
            result = original(self, number, compiled, state, batch)
            if all(leaf.is_deleted() for leaf in given):
                recorder.donated.add(number)
            return result

        def check(self, number, state, now=False, original=Replicas.check):
            recorder.add("checks", number)
            return original(self, number, state, now=now)

        def restart_clock(self, during=False, original=observe.MetricsWriter.restart_clock):
            recorder.add("compiling left out of the next step's time" if during else "clock restarted")
            return original(self, during)

        patch.setattr(extended, "drawn", drawn)
        patch.setattr(observe.MetricsWriter, "restart_clock", restart_clock)
        record(Run, "see", "seen")
        record(Watchdog, "begin", "on_batch")
        patch.setattr(Replays, "run", step)
        record(Stragglers, "step", "timed", unknown)
        record(observe.MetricsWriter, "push", "metrics pushed")
        record(extended.Extensions, "after_step", "extensions")
        record(AnomalyGuard, "look", "anomaly look")
        record(Interrupt, "requested", "stop agreed")
        patch.setattr(Replicas, "check", check)
        record(observe.MetricsWriter, "flush", "metrics flushed", unknown)
        record(AnomalyGuard, "look_at_all", "all anomalies looked at", unknown)
        record(CheckpointManager, "save", "saved")
        record(Run, "evaluate", "evaluated", lambda state, *rest: int(jax.device_get(state.step)))
        record(observe.MetricsWriter, "write_eval", "evaluation written")
        record(CheckpointManager, "insist", "saved for good")
        yield recorder


# --------------------------------------------------------------------------------------------------- what is expected

def turn(step: int, *, stopped: bool = False) -> list[Event]:
    """The events of one step, of a run that is asked to stop in it or not."""
    names = EVERY_STEP
    if stopped or step % SAVE_EVERY == 0 or step == STEPS:
        names += SAVE
    if not stopped and (step % EVAL_EVERY == 0 or step == STEPS):
        names += EVALUATION
    return at(step, *names)


def turns(first: int, last: int = STEPS) -> list[Event]:
    return [event for step in range(first, last + 1) for event in turn(step)]


def at(step: int, *names: str) -> list[Event]:
    return [(name, step) for name in names]


# ----------------------------------------------------------------------------------------------------------- the runs

@pytest.fixture(scope="module")
def run(tmp_path_factory, cache):
    flags = tiny_flags(tmp_path_factory, TINY, lines=200)
    keys = dict(flag.removeprefix("--config.").split("=") for flag in flags[1:])
    return build(load_config(flags[0].partition("=")[2], keys), devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def straight(run, tmp_path_factory):
    """A run that nothing disturbs."""
    workdir = tmp_path_factory.mktemp("straight") / "work"
    with recording(run) as recorder:
        loop.train(run, workdir)
    return recorder, workdir


STOPPED = 4  # an evaluation is due after it, and no save


@pytest.fixture(scope="module")
def stopped(run, tmp_path_factory):
    """A run that gets SIGTERM while step 4 is on the devices."""
    workdir = tmp_path_factory.mktemp("stopped") / "work"
    with recording(run) as recorder:
        recorder.when["timed", STOPPED] = lambda: signal.raise_signal(signal.SIGTERM)
        with pytest.raises(loop.Interrupted) as interrupted:
            loop.train(run, workdir)
    return recorder, workdir, interrupted.value


def test_the_step_is_compiled_while_what_makes_the_first_state_is(run, monkeypatch):
    begun, compiled = threading.Event(), jax.stages.Lowered.compile

    def compile_beside(lowered):
        assert begun.wait(60)
        return compiled(lowered)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_beside)
    again = dataclasses.replace(run, sharded=dataclasses.replace(run.sharded, programs={}))  # nothing is compiled
    first = again.init(meanwhile=begun.set)
    monkeypatch.delattr(jax.stages.Lowered, "compile")
    second = again.init(meanwhile=lambda: None)  # as after a rollback to step 0
    assert jax.tree.all(jax.tree.map(np.array_equal, first, second)) and int(second.step) == 0


def test_the_first_state_is_computed_while_the_step_is_compiled(run, monkeypatch):
    dispatched, seen, call = threading.Event(), [], jax.stages.Compiled.__call__

    def call_and_tell(compiled, *args):
        state = call(compiled, *args)
        dispatched.set()
        return state

    monkeypatch.setattr(jax.stages.Compiled, "__call__", call_and_tell)
    fresh = dataclasses.replace(run, sharded=dataclasses.replace(run.sharded, programs={}))
    fresh.init(meanwhile=lambda: seen.append(dispatched.wait(60)))
    assert seen == [True]


def test_evaluations_and_saves(straight):
    recorder, _ = straight
    assert recorder.events == turns(1) + at(STEPS, *END)


def test_what_saves_need_is_compiled_in_the_first_step_and_not_counted_in_the_second(straight):
    recorder, _ = straight
    place = recorder.all.index(("compiling left out of the next step's time", 1))
    assert recorder.all[place - 1] == ("metrics pushed", 1)
    assert [name for name, _ in recorder.all].count("compiling left out of the next step's time") == 1


def test_the_state_is_donated_to_the_step(straight):
    """On CPU, JAX keeps what a save or an evaluation still reads, so the steps that follow these do not count."""
    recorder, _ = straight
    assert recorder.donated >= {1, *(step for step in range(2, STEPS + 1)
                                     if (step - 1) % SAVE_EVERY and (step - 1) % EVAL_EVERY)}


def test_what_is_saved_was_looked_at(straight):
    """Every step is looked at once it is pushed; before a save all steps so far are."""
    recorder, _ = straight
    assert [step for name, step in recorder.all if name == "anomaly look"] == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        names = [name for name, of in recorder.all if of == step]
        assert names.index("metrics pushed") < names.index("anomaly look")
        if "saved" in names:
            assert names.index("anomaly look") < names.index("all anomalies looked at") < names.index("saved")


def test_the_state_is_seen_before_each_batch_and_after_all_else(straight):
    recorder, _ = straight
    names = [name for name, _ in recorder.all]
    for step in range(1, STEPS + 1):
        asked = recorder.all.index(("batch asked for", step))
        assert recorder.all[asked - 1] == ("seen", step - 1)
    assert names.count("seen") == STEPS + 1


def test_a_finished_run_makes_no_step_and_no_evaluation(run, straight):
    with recording(run) as recorder:
        loop.train(run, straight[1])
    assert [name for name, _ in recorder.events] == [*END]


def test_a_stop_saves_and_leaves_the_evaluation_out(stopped):
    recorder, workdir, interrupted = stopped
    assert recorder.events == turns(1, STOPPED - 1) + turn(STOPPED, stopped=True)
    assert (interrupted.step, interrupted.signal) == (STOPPED, signal.SIGTERM)
    assert CheckpointManager(workdir / "checkpoints").latest() == STOPPED


def test_an_evaluation_that_a_stop_left_out_comes_before_the_next_batch(run, stopped, tmp_path):
    shutil.copytree(stopped[1], tmp_path / "work")
    with recording(run) as recorder:
        loop.train(run, tmp_path / "work")
    assert recorder.events == at(STOPPED, *EVALUATION) + turns(STOPPED + 1) + at(STEPS, *END)


def test_a_stop_in_the_last_step_changes_nothing(run, stopped, tmp_path):
    shutil.copytree(stopped[1], tmp_path / "work")
    with recording(run) as recorder:
        recorder.when["timed", STEPS] = lambda: signal.raise_signal(signal.SIGTERM)
        loop.train(run, tmp_path / "work")
    assert recorder.events == at(STOPPED, *EVALUATION) + turns(STOPPED + 1) + at(STEPS, *END)


def test_a_save_that_fails_is_repeated_only_at_the_end(run, tmp_path, monkeypatch):
    """The save after step 3 fails, and so do the first two of the three after step 6."""
    usage = shutil.disk_usage

    with recording(run) as recorder:
        def full(path):
            saves = sum(name == "saved" for name, _ in recorder.all)
            return type(usage(path))(0, 0, 0) if 1 <= saves <= 3 else usage(path)

        monkeypatch.setattr(shutil, "disk_usage", full)
        monkeypatch.setattr(manager, "AGAIN_S", (0.001,) * 5)
        loop.train(run, tmp_path / "work")
    # A wait between two saves asks whether to stop, since a signal ends it.
    assert recorder.events == turns(1) + at(STEPS, *END) + at(STEPS, "stop agreed", "saved") * 2
    assert CheckpointManager(tmp_path / "work" / "checkpoints").steps() == [STEPS]


@pytest.mark.parametrize("bad, seen", [(4, "anomaly look"), (5, "all anomalies looked at")])
def test_a_rollback_saves_nothing_of_what_it_undoes(run, tmp_path, monkeypatch, bad, seen):
    """The verdict on step 4 is read in step 6, two steps later, and that on step 5 there too, because of the save."""
    def poisoned(self, number, indices, rows=Batches.rows):
        batch = rows(self, number, indices)
        if self.num_batches is None and number == bad - 1:  # evaluation has a number of batches
            batch["weights"] = np.full_like(batch["weights"], np.inf)
        return batch

    monkeypatch.setattr(Batches, "rows", poisoned)
    with recording(run) as recorder:
        loop.train(run, tmp_path / "work")
    assert SkippedBatches.read(tmp_path / "work").rollbacks == 1
    # Step 6 ends in its pushed metrics or later, as the look that finds the bad step has it, but before the save.
    left = recorder.all.index((seen, STEPS)) + 1
    given_up = [event for event in recorder.all[:left] if event[0] not in LOOKS]
    undone = given_up[len(turns(1, STEPS - 1)):]
    assert given_up == turns(1, STEPS - 1) + turn(STEPS)[:len(undone)]
    assert ("metrics pushed", STEPS) in undone and ("saved", STEPS) not in undone
    # It goes back to the save after step 3, after which no evaluation is due.
    assert [event for event in recorder.all[left:] if event[0] not in LOOKS] == turns(4) + at(STEPS, *END)


# ------------------------------------------------------------------------------------------------------ an early stop

LOSSES = {2: 1.0, 4: 1.5, 6: 0.5}  # of evaluations, by step


@pytest.fixture
def impatient(run, monkeypatch):
    """The run with `train.patience`, whose evaluations find what LOSSES says; to be called with another patience."""
    def of(patience):
        train = dataclasses.replace(run.config.train, patience=patience)
        monkeypatch.setitem(vars(run), "config", dataclasses.replace(run.config, train=train))
        return run

    def evaluate(self, state, many):
        return {"eval_loss": LOSSES[int(jax.device_get(state.step))]}

    monkeypatch.setattr(Run, "evaluate", evaluate)
    return of


def saved_too(first, last):
    """The turns of steps, with a save before each evaluation."""
    def of(step):
        evaluated = step % EVAL_EVERY == 0
        return at(step, *EVERY_STEP, *SAVE * (evaluated or step % SAVE_EVERY == 0), *EVALUATION * evaluated)

    return [event for step in range(first, last + 1) for event in of(step)]


def evaluations(workdir):
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}


def test_an_early_stop(impatient, tmp_path, capsys):
    """It ends after an evaluation, whose state is saved; the next start does nothing, and more patience goes on."""
    workdir = tmp_path / "work"
    with recording(impatient(1)) as recorder:
        state = loop.train(impatient(1), workdir)
    early = [*saved_too(1, 4), ("batch asked for", 5), ("saved for good", 4)]
    assert recorder.events == early and int(state.step) == 4
    assert CheckpointManager(workdir / "checkpoints").steps() == [2, 3, 4]  # the best, and the last two
    kept = f"whose checkpoint is {workdir}/checkpoints/2; to train on, add --config.train.patience=2, or 0 to"
    said = capsys.readouterr().err
    assert "\nstopped early at step 4 of 6, by train.patience=1: 1 evaluation found no lower eval_loss" in said
    assert kept in said and "done: step 4, " in said and "is that the name of a metric" not in said
    told = [event for event in events(workdir) if event["kind"] == "early_stop"]
    assert [(event["step"], event["best_step"], event["eval_loss"]) for event in told] == [(4, 2, 1.0)]

    with recording(impatient(1)) as recorder:
        assert int(loop.train(impatient(1), workdir).step) == 4
    assert recorder.events == [("saved for good", 4)]
    said = capsys.readouterr().err
    assert f"nothing to do: {workdir} stopped early at step 4 of 6, by" in said and kept in said
    assert len([event for event in events(workdir) if event["kind"] == "early_stop"]) == 1

    with recording(impatient(2)) as recorder:
        loop.train(impatient(2), workdir)
    assert recorder.events == [*saved_too(5, 6), ("saved for good", 6)] and evaluations(workdir) == LOSSES


def test_an_early_stop_after_a_restart(impatient, tmp_path):
    """A signal comes before the evaluation that ends the run: it ends at the same step, with the same evaluations."""
    workdir = tmp_path / "work"
    with recording(impatient(1)) as recorder:
        recorder.when["timed", 4] = lambda: signal.raise_signal(signal.SIGTERM)
        with pytest.raises(loop.Interrupted):
            loop.train(impatient(1), workdir)
    with recording(impatient(1)) as recorder:
        assert int(loop.train(impatient(1), workdir).step) == 4
    assert recorder.events == [*at(4, *EVALUATION), ("batch asked for", 5), ("saved for good", 4)]
    assert evaluations(workdir) == {2: 1.0, 4: 1.5}
