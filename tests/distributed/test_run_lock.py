"""Two runs never write into one workdir."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading

import pytest

from jaxtrain.distributed import exit_codes, run_lock
from jaxtrain.distributed.run_lock import locked
from jaxtrain.main import main
from tests.tiny import tiny_flags

HOLD = """
import sys
from jaxtrain.distributed.run_lock import locked
with locked(sys.argv[1], 0):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Start another process that works in `tmp_path`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               text=True)
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_other_is_named_and_nothing_stale_remains(other, tmp_path):
    with locked(tmp_path, 0) as found:
        assert found.startswith(f"process {other.pid} on ")
    other.send_signal(signal.SIGKILL)
    other.wait()
    for _ in range(2):
        with locked(tmp_path, 0) as found:
            assert found == ""
            with locked(tmp_path, 0) as found:  # in this process, too
                assert found.startswith(f"process {os.getpid()} on ")


def test_deleting_the_lock_file_lets_nobody_in(other, tmp_path):
    (tmp_path / "lock").unlink()
    for _ in range(2):  # the second time there is a file again, which nobody has locked
        with locked(tmp_path, 0) as found:
            assert found == "a process that has just begun, or whose lock file was deleted"
    other.kill()
    other.wait()
    with locked(tmp_path, 0) as found:
        assert found == ""


def test_a_folder_that_cannot_be_locked(other, tmp_path, capsys, monkeypatch):
    """Over NFS only the file can be locked."""
    def file_only(handle, how, flock=fcntl.flock):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", file_only)
    with locked(tmp_path, 0) as found:
        assert found.startswith(f"process {other.pid} on ")
    other.kill()
    other.wait()
    with locked(tmp_path, 0) as found:
        assert found == ""
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_run_is_refused_where_another_one_works(other, tmp_path, tmp_path_factory, cache, capsys, monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE_S", 1.0)
    flags = [*tiny_flags(tmp_path_factory, ["train.steps=1", "mesh.data=8", "checkpoint.every=0"]),
             f"--workdir={tmp_path}"]
    assert main(flags) == exit_codes.RESTART
    err = capsys.readouterr().err
    assert f"--workdir: another run is using {tmp_path} (process {other.pid} " in err and "waiting up to 1 s" in err
    assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "config.json").exists()
    # One that ends meanwhile is waited for.
    monkeypatch.setattr(run_lock, "PATIENCE_S", 60.0)
    threading.Timer(1.0, other.kill).start()
    assert main(flags) == 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) >= 1
    with locked(tmp_path, 0) as found:  # a run that is over holds nothing
        assert found == ""


def test_a_file_system_without_locks_is_said(tmp_path, capsys, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ValueError) as raised, locked(tmp_path, 0) as found:
        assert found == ""
        raise ValueError
    assert raised.value.__context__ is None  # what fails later is not taken for its consequence
    assert "cannot be locked (No locks available)" in capsys.readouterr().err


def test_a_full_disk_costs_the_name_only(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(exit_codes.RunExit), locked(tmp_path, 0) as found:
        assert found == ""
        with locked(tmp_path, 0) as found:
            assert found.startswith("a process that has just begun")
        raise exit_codes.RunExit(76, "of the run itself")
