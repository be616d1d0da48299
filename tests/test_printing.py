"""Text from elsewhere is printed without what would steer a terminal, wherever it is printed."""

import ast
import io
import warnings
from pathlib import Path

import pytest

from jaxtrain.commands import flags
from jaxtrain.errors import UserError, say, tell, tell_text
from jaxtrain.files.work_progress import Line
from jaxtrain.observe.progress import Progress
from jaxtrain.redaction import printable

FOREIGN = "a\x1b]0;title\x07b\x1b[2Jc\rd\u202ee\x9bf\x7f\ud800"
SHOWN = r"a\x1b]0;title\x07b\x1b[2Jc\rd\u202ee\x9bf\x7f\ud800"
JAXTRAIN = Path(__file__).parents[1] / "jaxtrain"
# What may print as it is: text of its own only, JSON without such characters, or colours around clean text.
PRINTS = {"cli.py", "config/key_reference.py", "errors.py", "redaction.py", "files/work_progress.py",
          "observe/progress.py", "observe/live_display.py",
          "hub/speech/live_printing.py", "commands/dashboards.py", "commands/scaling.py",
          "commands/schedules.py", "commands/inspect.py", "distributed/processes.py",
          "runs/top.py", "launch/ray_driver.py", "bench/records.py", "bench/reference/plain_jax.py",
          "commands/bench.py", "commands/coordinates.py", "bench/sweep.py", "doctor/child.py"}


def test_what_steers_a_terminal_is_escaped_and_other_text_is_not():
    assert printable(FOREIGN) == SHOWN
    plain = "tab\tline\nélan 你好 \U0001f469\u200d\U0001f4bb \xa0…"
    assert printable(plain) == plain


def test_messages_are_clean(capsys):
    say(FOREIGN)
    tell(FOREIGN, 1, sep="-")
    shown = capsys.readouterr()
    assert (shown.err, shown.out) == (f"{SHOWN}\n", f"{SHOWN}-1\n")
    mistake = UserError("model", f"{FOREIGN} is not known", "use gpt")
    assert f"{mistake}" == f"model: {SHOWN} is not known; use gpt".replace(r"c\rd", "c d")


def test_text_of_a_model_is_clean_on_a_terminal_and_whole_elsewhere(monkeypatch, capsys):
    for terminal, shown in ((True, SHOWN), (False, FOREIGN.replace("\ud800", r"\ud800"))):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
        tell_text(FOREIGN, end="|")
        assert capsys.readouterr().out == f"{shown}|"


def test_progress_and_warnings_are_clean(monkeypatch):
    stream = io.StringIO()
    with Line(stream) as line:
        line(FOREIGN)
    Progress(1, stream=stream)._print(FOREIGN)
    assert stream.getvalue() == f"{SHOWN}\n" * 2
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    flags.warn_in_one_line()
    assert warnings.formatwarning(FOREIGN, UserWarning, "x.py", 1) == f"warning: {SHOWN}\n"


@pytest.mark.parametrize("path", sorted(JAXTRAIN.rglob("*.py")), ids=lambda path: path.name)
def test_modules_print_by_tell(path):
    names = [node.func.id for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert "print" not in names or path.relative_to(JAXTRAIN).as_posix() in PRINTS
