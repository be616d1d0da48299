"""Lines that are parsed together are what each is by itself, whatever damage there is."""

import itertools
import json

from jaxtrain.files import log_tail
from jaxtrain.files.bounded_files import misfit
from jaxtrain.files.log_tail import LogTail

LINES = ['{"step": 1, "loss": 0.5}', '{"step": 2, "why": "}, {"}', '{"step": 3},{"step": 4}', '{"step": 5', '"x": 6}',
         "7", '[{"step": 8}]', '{"step": 9, "n": null}', '{"step": 10, "why": "x}', '{", "b": 11}', "", "null",
         '{"step": 12, "deep": {"a": [1]}}', '{"step": "13"}']


def alone(line):
    try:
        value = json.loads(line)
    except ValueError:
        return []
    return [value] if isinstance(value, dict) and isinstance(value.get("step"), int) else []


def test_lines_together_are_those_alone(tmp_path):
    for number, lines in enumerate(itertools.permutations(LINES, 3)):
        if number % 3 and not {8, 9} <= {LINES.index(line) for line in lines}:
            continue
        (tmp_path / "log").write_text("".join(f"{line}\n" for line in lines))
        found = list(LogTail(tmp_path / "log", {"step": int}).added())
        assert found == [value for line in lines for value in alone(line)], lines


def test_lines_with_the_very_types_of_a_simple_form_are_not_checked_further(tmp_path, monkeypatch):
    """The check in full took longer than parsing; a bool is still no whole number."""
    checked = []
    monkeypatch.setattr(log_tail, "misfit", lambda value, form: checked.append(value) or misfit(value, form))
    log = tmp_path / "log.jsonl"
    odd = [{"step": True}, {"step": 1.5}, {"other": 1}, [1]]
    log.write_text("".join(json.dumps(line) + "\n" for line in [{"step": 1, "loss": None}] * 3 + odd))
    assert list(LogTail(log, {"step": int}).added()) == [{"step": 1, "loss": None}] * 3
    assert checked[:3] == odd[:3]
    assert list(LogTail(log, {"step?": int}).added()) == [{"step": 1, "loss": None}] * 3 + [{"other": 1}]
