"""The display of a run on a terminal."""

import io
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from jaxtrain.errors import say
from jaxtrain.observe import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def record(step, **fields):
    return {"step": step, "loss": 2.5, "tokens_per_s": 12345.6, "step_time_s": 36.0, "data_wait_s": 0.0015, **fields}


def test_plain_lines_are_few():
    stream = io.StringIO()
    progress = Progress(1000, stream=stream)
    for step in range(1, 1001):
        progress.write(record(step))
        if step == 450:
            progress.write({"step": step, "eval_loss": 1.25, "eval_bits_per_byte": 1.8})
    progress.close()
    shown = stream.getvalue().splitlines()
    assert len(shown) == 12 and "\x1b" not in stream.getvalue()
    assert shown[0] == "step 1/1000  loss 2.5000  12,346 tokens/s  9:59:24 left"
    assert shown[1].startswith("step 100/1000 ") and shown[-1].startswith("step 1000/1000 ")
    assert shown[5] == "step 450/1000  evaluation loss 1.2500  bits/byte 1.8000"


def test_a_line_has_the_means_of_the_steps_since_the_one_before():
    """A step that has few tokens, or that was fast by chance, says little of the others."""
    stream = io.StringIO()
    progress = Progress(40, stream=stream)
    progress.write({"step": 1, "loss": 2.5, "tokens_per_s": None, "step_time_s": None, "data_wait_s": 0.5})
    for step, seconds, tokens in ((2, 1.0, 100), (3, 2.0, 400), (4, 0.01, 100)):
        progress.write({"step": step, "loss": 2.5, "step_time_s": seconds, "tokens_per_s": tokens / seconds,
                        "mfu": tokens / seconds / 1000, "data_wait_s": 0.03 * seconds})
    progress.write({"step": 8, "loss": 2.5, "step_time_s": 2.0, "tokens_per_s": 50, "mfu": 0.05, "data_wait_s": 0.004})
    assert stream.getvalue().splitlines() == [
        "step 1/40  loss 2.5000",
        f"step 4/40  loss 2.5000  {600 / 3.01:,.0f} tokens/s  mfu {0.6 / 3.01:.1%}  0:36 left  "
        "waits for data 3% of the time",
        "step 8/40  loss 2.5000  50 tokens/s  mfu 5.0%  1:04 left"]


def test_examples_per_second():
    """A model of the user's own that reads no tokens."""
    stream = io.StringIO()
    progress = Progress(20, stream=stream)
    for step, speed in ((1, None), (2, 1000.0), (3, 500.0), (4, 250.0)):
        progress.write({"step": step, "loss": 2.5, "examples_per_s": speed, "step_time_s": speed and 100 / speed})
    assert stream.getvalue().splitlines() == [
        "step 1/20  loss 2.5000", "step 2/20  loss 2.5000  1,000 examples/s  0:02 left",
        f"step 4/20  loss 2.5000  {200 / 0.6:,.0f} examples/s  0:05 left"]


def test_unknown_and_not_finite():
    stream = io.StringIO()
    unknown = {"step": 6, "loss": None, "tokens_per_s": None, "step_time_s": None}
    Progress(10, start_step=5, stream=stream).write(unknown)
    assert stream.getvalue() == "step 6/10  loss not finite\n"
    Progress(10, start_step=5, stream=stream).write({**unknown, "loss": 0.5, "reward": 1.25})
    assert stream.getvalue().splitlines()[1] == "step 6/10  loss 0.5000  reward 1.2500"


@pytest.fixture
def terminal(monkeypatch):
    """Make a terminal of a size, on which a run of ten steps is shown; return what is written to it."""
    def shown(columns, lines, workdir=None, start_step=0, interrupt=None, **fields):
        for name, value in (("TERM", "xterm"), ("COLUMNS", columns), ("LINES", lines)):
            monkeypatch.setenv(name, str(value))
        stream = Terminal()
        progress = Progress(10, start_step=start_step, stream=stream, workdir=workdir, interrupt=interrupt)
        for step in range(start_step + 1, 11):
            progress.write(record(step, mfu=0.41, **fields))
        progress.write({"step": 10, "eval_loss": 1.25})
        progress.close()
        return stream.getvalue()

    return shown


@pytest.mark.parametrize("size", [(99, 40), (200, 19)])
def test_live_line_on_a_terminal(terminal, size):
    shown = terminal(*size)
    assert "step 10/10  loss 2.5000" in shown and "evaluation loss 1.2500" in shown and "\x1b" in shown
    assert "╭" not in shown


def test_panel_on_a_wide_terminal(terminal, tmp_path):
    """It shows what the workdir has of saves and events, however odd; a run that goes on shows its losses so far."""
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (
        {"kind": "checkpoint", "step": 8, "time": time.time() - 300}, {"kind": "checkpoint", "step": "x"},
        {"kind": "spike[red]", "time": "now", "reason": "\x1b[2J"})) + "no json\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 9.75}\n{"step": 1, "eval_loss": 9.0}\n{"step": 2')
    shown = terminal(100, 20, tmp_path, start_step=5)
    assert "╭" in shown and "10/10  100.0%" in shown and "step 8, 5 min ago" in shown and "41.0%" in shown
    assert "spike[red] reason=?[2J" in shown and "9.75" in shown and "memory" in shown
    assert "evaluation loss 1.2500" in shown
    shown = terminal(100, 20, tmp_path / "nowhere", interrupt=SimpleNamespace(signal=15))
    assert "nowhere  stopping after this step; Ctrl-C ends at once" in shown


def test_a_terminal_that_shows_ascii_only_gets_a_line(monkeypatch):
    """Blocks and frames cannot be written to it, and that must not end a run."""
    class Ascii(io.TextIOWrapper):
        def isatty(self):
            return True

    for name, value in (("TERM", "xterm"), ("COLUMNS", "120"), ("LINES", "40")):
        monkeypatch.setenv(name, value)
    progress = Progress(10, stream=Ascii(io.BytesIO(), "ascii"))
    progress.write(record(10))
    progress.close()


def test_a_run_that_goes_on_shows_the_losses_up_to_there(tmp_path):
    from jaxtrain.observe.live_display import LiveDisplay

    lines = {"step": 1, "loss": 9.0}, {"step": 1, "eval_loss": 8.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 7.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    display = LiveDisplay(Terminal(), 10, 2, tmp_path)
    display.stop()
    assert f"{list(display._losses)}" == "[9.0, nan]"


def test_the_memory_is_that_of_the_line(terminal):
    assert "70.0 of 80.0 GB" in terminal(120, 40, memory_bytes=70e9, memory_limit_bytes=80e9)
    assert "of the host" in terminal(120, 40)


def test_a_long_run_keeps_few_losses(terminal, monkeypatch):
    from jaxtrain.observe import live_display

    monkeypatch.setattr(live_display, "_KEPT", 8)
    display = live_display.LiveDisplay(Terminal(), 100, 0)
    for loss in range(100):
        display._keep({"loss": float(loss)})
    display.stop()
    assert 4 <= len(display._losses) < 8 and display._losses[0] == 0 and list(display._losses)[1] == display._every
    assert display._losses[-1] > 70


def test_a_drawing_never_ends_a_run(terminal, monkeypatch):
    from jaxtrain.observe import live_display

    def fails(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(live_display, "panel", fails)
    assert "step 10/10  loss 2.5000" in terminal(120, 40)


def test_start_up_imports_nothing_heavy():
    heavy = "{'rich', 'tensorboardX', 'orbax', 'grain'} & {name.split('.')[0] for name in sys.modules}"
    code = f"import sys, jaxtrain.observe, jaxtrain.checkpoint; sys.exit(str({heavy} or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr.strip() == ""


def test_a_line_is_written_whole(monkeypatch):
    """It is one call, so that lines of several threads do not run into each other."""
    written = []
    stream = SimpleNamespace(write=written.append, flush=lambda: None, isatty=lambda: False)
    Progress(4, stream=stream).write({"step": 1, "loss": 2.0})
    monkeypatch.setattr(sys, "stderr", stream)
    say("told")
    assert [*filter(None, written)] == ["step 1/4  loss 2.0000\n", "told\n"]
