"""Locking of a folder while it is filled: by one job, or several with the same plan; others are refused in one line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.commands.prepare import main
from jaxtrain.data.prepare import job
from jaxtrain.data.prepare.prepare import Options, prepare, prepare_part
from jaxtrain.data.prepare_sequences import prepare_sequences
from jaxtrain.data.prepare_sequences.audio import Audio
from jaxtrain.errors import UserError
from tests.odd_files import ODD, in_time, sparse

ROOT = Path(__file__).parents[3]


def write(tmp_path: Path, count: int = 6) -> list[str]:
    for i in range(count):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / f"in/{i}.txt").write_text(f"document {i}")
    return [str(tmp_path / "in")]


def other(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess:
    """Run another process that prepares into the same folder."""
    command = [sys.executable, "-m", "jaxtrain", "prepare", f"--input={tmp_path / 'in'}", "--task_bytes=1",
               f"--output={tmp_path / 'out'}", "--workers=1", *flags]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


@pytest.mark.slow
def test_of_two_at_once_one_is_refused_and_the_other_ends(tmp_path):
    source, seen = write(tmp_path), []

    def midway(line):
        if not seen:
            seen.extend(other(tmp_path, *flags) for flags in ([], ["--eval_fraction=0.5"], ["--part=0/2"]))

    corpus = prepare(source, tmp_path / "out", Options(task_bytes=1), say=midway)
    assert [(one.returncode, one.stderr.splitlines()[-1]) for one in seen] == [
        (2, f"--output: another process is preparing {tmp_path / 'out'}; wait until it has ended, or name another "
         "folder")] * 3
    assert corpus.train.num_documents + corpus.eval.num_documents == 6
    assert main([f"--input={source[0]}", "--task_bytes=1", f"--output={tmp_path / 'out'}", "--workers=1"]) == 0


def test_parts_share_a_folder_and_nobody_finishes_meanwhile(tmp_path):
    source, seen = write(tmp_path), []

    def midway(line):
        if not seen:
            seen.extend(other(tmp_path, *flags)
                        for flags in (["--part=1/2"], [], ["--part=1/2", "--text_field=another"]))

    prepare_part(source, tmp_path / "out", Options(task_bytes=1), "0/2", say=midway)
    assert [one.returncode for one in seen] == [0, 2, 2]
    assert "another process is preparing" in seen[1].stderr and "another command began" in seen[2].stderr


def test_another_command_goes_on_only_where_nothing_was_done(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"words": "x"}) + "\n")
    source, out = [str(tmp_path / "a.jsonl")], tmp_path / "out"
    for run in (prepare, lambda *rest: prepare_part(*rest, "0/1")):
        with pytest.raises(UserError, match="has no field 'text'"):
            run(source, out, Options())
        with pytest.raises(UserError, match="has no field 'word'"):
            run(source, out, Options(field="word"))
    prepare_part(source, out, Options(field="words"), "0/1")
    with pytest.raises(UserError, match=r"another command began in .*; delete it, or name"):
        prepare(source, out, Options(field="words", eval_fraction=0.5))
    assert prepare(source, out, Options(field="words")).train.num_documents == 1


def test_what_was_deleted_meanwhile_is_no_mistake(tmp_path):
    out = tmp_path / "out"
    with job.begun(out, "plan", "format") as left:
        assert left
        (out / "a.partial").write_bytes(b"")
        shutil.rmtree(out / "unfinished")
        job.complete(out, {"format": "format", "plan": "plan", "splits": {}}, {})
    assert [path.name for path in out.iterdir()] == ["manifest.json"]
    with job.begun(out, "plan", "format") as left:
        assert not left


def test_sequences_are_held_too(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/0.wav").write_bytes(b"RIFF")
    with job.begun(tmp_path / "out", "plan", prepare_sequences.FORMAT), pytest.raises(UserError, match="is preparing"):
        prepare_sequences.prepare_sequences([str(tmp_path / "in")], tmp_path / "out", Audio())


@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
def test_whatever_lies_in_place_of_the_plan_is_one_line(tmp_path, make):
    source = write(tmp_path, 1)
    (tmp_path / "out" / "unfinished").mkdir(parents=True)
    make(tmp_path / "out" / "unfinished" / "plan")
    if make is sparse:  # nothing was done, so it is begun again
        in_time(lambda: prepare(source, tmp_path / "out", Options()))
        return
    with pytest.raises(UserError, match=r"--output: .*out cannot be written"):
        in_time(lambda: prepare(source, tmp_path / "out", Options()))
