"""The files of runs that may be deleted, and above all those that may not."""

import json
import os
import socket
import time
from pathlib import Path

import pytest

from jaxtrain.commands.runs import main
from jaxtrain.distributed.run_lock import locked
from jaxtrain.runs import run_garbage, tags
from tests.runs.folders import RUN, checkpoint, make


def found(root, keep=1, **keys):
    return sorted(f"{one.path.relative_to(root)}" for one in run_garbage.below(f"{root}", 4, keep, **keys).garbage)


def everything(root):
    return {f"{path.relative_to(root)}" for path in root.rglob("*")}


def littered(workdir, **keys):
    """A run with one of each kind of leftover, and what only looks like one."""
    run = make(workdir, checkpoints=(1, 2, 3, 4), **keys)
    for name in ("1.damaged", "2.abandoned.2", "3.deleted", "9.orbax-checkpoint-tmp", "9.fetching", "2.misplaced",
                 "3.set_aside", "notes.damaged"):
        checkpoint(run, 9, name)
    (run / "metrics.rolled_back.jsonl").write_text("{}\n")
    (run / "notes.txt").write_text("mine")
    return run


LEFT = ["checkpoints/1.damaged", "checkpoints/2.abandoned.2", "checkpoints/3.deleted", "checkpoints/9.fetching",
        "checkpoints/9.orbax-checkpoint-tmp", "metrics.rolled_back.jsonl"]


def test_what_is_found_is_shown_and_then_deleted(tmp_path, capsys):
    run = littered(tmp_path / "run")
    make(tmp_path / "empty", steps=0, ended="failed")
    (tmp_path / "empty" / "mlflow").mkdir()
    (tmp_path / "empty" / "trace_id").write_text("1")
    before = everything(tmp_path)
    wanted = sorted(["empty", *(f"run/{name}" for name in [*(f"checkpoints/{step}" for step in (1, 2, 3)), *LEFT])])
    assert found(tmp_path) == wanted and found(tmp_path, keep=3) == sorted({*wanted} - {
        "run/checkpoints/2", "run/checkpoints/3"})
    assert main(["gc", f"{tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert everything(tmp_path) == before and "nothing was deleted; --delete does it" in shown
    assert "run/checkpoints/1.damaged" in shown and "kB" in shown and "a run that never trained" in shown
    assert main(["gc", f"{tmp_path}", "--json", "--dry_run"]) == 0
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(f"{Path(one['path']).relative_to(tmp_path)}" for one in listed) == wanted
    assert main(["gc", f"{tmp_path}", "--dry_run", "--delete"]) == 2 and everything(tmp_path) == before
    capsys.readouterr()
    assert main(["gc", f"{tmp_path}", "--delete"]) == 0 and "kB were freed" in capsys.readouterr().out
    gone = {name for name in before if any(name == one or name.startswith(f"{one}/") for one in wanted)}
    assert everything(tmp_path) - {"run/lock"} == before - gone, "nothing else is touched"
    assert (run / "checkpoints" / "4" / "good.json").exists()
    assert main(["gc", f"{tmp_path}", "--delete"]) == 0 and "0 B were freed" in capsys.readouterr().out
    assert main(["gc", f"{tmp_path}", "--keep=0"]) == 2 and "without a checkpoint" in capsys.readouterr().err


def test_of_runs_that_did_not_finish_all_checkpoints_stay(tmp_path):
    littered(tmp_path / "run", ended="stopped")
    assert found(tmp_path) == [f"run/{name}" for name in LEFT]


@pytest.mark.parametrize(("keep_every", "best", "old"), [(2, "", (1, 3)), (0, "loss", (1, 3)), (0, "accuracy", ())])
def test_what_the_config_keeps_forever_stays(tmp_path, keep_every, best, old):
    """All of them stay where the best one cannot be told."""
    run = make(tmp_path / "run", checkpoints=(1, 2, 3, 4), config={
        "checkpoint": {"keep_every": keep_every, "best": best}})
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().replace('"loss": 3.0', '"loss": 0.5'))
    assert found(tmp_path) == [f"run/checkpoints/{step}" for step in old]


def test_the_newest_good_checkpoint_stays(tmp_path):
    """Good is one whose files are there as they were; what is newer and not good does not count."""
    run = make(tmp_path / "run", checkpoints=(1, 2, 3, 4))
    (run / "checkpoints" / "4" / "state" / "data").write_bytes(b"cut")
    (run / "checkpoints" / "3" / "good.json").write_text("{}")
    assert found(tmp_path) == ["run/checkpoints/1"]
    for step in (1, 2):
        (run / "checkpoints" / f"{step}" / "good.json").unlink()
    assert found(tmp_path) == []


def test_checkpoints_with_which_other_runs_began_stay(tmp_path):
    base = make(tmp_path / "base", checkpoints=(1, 2, 3, 4))
    make(tmp_path / "tuned", run={"init_from": {"workdir": f"{base}", "step": 2, "parameters": "x"}})
    make(tmp_path / "student", config={"preference": {"reference": f"{base}@3"}})
    assert found(tmp_path) == ["base/checkpoints/1"]


@pytest.mark.parametrize("place", ["runs/base", "/elsewhere/base", "model:/elsewhere/base"])
def test_they_stay_wherever_they_were_said_to_be(tmp_path, place):
    """Relative to another folder, on another mount, as a reward model, or deep in what is recorded."""
    make(tmp_path / "base", checkpoints=(1, 2, 3, 4))
    make(tmp_path / "tuned", config={"rl": {"reward": place, "more": [{"x": f"{place}@1"}]}}, run={
        "init_from": {"folder": "x", "base": {"workdir": place.removeprefix("model:"), "step": 2}},
        "own_parts": {"data": {"identity": {"reward_model": {"step": 3, "fingerprint": "x"}}}}})
    assert found(tmp_path) == ([] if place.startswith("model:") else ["base/checkpoints/3"])


def test_a_damaged_checkpoint_stays_until_a_good_one_is_as_new(tmp_path):
    run = make(tmp_path / "run", checkpoints=(1, 2))
    for name in ("1.damaged", "3.damaged", "3.abandoned", "3.deleted"):
        checkpoint(run, 9, name)
    assert found(tmp_path, keep=2) == ["run/checkpoints/1.damaged", "run/checkpoints/3.deleted"]


def test_a_run_that_may_have_trained_stays(tmp_path):
    make(tmp_path / "mirrored", steps=0, ended="failed", config={"checkpoint": {"mirror": "s3://bucket/run"}})
    torn = make(tmp_path / "torn", ended="failed")
    (torn / "metrics.jsonl").write_bytes(bytes(2**17))
    (torn / "ledger" / "0001.json").write_bytes(bytes(100))
    for path in torn.glob("*.json*"):
        os.utime(path, (1e9, 1e9))
    assert found(tmp_path) == []


def test_runs_that_may_be_running_are_left_alone(tmp_path, capsys):
    by_ledger = littered(tmp_path / "ledger", ended="", began=time.time() - 2000)
    by_heartbeat = littered(tmp_path / "heartbeat")
    (by_heartbeat / "heartbeats").mkdir()
    (by_heartbeat / "heartbeats" / "process-0").write_text(json.dumps(
        {"step": 1, "phase": "train", "pid": os.getpid(), "host": socket.gethostname()}))
    begun = make(tmp_path / "begun", steps=0, ended="", began=time.time() - 2000)
    before = everything(tmp_path)
    assert main(["gc", f"{tmp_path}", "--delete"]) == 0
    said = capsys.readouterr()
    assert everything(tmp_path) == before and "0 B were freed" in said.out
    assert f"{by_ledger}: kept: it is running" in said.err and f"{begun}: kept" in said.err
    assert f"{by_heartbeat}: kept: process 0 of this run" in said.err


def test_a_run_that_was_killed_is_dead_after_an_hour(tmp_path, capsys):
    run = littered(tmp_path / "run", ended="", began=time.time() - 2000 - 600)
    main(["gc", f"{tmp_path}"])
    assert "kept: it did not say that it ended, and was alive 0 s ago" in capsys.readouterr().err
    for path in run.glob("*.json*"):
        os.utime(path, (1e9, 1e9))
    assert not found(tmp_path), "by its ledger it was alive ten minutes ago"
    littered(tmp_path / "older", ended="", began=time.time() - 9000)
    for path in (tmp_path / "older").glob("*.json*"):
        os.utime(path, (1e9, 1e9))
    assert found(tmp_path) == [f"older/{name}" for name in LEFT]


def test_a_run_that_starts_meanwhile_is_left_alone(tmp_path):
    """Between the look and the deletion: it holds its lock, or was tagged, or its newest checkpoint was damaged."""
    run = littered(tmp_path / "run")
    seen, before = run_garbage.below(f"{tmp_path}", 4, 1), everything(tmp_path)
    with locked(run, 0) as other:
        assert not other
        freed, failed = run_garbage.delete(seen, 1)
    assert freed == 0 and "works in it" in failed[0] and everything(tmp_path) == before | {"run/lock"}
    tags.change(run, ["mine"])
    assert run_garbage.delete(seen, 1)[0] == 0
    tags.change(run, ["mine"], remove=True)
    (run / "checkpoints" / "4" / "state" / "data").unlink()
    run_garbage.delete(seen, 1)
    assert (run / "checkpoints" / "3" / "state" / "data").exists() and not (run / "checkpoints" / "2").exists()


def test_tagged_and_damaged_runs_and_links_are_left_alone(tmp_path, capsys):
    tags.change(littered(tmp_path / "tagged"), ["baseline"])
    (littered(tmp_path / "torn") / "config.json").write_text("{")
    (littered(tmp_path / "other") / "tags.json").write_text("{")
    elsewhere = littered(tmp_path / "store" / "real", ended="failed")
    linked = make(tmp_path / "linked")
    os.symlink(elsewhere / "checkpoints", linked / "checkpoints")
    os.symlink(elsewhere, make(tmp_path / "holder", checkpoints=(4,)) / "checkpoints" / "3.damaged")
    bare = make(tmp_path / "bare", steps=0, ended="failed")
    (bare / "notes.txt").write_text("mine")
    make(tmp_path / "queued", steps=0, ended="failed", run=RUN).joinpath("jobs").mkdir()
    assert found(tmp_path) == [f"store/real/{name}" for name in LEFT]
    main(["gc", f"{tmp_path}"])
    said = capsys.readouterr().err
    assert "tagged baseline" in said and "behind a link" in said and "not valid JSON" in said
    assert len(found(tmp_path, tagged=True)) == 2 * len(LEFT) + 3


def test_what_cannot_be_deleted_is_said(tmp_path, capsys, monkeypatch):
    littered(tmp_path / "run")
    make(tmp_path / "7", steps=0, ended="failed")

    def fails(path):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(run_garbage.shutil, "rmtree", fails)
    with pytest.raises(SystemExit):
        main(["gc", f"{tmp_path}", "--delete"])
    assert "cannot be deleted (Operation not permitted)" in capsys.readouterr().err
    assert (tmp_path / "7").exists(), "it has its name"
