"""Bad steps are skipped or rolled back; the result is a run that never saw their data."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from jaxtrain.builder import build
from jaxtrain.checkpoint import CheckpointManager, step_folders
from jaxtrain.config.load import load_config
from jaxtrain.config.schema import ResilienceConfig
from jaxtrain.data.loading.loader import Batches
from jaxtrain.data.loading.skipped_batches import FILE, SkippedBatches
from jaxtrain.distributed import exit_codes
from jaxtrain.extensions.anomaly_history import History
from jaxtrain.main import main
from jaxtrain.observe.events import events, listeners
from jaxtrain.resilience.watchdog import Watchdog
from jaxtrain.train_step.hooks import extras_of
from jaxtrain.trainer.loop import train
from jaxtrain.trainer.rollback import AnomalyGuard, GivenUp, RolledBack, apply_pending_rollback
from tests.tiny import SAME_BITS, TWO_DEVICES, free_address, tiny_flags, virtual_devices

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("cache", "on_two")  # programs are compiled once
STEPS, BAD = 48, 40  # steps of the run; the batch that is poisoned
TINY = ["model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.eval_batches=1",
        "data.global_batch_size=8", f"train.steps={STEPS}", "train.eval_every=16", "checkpoint.every=8",
        "checkpoint.keep=3", "resilience.skip_batches=4", "resilience.spike_z=10", "resilience.check_every=0",
        *(f"train.compiler_options.{name}={value}" for name, value in SAME_BITS.items())]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return tiny_flags(tmp_path_factory, TINY)


@pytest.fixture
def poison(monkeypatch):
    """poison(kind, batches): these batches of training have targets that never occur, or a weight that is infinite."""
    def make(kind, numbers, rows=Batches.rows):
        def poisoned(self, step, indices):
            batch = rows(self, step, indices)
            if self.num_batches is None and step in numbers:  # evaluation has an end
                if kind == "strange":
                    batch["targets"] = np.full_like(batch["targets"], 319)
                else:
                    batch["weights"] = np.full_like(batch["weights"], np.inf)
            return batch

        monkeypatch.setattr(Batches, "rows", poisoned)
    return make


def words(**keys):
    return [f"--config.{key.replace('__', '.')}={value}" for key, value in keys.items()]


def told(workdir, name="metrics.jsonl"):
    """Return its lines without the times."""
    lines = [json.loads(line) for line in (workdir / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.endswith(("_s", "_wait", "mfu", "goodput"))
             and not key.startswith("slowest")} for line in lines]


def saved(flags, workdir, step=STEPS):
    config = load_config(flags[0].partition("=")[2], dict(f.removeprefix("--config.").split("=") for f in flags[1:]))
    return jax.device_get(CheckpointManager(workdir / "checkpoints").restore(step, build(config).abstract))


def decisions(workdir):
    return [(event["kind"], event["step"]) for event in events(workdir)
            if event["kind"] in ("spike", "skip", "rollback", "stop")]


@pytest.fixture(scope="module")
def never_saw(flags, tmp_path_factory):
    """A run that had the record from the start."""
    workdir = tmp_path_factory.mktemp("never") / "work"
    workdir.mkdir()
    (workdir / FILE).write_text(json.dumps({"batches": [37, 38, 39, 40]}))
    assert main([*flags, f"--workdir={workdir}"]) == 0
    return workdir


@pytest.mark.slow
def test_rolled_back(flags, never_saw, poison, tmp_path, capsys, monkeypatch):
    live = []

    def counting(workdir, checkpoints, apply=apply_pending_rollback):
        live.append(sum(array.nbytes for array in jax.live_arrays()))
        return apply(workdir, checkpoints)

    monkeypatch.setattr("jaxtrain.trainer.resume.apply_pending_rollback", counting)
    poison("strange", {BAD})
    assert main([*flags, *words(resilience__spikes="rollback"), f"--workdir={tmp_path}"]) == 0
    before, after = live
    assert after - before < sum(array.nbytes for array in jax.tree.leaves(saved(flags, never_saw).params)), (
        "the state that was given up is still in memory while the other one is restored")
    err = capsys.readouterr().err
    assert "going back to step 32 and skipping batches 37 to 40 (rollback 1 of at most 10)" in err
    assert decisions(tmp_path) == [("skip", BAD + 1), ("rollback", BAD + 1)]
    skip, rollback = (event for event in events(tmp_path) if event["kind"] in ("skip", "rollback"))
    assert rollback["batches"] == [37, 40] and skip["grad_norm_z"] > 8
    assert_went_as(flags, tmp_path, never_saw)
    lost = told(tmp_path, "metrics.rolled_back.jsonl")
    assert [line["step"] for line in lost if "loss" in line][:9] == list(range(33, 42)) and lost[8]["spike"] == 1

    # The same record without its file, or with another one.
    shutil.rmtree(tmp_path / "checkpoints" / str(STEPS))
    (tmp_path / FILE).unlink()
    assert main([*flags, f"--workdir={tmp_path}"]) == 0
    assert_went_as(flags, tmp_path, never_saw)
    (tmp_path / FILE).write_text(json.dumps({"batches": [7]}))
    assert main([*flags, f"--workdir={tmp_path}"]) == 2
    refused = f"--workdir: {tmp_path}/skipped_batches.json skips other batches than the first"
    assert refused in capsys.readouterr().err


def assert_went_as(flags, workdir, never_saw):
    assert SkippedBatches.read(workdir) == SkippedBatches((37, 38, 39, 40), 1)
    assert told(workdir) == told(never_saw)
    chex.assert_trees_all_equal(saved(flags, workdir), saved(flags, never_saw))


def assert_went_nearly_as(flags, workdir, never_saw):
    """Assert nearly equal results, since sums are made in another order."""
    assert SkippedBatches.read(workdir) == SkippedBatches((37, 38, 39, 40), 1)
    ours, theirs = told(workdir), told(never_saw)
    assert [(line["step"], line.get("tokens")) for line in ours] == [
        (line["step"], line.get("tokens")) for line in theirs]
    np.testing.assert_allclose(*([line["loss"] for line in lines if "loss" in line] for lines in (ours, theirs)), 1e-5)
    for one, other in zip(jax.tree.leaves(saved(flags, workdir).params),
                          jax.tree.leaves(saved(flags, never_saw).params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


KILLED = """
import os, signal, sys
import numpy as np
from jaxtrain.data.loading.loader import Batches
from jaxtrain.main import main
from jaxtrain.trainer import resume

def poisoned(self, step, indices, rows=Batches.rows):
    batch = rows(self, step, indices)
    if self.num_batches is None and step == {bad}:
        batch["targets"] = np.full_like(batch["targets"], 319)
    return batch

def killed(workdir, checkpoints, apply=resume.apply_pending_rollback, turns=[]):
    turns.append(workdir)
    return apply(workdir, checkpoints) if len(turns) < {settles} else os.kill(os.getpid(), signal.SIGKILL)

Batches.rows, resume.apply_pending_rollback = poisoned, killed
sys.exit(main())
"""


@pytest.mark.exhaustive
def test_killed_when_it_was_decided(flags, never_saw, poison, tmp_path):
    keys = words(resilience__spikes="rollback")
    done = subprocess.run([sys.executable, "-c", TWO_DEVICES + KILLED.format(bad=BAD, settles=2), *flags, *keys,
                           f"--workdir={tmp_path}"], env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300,
                          capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert decisions(tmp_path)[-1] == ("rollback", BAD + 1)
    assert SkippedBatches.read(tmp_path).void_above == 37 and CheckpointManager(tmp_path / "checkpoints").latest() == 40
    poison("strange", {BAD})
    assert main([*flags, *keys, f"--workdir={tmp_path}"]) == 0
    assert_went_as(flags, tmp_path, never_saw)


@pytest.mark.exhaustive
def test_a_save_that_failed_does_not_end_the_run_that_goes_back(flags, never_saw, poison, tmp_path, monkeypatch):
    phases, watchdogs = [], []

    def no_room(directory, step, wanted, prepare=step_folders.prepare, **more):
        return "no room" if step == 40 and not SkippedBatches.read(tmp_path) else prepare(
            directory, step, wanted, **more)

    def waiting(self, wait=CheckpointManager.wait):
        phases.append(watchdogs[0]._phase)
        wait(self)

    def watching(self, enter=Watchdog.__enter__):
        watchdogs.append(self)
        return enter(self)

    monkeypatch.setattr(step_folders, "prepare", no_room)
    monkeypatch.setattr(CheckpointManager, "wait", waiting)
    monkeypatch.setattr(Watchdog, "__enter__", watching)
    poison("strange", {BAD})
    assert main([*flags, *words(resilience__spikes="rollback"), f"--workdir={tmp_path}"]) == 0
    assert [event["step"] for event in events(tmp_path) if event["kind"] == "checkpoint_failed"] == [40]
    assert_went_as(flags, tmp_path, never_saw)
    # Reading back and copying take as long as they take: no step hangs meanwhile.
    assert phases == ["checkpoint", "checkpoint"]


@pytest.mark.exhaustive
def test_asked_to_stop_while_it_goes_back(flags, never_saw, poison, tmp_path):
    def heard(event):
        if event["kind"] == "rollback":
            os.kill(os.getpid(), signal.SIGTERM)

    poison("strange", {BAD})
    keys = words(resilience__spikes="rollback")
    listeners.append(heard)
    try:
        assert main([*flags, *keys, f"--workdir={tmp_path}"]) == exit_codes.SAVED
    finally:
        listeners.remove(heard)
    assert CheckpointManager(tmp_path / "checkpoints").latest() == 33
    assert main([*flags, *keys, f"--workdir={tmp_path}"]) == 0
    assert_went_as(flags, tmp_path, never_saw)


@pytest.mark.slow
def test_what_did_not_come_to_its_loop_is_closed(flags, never_saw, tmp_path, monkeypatch):
    shutil.copytree(never_saw, tmp_path / "work")
    (tmp_path / "work" / FILE).unlink()  # so that it begins twice
    closed = []
    close = CheckpointManager.close
    monkeypatch.setattr(CheckpointManager, "close", lambda self: (closed.append(self), close(self)))
    assert main([*flags, f"--workdir={tmp_path / 'work'}"]) == 0
    assert len({id(one) for one in closed}) == 2


@pytest.mark.slow
def test_skipped(flags, poison, tmp_path):
    poison("strange", {BAD})
    assert main([*flags, *words(resilience__spikes="skip"), f"--workdir={tmp_path}"]) == 0
    assert decisions(tmp_path) == [("skip", BAD + 1)]
    config = load_config(flags[0].partition("=")[2], dict(f.removeprefix("--config.").split("=") for f in flags[1:]))
    run = build(config)
    state = run.init()
    for n in range(STEPS):
        if n != BAD:
            state, _ = run.step(state, run.batch(n))
    ours = saved(flags, tmp_path)
    chex.assert_trees_all_equal((ours.params, ours.opt_state), jax.device_get((state.params, state.opt_state)))
    assert (ours.step, ours.skipped, ours.extras["history"].seen) == (STEPS, 1, STEPS - 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices, mesh", [
    pytest.param(1, {}, id="one"), pytest.param(8, dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2), id="product")])
def test_on_any_mesh_the_same_is_decided(flags, never_saw, poison, tmp_path, devices, mesh):
    poison("strange", {BAD})
    keys = [*flags[1:], *words(resilience__spikes="rollback", **mesh)]
    config = load_config(flags[0].partition("=")[2], dict(f.removeprefix("--config.").split("=") for f in keys))
    train(build(config, devices=jax.local_devices()[:devices]), tmp_path)
    assert decisions(tmp_path) == [("skip", BAD + 1), ("rollback", BAD + 1)]
    assert_went_nearly_as(flags, tmp_path, never_saw)


@pytest.mark.exhaustive
def test_recorded_and_stopped(flags, poison, tmp_path, capsys):
    """By default a spike is only reported; but a run that is not finite for long is stopped, for a person to look."""
    poison("strange", {35})
    assert main([*flags, *words(train__steps=40, optimizer__schedule="constant", optimizer__warmup_steps=1),
                 f"--workdir={tmp_path}"]) == 0
    assert decisions(tmp_path) == [("spike", 36), ("spike", 37)]  # it is not over at once
    assert "step 36 is a spike" in capsys.readouterr().err
    poison("infinite", {41, 43, 44, 45, 46, 47, 48, 49, 50})
    more = words(train__steps=60, optimizer__schedule="constant", resilience__max_skips=3)
    assert main([*flags, *more, f"--workdir={tmp_path}"]) == 77
    assert decisions(tmp_path)[2:] == [("skip", 42), ("skip", 44), ("skip", 45), ("skip", 46), ("stop", 46)]
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("step 46 is not finite") and "which is resilience.max_skips; look at the steps in " in line
    assert CheckpointManager(tmp_path / "checkpoints").latest() == 40
    # Where the policy says so, steps that are not finite for long are gone back from, and again.
    assert main([*flags, *more, *words(resilience__spikes="rollback"), f"--workdir={tmp_path}"]) == 0
    assert [step for kind, step in decisions(tmp_path) if kind == "rollback"] == [46, 43]
    assert SkippedBatches.read(tmp_path) == SkippedBatches(tuple(range(37, 49)), 2)
    lines = [line for line in told(tmp_path) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 61)) and lines[-1]["skipped"] == 2


# ------------------------------------------------------------------------------------------------ decisions, one by one

class Saved:
    """Checkpoints of these steps."""

    def __init__(self, *steps):
        self._steps = steps

    def steps(self):
        return list(self._steps)

    def wait(self):
        pass


def guard(workdir, saved=(), passed=SkippedBatches(), **keys):
    return AnomalyGuard(workdir, ResilienceConfig(**keys), Saved(*saved), passed, lambda text: None)


def metrics(spike=0, in_a_row=0):
    numbers = dict(loss=9.0, grad_norm=2.0, loss_z=50.0, grad_norm_z=1.0)
    return {key: np.float32(value) for key, value in numbers.items()} | {
        "spike": np.bool_(spike), "skipped_in_a_row": np.int32(in_a_row)}


def test_a_verdict_is_read_two_steps_late(tmp_path):
    one = guard(tmp_path, spikes="rollback")
    one.look(1, metrics(spike=1, in_a_row=1))
    one.look(2, metrics())
    with pytest.raises(RolledBack):
        one.look(3, metrics())
    late = guard(tmp_path, spikes="rollback")
    late.look(1, metrics(spike=1, in_a_row=1))
    with pytest.raises(RolledBack):
        late.look_at_all()


@pytest.mark.parametrize("saved, batches, void_above", [
    ((100, 200), range(285, 301), 285), ((200, 290), range(285, 301), 285), ((290, 300), range(290, 301), 290),
    ((300,), range(300, 301), 300), ((), range(285, 301), 285)], ids=str)
def test_how_far_back(tmp_path, saved, batches, void_above):
    one = guard(tmp_path, saved, spikes="rollback")
    one.look(301, metrics(spike=1, in_a_row=1))
    with pytest.raises(RolledBack):
        one.look_at_all()
    assert SkippedBatches.read(tmp_path) == SkippedBatches(tuple(batches), 1, void_above)


def test_limits(tmp_path):
    for keys, told, passed in ((dict(max_skips=5), metrics(in_a_row=5), SkippedBatches()),
                               (dict(spikes="skip", max_skips=5), metrics(1, 5), SkippedBatches()),
                               (dict(spikes="rollback"), metrics(1, 1), SkippedBatches((3,), 10)),
                               (dict(spikes="rollback", max_rollbacks=0), metrics(1, 1), SkippedBatches())):
        one = guard(tmp_path, passed=passed, **keys)
        one.look(9, told)
        with pytest.raises(GivenUp, match="and run the same command again"):
            one.look_at_all()
    assert [kind for kind, _ in decisions(tmp_path)] == ["skip", "stop"] * 4 and SkippedBatches.read(tmp_path) is None


# ------------------------------------------------------------------------------------------ checkpoints and rollbacks

@pytest.mark.slow
def test_a_checkpoint_of_the_time_before_histories_has_an_empty_one(flags, never_saw, tmp_path):
    config = load_config(flags[0].partition("=")[2], dict(f.removeprefix("--config.").split("=") for f in flags[1:]))
    run = build(config)
    new = CheckpointManager(never_saw / "checkpoints").restore(STEPS, run.abstract)
    with contextlib.closing(CheckpointManager(tmp_path, extras=extras_of(run.extensions))) as old:
        old.save(STEPS, dataclasses.replace(new, extras={}))
        old.wait()
        restored = old.restore(STEPS, run.abstract)
    chex.assert_trees_all_equal(restored, dataclasses.replace(new, extras={"history": History.empty()}))
    assert restored.extras["history"].values_2S.sharding == run.layout.state.extras["history"].values_2S


def test_void_checkpoints_are_set_aside_whole(tmp_path):
    for name in ("8", "16", "24", "24.orbax-checkpoint-tmp"):
        (tmp_path / name / "state").mkdir(parents=True)
    CheckpointManager(tmp_path).discard(above=8)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "16.abandoned", "24.abandoned", "24.orbax-checkpoint-tmp", "8"]
    assert CheckpointManager(tmp_path).steps() == [8] and CheckpointManager(tmp_path / "none").steps() == []


# ------------------------------------------------------------------------------------------------------ two processes

@pytest.mark.slow
def test_two_processes_go_back_together(flags, never_saw, tmp_path):
    coordinator = free_address()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu",
                   "XLA_FLAGS": virtual_devices(1)}
    script = KILLED.format(bad=BAD, settles=9)
    both = [subprocess.Popen(
        [sys.executable, "-c", script, *flags, *words(resilience__spikes="rollback"), f"--coordinator={coordinator}",
         "--num_processes=2", f"--process_id={i}", f"--workdir={tmp_path}"], env=environment, text=True,
        stderr=subprocess.PIPE) for i in range(2)]
    try:
        outputs = [process.communicate(timeout=400)[1] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], outputs
    assert decisions(tmp_path) == [("skip", BAD + 1), ("rollback", BAD + 1)]
    assert_went_nearly_as(flags, tmp_path, never_saw)
