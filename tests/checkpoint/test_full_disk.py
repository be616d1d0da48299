"""A save that fails costs that checkpoint only: the run goes on, what was good stays, and the next save tries again."""

import contextlib
import errno
import json
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.checkpoint import CheckpointManager, full_disk, manager, step_folders, verify
from jaxtrain.checkpoint.orbax.async_saver import AsyncSaver
from jaxtrain.checkpoint.orbax.barrier import Barrier
from jaxtrain.checkpoint.orbax.orbax_logging import orbax
from jaxtrain.commands import train
from jaxtrain.distributed import exit_codes, processes
from jaxtrain.errors import UserError
from jaxtrain.observe import Constants, MetricsWriter
from jaxtrain.observe.events import events


def state_of(step):
    return {"w": jax.random.normal(jax.random.key(step), (1 << 18,)), "step": jnp.int32(step)}  # 1 MiB


@pytest.fixture
def small(tmp_path):
    """A real file system of 5 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("may not mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def unseen(monkeypatch):
    """The file system reports free space, as it does where a quota is what limits it."""
    monkeypatch.setattr(step_folders.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))


def fails(checkpoints, step, reason):
    checkpoints.save(step, state_of(step))
    told = f"^checkpoint: step {step} could not be saved in .*{reason}.*; free space"
    with pytest.raises(manager.NotSaved, match=told):
        checkpoints.wait()


def test_a_full_disk(small, unseen, capfd):
    (small / "ballast").write_bytes(bytes(7 << 19))
    checkpoints = CheckpointManager(small / "c", keep=9)
    checkpoints.save(1, state_of(1))
    checkpoints.wait()
    fails(checkpoints, 2, "No space left")
    fails(checkpoints, 3, "No space left")
    assert verify.steps(small / "c") == [1] and verify.verify(small / "c", 1) == []
    assert not list((small / "c").glob("*tmp*"))  # halves do not fill the disk for good
    (small / "ballast").unlink()
    checkpoints.save(4, state_of(4))
    checkpoints.wait()
    checkpoints.close()
    assert checkpoints.newest() == 4 and verify.steps(small / "c") == [1, 4]
    err = capfd.readouterr().err
    assert "Traceback" not in err and err.count("the next save tries again") == 2
    assert next(event["kind"] for event in events(small)) == "checkpoint"


TENSORSTORE = ValueError("RESOURCE_EXHAUSTED: Error writing \"c/2/d/ab\": Failed to write: [os_error_code='28' "
                         "source locations='file_util_posix.cc:270']")


@pytest.mark.parametrize("begun", [True, False])  # whether it fails in the background
@pytest.mark.parametrize(("error", "reason"), [
    (OSError(errno.ENOSPC, "No space left on device"), "No space left on device: 4 bytes are needed, and 7 are free"),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded: 4 bytes are needed, and 7 are free"),
    (OSError(errno.EROFS, "Read-only file system"), r"OSError: \[Errno 30\] Read-only file system"),
    (TENSORSTORE, "No space left on device: 4 bytes are needed, and 7 are free")])
def test_one_sentence_says_what_is_needed_and_where_it_resumes(tmp_path, monkeypatch, capfd, error, reason, begun):
    (tmp_path / "c" / "1").mkdir(parents=True)
    monkeypatch.setattr(step_folders.shutil, "disk_usage", lambda path: SimpleNamespace(free=7))
    checkpoints = CheckpointManager(tmp_path / "c")

    def broken(*_):
        try:
            raise error
        except (OSError, ValueError) as cause:
            raise ValueError("NOT_FOUND: a long message of Orbax") from cause

    monkeypatch.setattr(AsyncSaver, "save", (lambda *_: None) if begun else broken)
    monkeypatch.setattr(AsyncSaver, "wait", broken)
    monkeypatch.setattr(AsyncSaver, "drain", lambda self: None)
    checkpoints.save(2, {"step": jnp.int32(2)})
    with pytest.raises(manager.NotSaved, match=rf"^checkpoint: step 2 could not be saved in {tmp_path}/c \({reason}\); "
                       r"free space .*: it resumes from step 1$"):
        checkpoints.wait()
    assert re.fullmatch(rf"checkpoint 2 could not be saved \({reason}\); .*\n", capfd.readouterr().err)
    assert full_disk.why_not_written(tmp_path, 2, 4, "OSError: [Errno 28] No space left on device in process 1") == (
        "No space left on device in process 1: 4 bytes are needed, and 7 are free")
    assert f"{manager.NotSaved(1, tmp_path / 'c', '')}".endswith("it begins again at step 0")


def test_a_failure_of_one_process_while_a_save_begins_is_one_sentence(tmp_path, monkeypatch, capfd):
    (tmp_path / "c").mkdir()
    checkpoints = CheckpointManager(tmp_path / "c")
    monkeypatch.setattr(AsyncSaver, "save", lambda *_: exec("raise OSError(28, 'No space left on device')"))
    monkeypatch.setattr(manager.CheckpointManager, "_may_be_saved", lambda *_: True)
    monkeypatch.setattr(manager.jax, "process_count", lambda: 2)
    monkeypatch.setattr(Barrier, "begin", lambda *_: None)
    with pytest.raises(manager.NotSaved, match=r"needed, and .* are free") as failed:
        checkpoints.save(2, {"step": jnp.int32(2)})
    assert failed.value.alone and failed.value.__suppress_context__
    monkeypatch.setattr(processes, "processes", lambda: 2)
    monkeypatch.setattr(processes.os, "_exit", sys.exit)
    monkeypatch.setattr(train, "run", lambda *_: (_ for _ in ()).throw(failed.value))
    with pytest.raises(SystemExit) as end:
        train.main(["--config=configs/gpt.py"])
    assert end.value.code == exit_codes.RESTART and capfd.readouterr().err == f"{failed.value}\n"


def test_writes_that_fail_beside_another_print_no_traceback(caplog):
    """Orbax raises one failure and forgets the others, which asyncio prints at the end of the process."""
    orbax()
    mine = "/site-packages/orbax/checkpoint/_src/path/async_path.py"
    with pytest.raises(OSError, match="No space") as of_orbax:
        exec(compile("raise OSError(28, 'No space left on device')", mine, "exec"))
    for error, printed in (of_orbax.value, False), (TENSORSTORE, False), (OSError(28, "of a user's own code"), True):
        caplog.clear()
        logging.getLogger("asyncio").error("Future exception was never retrieved", exc_info=error)
        assert bool(caplog.records) == printed, error
    logging.getLogger("asyncio").error("another message", exc_info=of_orbax.value)
    assert caplog.records[-1].getMessage() == "another message"


def test_a_disk_without_a_byte(small, unseen, capfd):
    """Whatever Orbax could not write then, it does not hold against the next save."""
    with CheckpointManager(small / "c") as checkpoints:
        checkpoints.save(1, state_of(1))
        checkpoints.wait()
        with contextlib.suppress(OSError), open(small / "ballast", "wb", buffering=0) as ballast:
            while True:
                ballast.write(bytes(4096))
        fails(checkpoints, 2, "No space left")
        (small / "ballast").unlink()
        checkpoints.save(3, state_of(3))
        checkpoints.wait()
    assert verify.steps(small / "c") == [1, 3]


def test_lines_of_metrics_wait_for_room(small, capfd):
    """A page is all that is left: a line is cut in its midst, and put right."""
    constants = Constants(tokens_per_step=1)
    with MetricsWriter(small, start_step=0, last_step=600, constants=constants) as writer:
        writer.push(1, {"loss": np.float32(1)})
        writer.flush()
        (small / "events.jsonl").write_text("")
        free = shutil.disk_usage(small).free
        (small / "ballast").write_bytes(bytes(free - 4096))
        for step in range(2, 300):
            writer.push(step, {"loss": np.float32(step)})
        writer.flush()
        text = (small / "metrics.jsonl").read_bytes()
        assert text.endswith(b"}\n") and 1 < len(text.splitlines()) < 299
        (small / "ballast").unlink()
        writer.push(300, {"loss": np.float32(300)})
    lines = [json.loads(line) for line in (small / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 301))
    kept, written = capfd.readouterr().err.splitlines()
    assert kept.endswith("cannot be written (No space left on device); its lines are kept in memory until it can")
    assert written.endswith("is written again and complete")


def test_lines_that_never_find_room_are_told_at_the_end(small):
    writer = MetricsWriter(small, start_step=0, last_step=600, constants=Constants(tokens_per_step=1))
    (small / "ballast").write_bytes(bytes(shutil.disk_usage(small).free))
    for step in range(1, 50):
        writer.push(step, {"loss": np.float32(step)})
    with pytest.raises(UserError, match=r"the last lines of .* cannot be written \(No space left.*; free space"):
        writer.close()


def test_what_will_not_fit_is_not_begun(tmp_path, monkeypatch, capfd):
    checkpoints = CheckpointManager(tmp_path / "c")
    monkeypatch.setattr(step_folders.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 19))
    fails(checkpoints, 1, r"524,288 bytes are free, and 1,048,580 are needed")
    assert list((tmp_path / "c").iterdir()) == []
    with pytest.raises(manager.NotSaved, match="step 1 could not be saved"):
        checkpoints.close()


def test_what_may_go_makes_room(tmp_path, monkeypatch, capfd):
    checkpoints = CheckpointManager(tmp_path / "c", keep=9)
    for step in (1, 2, 3):
        checkpoints.save(step, state_of(step))
    checkpoints.close()
    fewer = CheckpointManager(tmp_path / "c", keep=1)
    monkeypatch.setattr(step_folders.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    fails(fewer, 4, "0 bytes are free")
    assert verify.steps(tmp_path / "c") == [3]


@pytest.mark.parametrize("movable", [True, False])
def test_what_an_earlier_save_left_and_cannot_be_deleted(tmp_path, monkeypatch, capfd, movable):
    """The folder belongs to another user, for example; Orbax would wait for it for five minutes."""
    left = tmp_path / "c" / f"2{step_folders.TEMPORARY}"
    (left / "state").mkdir(parents=True)
    remove, rename = step_folders.shutil.rmtree, step_folders.rename

    def not_this(path, ignore_errors=False, **more):
        if not (Path(path) / "state").exists():
            remove(path, ignore_errors=ignore_errors, **more)
        elif not ignore_errors:
            raise PermissionError(1, "Operation not permitted")

    def refusing(folder, ending):
        if folder == left:
            raise PermissionError(1, "Operation not permitted")
        return rename(folder, ending)

    monkeypatch.setattr(step_folders.shutil, "rmtree", not_this)
    if not movable:
        monkeypatch.setattr(step_folders, "rename", refusing)
        monkeypatch.setattr(Barrier, "begin", lambda *_: pytest.fail("Orbax was asked to save"))
    checkpoints = CheckpointManager(tmp_path / "c")
    if movable:
        checkpoints.save(2, state_of(2))
        checkpoints.close()
        assert verify.steps(tmp_path / "c") == [2] and (tmp_path / "c" / "2.deleted" / "state").is_dir()
    else:
        fails(checkpoints, 2, "2.orbax-checkpoint-tmp, left from an earlier save, cannot be deleted: Operation not")


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_in_the_place_of_a_checkpoint(tmp_path, capfd, kind):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "2").write_text("precious") if kind == "file" else (tmp_path / "c" / "2").symlink_to(tmp_path)
    with CheckpointManager(tmp_path / "c") as checkpoints:
        checkpoints.save(2, state_of(2))
        checkpoints.wait()
    assert verify.steps(tmp_path / "c") == [2] and verify.verify(tmp_path / "c", 2) == []
    aside = tmp_path / "c" / "2.misplaced"
    assert aside.is_symlink() if kind == "link" else aside.read_text() == "precious"
    assert f"2 is not the folder of a checkpoint; kept as {aside}" in capfd.readouterr().err


def test_a_limit_on_file_sizes(tmp_path, capfd):
    """A limit on file sizes is another refusal of the operating system, in the midst of a file."""
    checkpoints = CheckpointManager(tmp_path / "c")
    checkpoints.save(1, {"step": jnp.int32(1)})
    checkpoints.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, before[1]))
        fails(checkpoints, 2, "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    checkpoints.save(3, state_of(3))
    checkpoints.close()
    assert verify.steps(tmp_path / "c") == [1, 3]


def test_a_directory_that_is_gone(tmp_path, capfd):
    checkpoints = CheckpointManager(tmp_path / "c")
    checkpoints.save(1, state_of(1))
    checkpoints.wait()
    shutil.rmtree(tmp_path / "c")
    os.symlink(tmp_path / "elsewhere", tmp_path / "c")  # to nowhere
    checkpoints.save(2, state_of(2))  # a mount may be gone for a while: the run goes on
    assert checkpoints.failed() and "checkpoint 2 could not be saved (File exists)" in capfd.readouterr().err
    with pytest.raises(UserError, match="cannot be written"):  # but not one that begins with it
        CheckpointManager(tmp_path / "c").save(2, state_of(2))
    os.unlink(tmp_path / "c")
    checkpoints.save(3, state_of(3))
    checkpoints.close()
    assert checkpoints.newest() == 3
