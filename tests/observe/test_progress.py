"""What a person sees of a run."""

import io
import subprocess
import sys

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
    assert shown[0] == "step 1/1000  loss 2.5000  12,346 tokens/s  9:59:24 left  data wait 1.5 ms"
    assert shown[1].startswith("step 100/1000 ") and shown[-1].startswith("step 1000/1000 ")
    assert shown[5] == "step 450/1000  eval_loss 1.2500  eval_bits_per_byte 1.8000"


def test_unknown_and_not_finite():
    stream = io.StringIO()
    unknown = {"step": 6, "loss": None, "tokens_per_s": None, "step_time_s": None}
    Progress(10, start_step=5, stream=stream).write(unknown)
    assert stream.getvalue() == "step 6/10  loss not finite\n"
    Progress(10, start_step=5, stream=stream).write({**unknown, "loss": 0.5, "reward": 1.25})
    assert stream.getvalue().splitlines()[1] == "step 6/10  loss 0.5000  reward 1.2500"


def test_live_line_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    progress = Progress(10, stream=stream)
    for step in range(1, 11):
        progress.write(record(step))
    progress.write({"step": 10, "eval_loss": 1.25})
    progress.close()
    shown = stream.getvalue()
    assert "step 10/10  loss 2.5000" in shown and "eval_loss 1.2500" in shown and "\x1b" in shown


def test_start_up_imports_nothing_heavy():
    heavy = "{'rich', 'tensorboardX', 'orbax', 'grain'} & {name.split('.')[0] for name in sys.modules}"
    code = f"import sys, jaxtrain.observe, jaxtrain.checkpoint; sys.exit(str({heavy} or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr.strip() == ""
