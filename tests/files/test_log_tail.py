"""Lines that are parsed together are what each is by itself, whatever damage there is."""

import itertools
import json

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
