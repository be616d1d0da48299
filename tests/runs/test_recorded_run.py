"""Reading the folder of a run, again as it grows and as lines are taken back."""

import json
import math
import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.runs import run_index, top
from jaxtrain.runs.recorded_run import RecordedRun
from jaxtrain.runs.report.run_curves import RunCurves
from jaxtrain.runs.report.run_facts import summary
from tests.runs.folders import make


def test_a_run_is_read_as_it_grows(tmp_path):
    def wrote(*lines, end="\n"):
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + end)
        run.look()

    def start(number, **said):
        (tmp_path / "ledger" / f"{number:04}.json").write_text(json.dumps(
            {"began": now - 100, "seconds": {"step": 95}, "resumed": 0, "reached": [2, 90], "last_step": 9} | said))
        run.look()
        return run.state()

    now = time.time()
    with pytest.raises(UserError, match=r"WORKDIR: .* has no config.json; give the workdir of a run"):
        RecordedRun(tmp_path)
    (tmp_path / "config.json").write_text('{"train": {"steps": 9}}')
    (tmp_path / "ledger").mkdir()
    run = RecordedRun(tmp_path)
    assert (run.step, run.last_step, run.state(), run.checkpoints) == (0, 9, "new", [])
    first = {"step": 1, "loss": 3.0, "goodput": 0.5}, {"step": 1, "eval_loss": 2.5}, {"step": 2, "loss": None, "mfu": 1}
    wrote(*first, {"step": 3}, end="")
    assert run.steps["step"].tolist() == [1, 2] and run.evaluations["eval_loss"].tolist() == [2.5]
    np.testing.assert_array_equal(run.steps["loss"], [3.0, math.nan])
    np.testing.assert_array_equal(run.steps["mfu"], [math.nan, 1.0])
    np.testing.assert_array_equal(run.steps["goodput"], [0.5, math.nan])
    assert run.steps.last == first[-1] and set(run.steps) == {"step", "loss", "goodput", "mfu"}
    wrote(first[0], {"step": 2, "loss": 2.0}, {"step": 3, "loss": 1.0})
    assert run.steps["loss"].tolist() == [3.0, 2.0, 1.0] and not len(run.evaluations), "lines were taken back"
    (tmp_path / "events.jsonl").write_text('{"kind": "hang"}\n{"kind')
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    (tmp_path / "evaluations").mkdir()
    for results in [{"step": 1, "eval_t_acc": 0.5}, {"step": 2, "eval_t_acc": 0.7}], [{"step": 2, "eval_t_acc": 0.9}]:
        (tmp_path / "evaluations" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in results))
        run.look()
        assert run.results["eval_t_acc"].tolist() == [line["eval_t_acc"] for line in results]
    assert start(1, seconds={"step": 60}) == "silent" and start(1) == "running"
    assert run.events == [{"kind": "hang"}] and run.checkpoints == [2] and run.account.step == 2
    assert start(1, ended="failed") == "failed" and start(2, ended="finished") == "finished"
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    beats = {"phase": "train", "time": now, "pid": killed.pid, "host": socket.gethostname()}
    (tmp_path / "heartbeats").mkdir()
    for said, state in (({}, "silent"), ({"pid": os.getpid()}, "running"), ({"host": "another"}, "running"),
                        ({"time": now - 200}, "running"), ({"phase": "ended"}, "running")):
        (tmp_path / "heartbeats" / "process-0").write_text(json.dumps(beats | said))
        assert start(3) == state, said


def test_a_heartbeat_is_a_sign_of_life_where_the_ledger_is_not_written(tmp_path):
    """The list of runs, the panel and the report ask the same function."""
    now = time.time()
    run = make(tmp_path / "run", ended="", began=now - 9000)
    (run / "heartbeats").mkdir()

    def beat(process=0, **said):
        (run / "heartbeats" / f"process-{process}").write_text(json.dumps(
            {"step": 3, "begun": 4, "phase": "train", "time": now - 2, "pid": os.getpid(), "host": "another"} | said))

    def states():
        watched = top.Watched(run)
        watched.look()
        recorded = RecordedRun(run)
        found = {run_index.summary(run, now).state, top.reading(watched, now).state, recorded.state(now),
                 summary(RunCurves(recorded, ""))["state"]}
        assert len(found) == 1
        return found.pop(), recorded.sign

    silent = ("silent", pytest.approx(now - 7000))
    assert states() == silent
    for said, expected in (({}, ("running", now - 2)), ({"phase": "ended"}, silent), ({"time": 10**400}, silent),
                           ({"time": now - 40}, ("silent", now - 40)), ({"time": now - 8000}, silent)):
        beat(**said)
        assert states() == expected, said
    beat(3, phase="save")
    assert states() == ("running", now - 2), "of any process"
    ledger = run / "ledger" / "0001.json"
    ledger.write_text(json.dumps(json.loads(ledger.read_text()) | {"ended": "stopped"}))
    assert states() == ("running", now - 2), "of a start after the last one in the ledger"
    beat(3, time=now - 6980)
    assert states()[0] == "stopped", "written while it ended"
    ledger.unlink()
    assert states()[0] == "silent"
    beat(0)
    assert states() == ("running", now - 2)
