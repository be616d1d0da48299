"""Files that are whole or absent, whatever happens to their writer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.files import atomic_files


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    atomic_files.write(path, "old")
    with pytest.raises(KeyboardInterrupt), atomic_files.written(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    for call in ("fsync", "replace"):
        with monkeypatch.context() as full:
            full.setattr(os, call, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(OSError, match="No space left"):
                atomic_files.write(path, "new", durable=True)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    atomic_files.write(path, "new", durable=True)
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


WRITER = """
import sys, pathlib
from jaxtrain.files import atomic_files
with atomic_files.written(pathlib.Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_what_a_kill_left_is_deleted_and_nothing_else(tmp_path, monkeypatch):
    """Not what another process still writes, what is young, and what another machine wrote, whose locks may be unseen.
    """
    monkeypatch.setattr(atomic_files, "_cleaned", set())
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "killed"], env=environment, text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == "writing\n"
        left = next(tmp_path.glob("killed.*.partial"))
        os.utime(left, (0, 0))
        atomic_files.write_json(tmp_path / "file", {})
        assert left.exists(), "it is still being written"
        writer.kill()
    own = left.name.split(".")[1][:8]
    kept = [tmp_path / f"young.{own}{'0' * 24}.partial", tmp_path / f"far.{'0' * 32}.partial", tmp_path / "my.partial"]
    for path in kept:
        path.write_bytes(b"half")
    for path in kept[1:]:
        os.utime(path, (0, 0))
    atomic_files.write_json(tmp_path / "file", {})
    assert left.exists(), "a folder is looked through once in a process"
    atomic_files._cleaned.clear()
    atomic_files.write_json(tmp_path / "file", {})
    assert sorted(tmp_path.iterdir()) == sorted([*kept, tmp_path / "file"])


def test_a_file_stays_locked_until_it_has_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_files, "_cleaned", set())
    replace = os.replace

    def cleaned_before(partial, path):
        os.utime(partial, (0, 0))
        atomic_files._cleaned.clear()
        atomic_files._delete_abandoned(tmp_path)
        replace(partial, path)

    monkeypatch.setattr(os, "replace", cleaned_before)
    atomic_files.write_json(tmp_path / "file", [1])
    assert (tmp_path / "file").read_text() == "[\n 1\n]" and list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize("durable", [True, False])
def test_its_content_is_synced_before_it_has_its_name(tmp_path, monkeypatch, durable):
    calls, fsync, replace = [], os.fsync, os.replace

    def synced(handle):
        calls.append(("fsync", os.fstat(handle).st_size))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("replace"), replace(*names)))
    atomic_files.write(tmp_path / "file", "content", durable=durable)
    assert calls == ([("fsync", 7)] if durable else []) + ["replace"]


def test_many_write_the_same_one(tmp_path):
    """Readers find all of one writer's content, whoever writes."""
    path = tmp_path / "file"
    atomic_files.write(path, "0" * 200_000)
    write = """
import sys, pathlib
from jaxtrain.files import atomic_files
for _ in range(200):
    with atomic_files.written(pathlib.Path(sys.argv[1]), durable=False) as file:
        file.write(sys.argv[2].encode() * 200_000)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    writers = [subprocess.Popen([sys.executable, "-c", write, path, letter], env=environment) for letter in "ab"]
    try:
        while any(writer.poll() is None for writer in writers):
            content = path.read_bytes()
            assert len(content) == 200_000 and len(set(content)) == 1
    finally:
        statuses = [writer.wait(timeout=120) for writer in writers]
    assert statuses == [0, 0] and list(tmp_path.iterdir()) == [path]
