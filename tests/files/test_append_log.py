"""Logs whose file is deleted, replaced or damaged while they are written."""

import json
import os
import random
import shutil

import pytest

from jaxtrain.diloco.outer_log import _Journal
from jaxtrain.files.append_log import AppendLog
from jaxtrain.observe.events import events
from jaxtrain.observe.ledger import Ledger
from jaxtrain.observe.metrics import _JsonLines


def steps_in(path) -> list[int]:
    found = []
    for line in path.read_bytes().split(b"\n") if path.is_file() else []:
        try:
            found.append(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return found


def test_a_log_follows_its_path(tmp_path):
    log = AppendLog(path := tmp_path / "log")
    assert not log.follow()
    path.rename(tmp_path / "moved")
    assert log.follow() and path.exists() and not log.follow()
    (tmp_path / "other").write_text("x\n")
    os.replace(tmp_path / "other", path)
    assert log.follow() and path.read_text() == "x\n"
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        log.follow()
    path.rmdir()
    assert log.follow()
    log.close()


@pytest.mark.parametrize("harm", ["deleted", "replaced", "truncated", "torn", "folder"])
def test_no_line_of_metrics_is_lost_after_its_file_is(tmp_path, capsys, harm):
    lines = _JsonLines(path := tmp_path / "metrics.jsonl", 0)
    lines.write({"step": 1})
    if harm == "truncated":
        os.truncate(path, 0)
    else:
        path.unlink()
    if harm in ("replaced", "torn"):
        path.write_text('{"step": 0}\n' + '{"ste' * (harm == "torn"))
    elif harm == "folder":
        path.mkdir()
    lines.write({"step": 2})
    if harm == "folder":
        assert lines.waiting and "its lines are kept in memory" in capsys.readouterr().err
        path.rmdir()
    lines.write({"step": 3})
    lines.close()
    assert steps_in(path) == [0] * (harm in ("replaced", "torn")) + [2, 3]
    kinds = [event["kind"] for event in events(tmp_path)]
    assert kinds.count("metrics_replaced") == (harm != "truncated")


def test_drawn_harm_to_metrics_loses_no_later_line_in_silence(tmp_path):
    """Every line that is written after the last harm is in the file."""
    for seed in range(500):
        rng, work = random.Random(seed), tmp_path / f"{seed}"
        work.mkdir()
        path, step, after = work / "metrics.jsonl", 0, 0
        lines = _JsonLines(path, 0)
        for _ in range(rng.randint(1, 6)):
            for _ in range(rng.randint(0, 3)):
                step += 1
                lines.write({"step": step, "loss": 1.0})
            after = step
            kind = rng.choice(["delete", "replace", "truncate", "folder", "cut", "chmod", "link", "move"])
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True) if kind in (
                "delete", "replace", "folder", "link") else None
            if kind == "replace":
                path.write_text(rng.choice(["", "x", "x\n", '{"step": 0}\n']))
            elif kind == "folder":
                path.mkdir()
            elif kind == "link":
                path.symlink_to(work / "elsewhere")
            elif path.is_file() and kind in ("truncate", "cut"):
                os.truncate(path, 0 if kind == "truncate" else rng.randrange(path.stat().st_size + 1))
            elif path.is_file() and kind == "chmod":
                path.chmod(0o444)
            elif path.is_file() and kind == "move":
                path.rename(work / f"moved-{step}")
        if path.is_dir():
            path.rmdir()
        lines.write({"step": step + 1, "loss": 1.0})
        lines.close()
        assert [one for one in steps_in(path) if one > after] == [step + 1], seed
        shutil.rmtree(work)


def test_a_ledger_whose_folder_is_deleted_is_written_again(tmp_path):
    with Ledger(tmp_path, every=0) as ledger:
        ledger.open(10)
        shutil.rmtree(tmp_path / "ledger")
        ledger.resumed(3)
        (written,) = (tmp_path / "ledger").glob("*.json")
        assert json.loads(written.read_text())["resumed"] == 3


def test_the_journal_of_islands_fails_rather_than_going_on_without_its_past(tmp_path):
    journal = _Journal(tmp_path / "journal")
    journal.append({"kind": "x"})
    (tmp_path / "journal").unlink()
    with pytest.raises(OSError, match="journal was deleted or replaced"):
        journal.append({"kind": "y"})
    journal.close()
