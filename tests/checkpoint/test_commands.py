"""jaxtrain checkpoint: what a person sees at night, and the way back."""

import contextlib
import json
import os
import re
import shutil
import socket
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.checkpoint import CheckpointManager, LocalCheckpoints, commands, verify
from jaxtrain.checkpoint.mirror import Mirror
from jaxtrain.commands.checkpoint import main
from jaxtrain.distributed.run_lock import locked
from jaxtrain.files.work_progress import Work
from tests.odd_files import ODD, WRONG, in_time

HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
ABSTRACT = {"w": jax.ShapeDtypeStruct((64, 8), np.float32, sharding=HERE),
            "n": jax.ShapeDtypeStruct((), np.int32, sharding=HERE)}


def state_of(step):
    return {"w": jax.numpy.arange(512.0).reshape(64, 8) * (1 if step < 30 else 2), "n": jax.numpy.int32(step)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with good checkpoints of steps 10, 20 and 30."""
    work = tmp_path_factory.mktemp("made") / "work"
    work.mkdir()
    with contextlib.closing(CheckpointManager(work / "checkpoints", keep=9)) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, state_of(step), {"step": step, "loss": 4 - step / 10, "mesh": {"data": 4, "fsdp": 1},
                                                    "time": 1e9, "config": {"train": {"steps": 40}}})
        checkpoints.wait()
    (work / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, 34)))
    return work


@pytest.fixture
def work(made, tmp_path):
    shutil.copytree(made, tmp_path / "work")
    return tmp_path / "work"


def configured(work, **keys):
    (work / "config.json").write_text(json.dumps({"checkpoint": keys}))


def ran(capsys, *argv):
    status = 0
    try:
        status = main([*map(str, argv)])
    except SystemExit as stop:
        status = stop.code
    out = capsys.readouterr()
    return status, out.out, out.err


def cells(out):
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.splitlines()]


def damage(work, step):
    next((work / "checkpoints" / str(step)).rglob("state/d/*")).write_bytes(b"nonsense")


def test_verify_tells_how_far_it_is(made, monkeypatch):
    """The bytes read add up to the bytes there are to read; the line is for people, on stderr."""
    counted = []
    monkeypatch.setattr(Work, "add", lambda work, amount: counted.append((work.total, amount)))
    assert all(one.good for one in commands.verified(made, [10]))
    assert {total for total, _ in counted} == {sum(amount for _, amount in counted)} and len(counted) > 3


def test_list(work, tmp_path, capsys):
    place = str(tmp_path / "second")
    configured(work, mirror=place, local_dir=str(tmp_path / "local"))
    Mirror(work / "checkpoints", place).send(10)
    Mirror(work / "checkpoints", place).send(20)
    shutil.rmtree(work / "checkpoints" / "10")
    (work / "checkpoints" / "30" / "good.json").unlink()
    (work / "checkpoints" / "25.damaged").mkdir()
    (work / "checkpoints" / "40.orbax-checkpoint-tmp").mkdir()
    with contextlib.closing(LocalCheckpoints(work, 1, str(tmp_path / "local"))) as snapshots:
        snapshots.take(33, state_of(33), {"loss": 0.5})
    status, out, err = ran(capsys, "list", work)
    assert status == 0 and err == ""
    lines = cells(out)
    assert lines[0] == ["step", "state", "where", "size", "age", "loss", "mesh"]
    assert lines[1][:3] == ["10", "only in the mirror", "mirror"] and lines[1][-2:] == ["3.0000", "data=4"]
    assert lines[2][:3] == ["20", "good", "local, mirror"]
    assert lines[3][:3] == ["30", "not verified yet: the next start of the run does it, or `verify` here", "local"]
    assert lines[4][:2] == ["25", "damaged: found by verification and not used (25.damaged)"]
    assert lines[5][1].startswith("not complete: being written, or the run ended meanwhile")
    assert lines[6][:3] == ["33", "in memory", "snapshot"] and "0.5000" in lines[6]
    rows = [json.loads(line) for line in ran(capsys, "list", work, "--json")[1].splitlines()]
    assert [row["step"] for row in rows] == [10, 20, 30, 25, 40, 33] and rows[1]["where"] == ["local", "mirror"]
    assert (rows[1]["loss"], rows[1]["mesh"]["data"], rows[1]["time"]) == (2.0, 4, 1e9) and rows[1]["size"] > 1000
    assert "\nthe run resumes from step 30 if it reads back whole, else from step 20, or from a newer snapshot; " in out


def test_list_sees_files_that_are_gone(work, capsys):
    next((work / "checkpoints" / "30").rglob("state/d/*")).unlink()
    for part in ("state", "meta", "fingerprint"):
        shutil.rmtree(work / "checkpoints" / "20" / part)
    lines = cells(ran(capsys, "list", work)[1])
    assert re.fullmatch(r"damaged: state/d/\S+ is missing", lines[3][1])
    assert lines[2][1] == "damaged: its files are gone"
    assert lines[4][0].startswith("the run resumes from step 10; `good` says that")


def test_list_with_nothing_there(tmp_path, capsys):
    assert ran(capsys, "list", tmp_path) == (0, f"{tmp_path} has no checkpoints yet\n", "")
    (tmp_path / "chapter.txt").touch()
    status, _, err = ran(capsys, "list", tmp_path)
    assert status == 2 and err.startswith(f"WORKDIR: {tmp_path} is not a run's workdir")


def test_verify(work, capsys):
    status, out, _ = ran(capsys, "verify", work)
    assert status == 0 and out.count("all is as it was saved") == 3
    damage(work, 20)
    status, out, _ = ran(capsys, "verify", work)
    assert status == 1 and "step 20: damaged: state/d/" in out and out.count("good:") == 2
    assert ran(capsys, "verify", work, 30)[0] == 0 and ran(capsys, "verify", work, 20)[0] == 1


def test_diff(work, capsys):
    status, out, _ = ran(capsys, "diff", work, 10, 30)
    assert status == 0
    assert "step: 10 -> 30\n" in out and "loss: 3.0 -> 1.0\n" in out
    assert "array w float32[64, 8]: 511 of 512 elements differ, by at most 511\n" in out
    assert "array n int32[]: 1 of 1 elements differ, by at most 20\n" in out
    assert out.endswith("0 of 2 arrays are the same, bit by bit\n")
    assert ran(capsys, "diff", work, 20, work, 20)[1] == "2 of 2 arrays are the same, bit by bit\n"


def test_restore_to_and_undo(work, tmp_path, capsys):
    place, local = str(tmp_path / "second"), str(tmp_path / "local")
    configured(work, mirror=place)
    for step in (20, 30):
        Mirror(work / "checkpoints", place).send(step)
    with contextlib.closing(LocalCheckpoints(work, 1, local)) as snapshots:
        snapshots.take(33, {"w": state_of(33)["w"]})
    before = sorted(work.rglob("*"))
    status, out, _ = ran(capsys, "restore-to", work, 20, "--dry_run")
    assert (status, out) == (0, "the run would go on from step 20; checkpoints that would be set aside: 30\n")
    assert sorted(work.rglob("*")) == before
    status, out, err = ran(capsys, "restore-to", work, 20)
    assert status == 0 and err == "" and out.startswith("The run goes on from step 20 when it is started again")
    assert "- checkpoint 30 is now 30.set_aside\n" in out and "the mirror's copies of 30 are no longer used" in out
    assert verify.steps(work / "checkpoints") == [10, 20] and Mirror(work / "checkpoints", place).steps() == [20]
    with contextlib.closing(LocalCheckpoints(work, 1, local)) as snapshots:
        assert snapshots.restore_newest({"w": ABSTRACT["w"]}) is None
    with contextlib.closing(CheckpointManager(work / "checkpoints")) as checkpoints:
        assert checkpoints.restore_newest(ABSTRACT)[0] == 20
    for line in out.partition("To undo this")[2].splitlines()[1:]:
        _, source, target = line.split()
        shutil.move(source, target)
    with contextlib.closing(CheckpointManager(work / "checkpoints", mirror=place)) as checkpoints:
        assert checkpoints.restore_newest(ABSTRACT)[0] == 30
        checkpoints.wait()
    assert Mirror(work / "checkpoints", place).steps() == [20, 30]
    assert (work / "metrics.jsonl").read_text().count("\n") == 33


def test_twice_deletes_nothing(work, capsys):
    ran(capsys, "restore-to", work, 20)
    shutil.copytree(work / "checkpoints" / "20", work / "checkpoints" / "30")
    assert "30.set_aside.2" in ran(capsys, "restore-to", work, 20)[1]


@pytest.mark.parametrize("words, said", [
    (["list", "nowhere"], "WORKDIR: there is no folder nowhere; give the --workdir of the run"),
    (["verify", "WORK", "7"], "has no checkpoint of step 7; it has 10, 20, 30"),
    (["diff", "WORK", "10"], "does not name two checkpoints"),
    (["diff", "WORK", "10", "x"], "does not name two checkpoints"),
    (["restore-to", "WORK", "15"], "has no checkpoint of step 15; it has 10, 20, 30"),
    (["restore-to", "WORK", "20"], "is damaged"), (["restore-to", "WORK", "20", "--dry_run"], "is damaged"),
    (["restore-to", "WORK", "10"], r"another run is using .* \(process [0-9]+ on .*\); stop it"),
    (["restore", "WORK"], "invalid choice"),
    ([], "command line: "),
], ids=lambda words: "-".join(words) if isinstance(words, list) else "")
def test_mistakes(made, tmp_path, capsys, words, said):
    work = made
    if words[:1] == ["restore-to"]:
        work = tmp_path / "work"
        shutil.copytree(made, work)
        damage(work, 20)
    with locked(work, 0) if words[2:] == ["10"] else contextlib.nullcontext():
        status, _, err = ran(capsys, *[str(work) if word == "WORK" else word for word in words])
    assert status == 2 and err.count("\n") == 1 and re.search(said, err)


@pytest.mark.parametrize("beat, refused", [
    ({"phase": "train", "pid": 1, "host": "elsewhere"}, True),  # some file systems lock within one machine only
    ({"phase": "train", "pid": os.getpid(), "host": socket.gethostname()}, True),
    ({"phase": "train", "pid": 2**22 + 1, "host": socket.gethostname()}, False),  # there is no such process
    ({"phase": "ended", "pid": 1, "host": "elsewhere"}, False),
])
def test_a_heartbeat_tells_of_a_run_that_locks_do_not_show(work, capsys, beat, refused):
    (work / "heartbeats").mkdir()
    (work / "heartbeats" / "process-0").write_text(json.dumps(beat))
    status, _, err = ran(capsys, "restore-to", work, 10)
    assert status == (2 if refused else 0)
    if refused:
        assert f"process 0 of this run ({beat['host']}) was alive" in err and "60 s later" in err
        os.utime(work / "heartbeats" / "process-0", (1e9, 1e9))
        assert ran(capsys, "restore-to", work, 10)[0] == 0


@pytest.mark.parametrize("part", ["meta/metadata", "fingerprint/metadata", "state/manifest.ocdbt"])
@pytest.mark.parametrize("harm", [
    Path.unlink, lambda path: path.write_bytes(b"nonsense"), lambda path: (path.unlink(), os.mkfifo(path))],
    ids=["gone", "nonsense", "pipe"])
def test_a_difference_from_a_damaged_one_is_one_line(work, capsys, part, harm):
    harm(work / "checkpoints/10" / part)
    status, _, err = in_time(lambda: ran(capsys, "diff", work, 10, 20))
    assert status == 2 and err.count("\n") == 1 and "run `jaxtrain checkpoint verify` to see what is damaged" in err


def test_list_says_where_the_run_goes_on(work, tmp_path, capsys):
    place = str(tmp_path / "second")
    configured(work, mirror=place)
    Mirror(work / "checkpoints", place).send(20)
    next((work / "checkpoints" / "20").rglob("state/d/*")).unlink()
    (work / "checkpoints" / "30" / "good.json").unlink()
    assert "the run resumes from step 30 if it reads back whole, else from step 20;" in ran(capsys, "list", work)[1]
    with contextlib.closing(CheckpointManager(work / "checkpoints", mirror=place)) as checkpoints:
        assert checkpoints.newest() == 30 and checkpoints.newest(below=30) == 20


@pytest.mark.parametrize("make", [*ODD, *WRONG], ids=lambda make: make.__name__)
def test_list_whatever_lies_in_place_of_the_config(work, capsys, make):
    (work / "config.json").unlink(missing_ok=True)
    make(work / "config.json")
    assert in_time(lambda: ran(capsys, "list", work))[0] == 0


@pytest.mark.parametrize("config", [{"checkpoint": None}, {"checkpoint": {"mirror": 3}}, {"checkpoint": [1]}])
def test_list_with_a_config_of_another_form(work, capsys, config):
    (work / "config.json").write_text(json.dumps(config))
    assert ran(capsys, "list", work)[0] == 0


@pytest.mark.parametrize("meta", [{"time": "x"}, {"mesh": 3}, {"mesh": {"data": "x"}}])
def test_list_with_metadata_of_another_form(work, capsys, meta):
    record = verify.read_mark(work / "checkpoints", 20)
    del record["sha256"]
    (work / "checkpoints" / "20" / "good.json").write_bytes(verify._sealed(record | {"meta": meta}))
    assert ran(capsys, "list", work)[0] == 0


def test_a_pipe_in_place_of_the_metrics_is_not_copied(work, capsys):
    (work / "metrics.jsonl").unlink(missing_ok=True)
    os.mkfifo(work / "metrics.jsonl")
    assert in_time(lambda: ran(capsys, "restore-to", work, 10))[0] == 0
