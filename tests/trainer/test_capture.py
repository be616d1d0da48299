"""A profile of a run while it trains: asked for, traced, summarised; the run computes the same, whatever happens."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.commands import profile as command
from jaxtrain.errors import UserError
from jaxtrain.observe import events, profile_requests
from jaxtrain.profiling import summary
from jaxtrain.profiling.summary import ask, summarise
from jaxtrain.run import compiled_step
from jaxtrain.trainer.capture import Capture
from tests.tiers import exhaustive
from tests.tiny import ROOT, SLOW, free_address, tiny_flags, virtual_devices, wait_for_lines
from tests.trainer.conftest import TWO

pytestmark = pytest.mark.usefixtures("cache")
@pytest.fixture(scope="module")
def plain(two):
    """The losses of eight steps without a profile."""
    return list(losses(two, None))


def losses(run, watched, last=8, before=lambda step: None):
    """Yield the loss of each step, as the loop makes it."""
    state = run.init()
    for step in range(1, last + 1):
        before(step)
        batch = run.batch(step - 1)
        if watched:
            watched.on_batch(step, batch)
        state, metrics = compiled_step(run, batch)(state, batch)
        if watched:
            watched.on_dispatch(step, metrics)
        yield float(metrics["loss"])


def asked_at(step, watched, workdir, **request):
    """Return the requests for a profile before a step."""
    def before(now):
        if now == step:
            profile_requests.request_profile(workdir, **request)
            watched._look(0.0)
    return before


@pytest.mark.slow
def test_a_profile_changes_no_loss_and_says_where_the_time_goes(two, plain, tmp_path, capsys):
    with Capture(two, tmp_path) as watched:
        assert list(losses(two, watched, before=asked_at(3, watched, tmp_path, steps=2))) == plain
    folder = tmp_path / "profiles" / "3"
    assert json.loads((folder / "profile.json").read_text())["steps"] == 2
    assert profile_requests.pending(tmp_path) is None
    assert command.main([str(folder)]) == 0
    shown = capsys.readouterr().out
    assert shown == (folder / "summary.txt").read_text() and shown.startswith("steps 3 to 4 on cpu\n")
    found, = json.loads((folder / "summary.json").read_text())["processes"]
    took = found["profile"]
    assert sum(took["kinds_ms"].values()) == pytest.approx(took["step_ms"]) and took["step_ms"] <= took["wall_ms"]
    assert sum(took["gaps_ms"].values()) == pytest.approx(took["kinds_ms"].get("gaps", 0.0))
    together = {*took["kinds_ms"], *took["hidden_ms"]}
    assert {"matmul", "attention", "optimizer", "all-gather over fsdp"} <= together


def test_a_trace_ends_with_the_last_step(two, tmp_path):
    """Later work, such as the last save, is not part of a step."""
    last = two.config.train.steps
    with Capture(two, tmp_path) as watched:
        profile_requests.request_profile(tmp_path, steps=5)
        watched._begun = last - 2
        watched._look(0.0)
        batch = two.batch(0)
        for step in (last - 1, last):
            watched.on_batch(step, batch)
            watched.on_dispatch(step, {})
        assert watched._tracing is None
    assert json.loads((tmp_path / "profiles" / f"{last - 1}" / "profile.json").read_text())["steps"] == 2


def test_a_profile_that_cannot_be_written_is_a_warning(two, plain, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Capture(two, tmp_path) as watched:
        with monkeypatch.context() as patch:
            patch.setattr(jax.profiler, "stop_trace", full)
            assert list(losses(two, watched, last=4, before=asked_at(2, watched, tmp_path, steps=1))) == plain[:4]
        assert "warning: the profile is not written: OSError: [Errno 28]" in capsys.readouterr().err
        assert [one["kind"] for one in events.events(tmp_path)] == ["profile_failed"]
        assert profile_requests.pending(tmp_path) is None
        assert list(losses(two, watched, last=2, before=asked_at(2, watched, tmp_path, steps=1))) == plain[:2]
    assert (tmp_path / "profiles" / "2" / "profile.json").exists()  # JAX lets another trace begin


def test_a_trace_that_somebody_else_takes_is_left_alone(two, tmp_path, capsys):
    other = tmp_path / "other"
    with jax.profiler.trace(other), Capture(two, tmp_path) as watched:
        list(losses(two, watched, last=2, before=asked_at(1, watched, tmp_path, steps=1)))
    assert "Only one profile may be run at a time" in capsys.readouterr().err and list(other.rglob("*.xplane.pb"))


def test_a_signal_asks_for_a_profile(two, tmp_path):
    with Capture(two, tmp_path) as watched:
        os.kill(os.getpid(), signal.SIGUSR2)
        watched._look(0.0)
        assert watched._wanted["steps"] == 5
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    ended = events.events(tmp_path)[-1]
    assert (ended["kind"], ended["why"]) == ("profile_failed", "the run ended before")


def test_processes_trace_the_same_steps(two, tmp_path, monkeypatch, capsys):
    first, second, late = (Capture(two, tmp_path) for _ in range(3))
    begun, batch = [], two.batch(0)
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **_: begun.append(Path(folder)))
    for number, each in enumerate((first, second, late)):
        each._alone, each._process, each._begun = False, number, 100
    wanted = profile_requests.request_profile(tmp_path, 2)
    second._look(2.0)  # the first process has not decided yet
    assert second._wanted is None
    first._look(2.0)
    second._look(2.0)
    assert first._wanted["first"] == second._wanted["first"] == 111  # at two steps a second, five seconds later
    for step in (110, 111):
        for each in (first, second):
            each.on_batch(step, batch)
    assert begun == [tmp_path / "profiles" / "111" / f"process-{number}" for number in range(2)]
    late._begun = 112  # one that learns of it later traces nothing
    late._look(2.0)
    late.on_batch(113, batch)
    assert len(begun) == 2 and events.events(tmp_path)[-1]["request"] == wanted
    assert "was to begin with step 111, and step 113 comes next" in capsys.readouterr().err


def test_only_the_processes_asked_for_trace(two, tmp_path):
    watched = Capture(two, tmp_path)
    watched._process, watched._alone = 1, False
    profile_requests.request_profile(tmp_path, 2, processes=1)
    profile_requests.agree(tmp_path, profile_requests.pending(tmp_path), 5)
    watched._look(0.0)
    assert watched._wanted is None


def test_a_request_is_refused_in_one_sentence(tmp_path, capsys):
    assert command.main([str(tmp_path)]) == 2
    assert "has no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert command.main([str(tmp_path)]) == 2
    (tmp_path / "config.json").write_text('{"train": {}}')
    assert command.main([str(tmp_path)]) == 2
    assert "no run is running in" in capsys.readouterr().err and profile_requests.pending(tmp_path) is None
    with pytest.raises(UserError, match="0 is out of range"):
        profile_requests.request_profile(tmp_path, 0)
    profile_requests.request_profile(tmp_path)
    with pytest.raises(UserError, match="a profile of 5 steps is under way"):
        profile_requests.request_profile(tmp_path)
    (tmp_path / profile_requests.FILE).write_text("{")
    profile_requests.request_profile(tmp_path, 3)
    profile_requests.withdraw(tmp_path, "another")
    assert profile_requests.pending(tmp_path)["steps"] == 3
    with pytest.raises(UserError, match="cannot be written"):
        profile_requests.request_profile(tmp_path / "none")


def test_who_asks_learns_why_there_is_no_profile(tmp_path, monkeypatch):
    """The first process decides; that another one came too late does not end the wait."""
    class Run:
        states = iter(())

        def __init__(self, workdir):
            self.looks = 0

        def state(self):
            return next(self.states, "running")

        def look(self):
            self.looks += 1
            if self.looks == 2 and not self.ends:
                request = profile_requests.pending(tmp_path)["id"]
                events.record(tmp_path, "profile_failed", request=request, why="the disk is full")

    monkeypatch.setattr(summary, "RecordedRun", Run)
    for Run.ends, Run.states, why in (
            (False, iter(()), r"could not write it \(the disk is full\)"),
            (True, iter(["running", "running", "failed"]), r"is failed before it was traced")):
        with pytest.raises(UserError, match=why):
            ask(tmp_path, 2, 8, 60.0, tick=0)
        assert profile_requests.pending(tmp_path) is None
    monkeypatch.setattr(jax._src.distributed.global_state, "process_id", 1)
    Run.ends, Run.states = False, iter(())
    with pytest.raises(UserError, match=r"has not answered for 0\.1 seconds"):
        ask(tmp_path, 2, 8, 0.1, tick=0)


@pytest.mark.parametrize("count", exhaustive(1, 2))
def test_a_run_is_profiled_while_it_trains(count, tmp_path_factory, tmp_path):
    """A command outside requests it; in one process the losses are those of a run that was not profiled."""
    keys = [*TWO, f"train.steps={100 + 20 * count}", "resilience.check_every=0"]
    words = [*tiny_flags(tmp_path_factory, keys), f"--workdir={tmp_path}/work"]
    several = [f"--coordinator={free_address()}", f"--num_processes={count}"] if count > 1 else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": virtual_devices(2 // count)}
    started = [subprocess.Popen(
        [sys.executable, "-c", SLOW % 0.1, *words, *several, *[f"--process_id={n}"] * bool(several)], env=environment,
        stderr=subprocess.PIPE, text=True) for n in range(count)]
    try:
        wait_for_lines(tmp_path / "work", 3, started[0])
        folder = ask(tmp_path / "work", 3, 8, 300)
        shown = summarise(folder)
        for each in started:
            assert each.wait(300) == 0, each.stderr.read()
    finally:
        for each in started:
            each.kill()
    about = json.loads((folder / "summary.json").read_text())
    assert shown.startswith(f"steps {about['first']} to {about['first'] + 2} on cpu\n")
    assert len(about["processes"]) == count and about["steps"] == 3
    if count == 1:  # a tenth of a second for each batch, behind which a slow exchange between processes can hide
        assert "of the gaps: data_wait" in shown
    if count == 1:
        from jaxtrain.main import main

        alone = [f"--workdir={tmp_path}/alone" if word.startswith("--workdir") else word for word in words]
        subprocess.run([sys.executable, "-m", main.__module__, *alone], env=environment, check=True)
        mine, theirs = ([json.loads(line).get("loss") for line in (tmp_path / name / "metrics.jsonl").open()]
                        for name in ("work", "alone"))
        np.testing.assert_array_equal(mine, theirs)

