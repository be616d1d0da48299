"""The display of `jaxtrain top` for one run and for many, and that it ends when it should."""

import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from jaxtrain.commands import top as top_command
from jaxtrain.commands.runs import main as runs
from jaxtrain.runs import top
from tests.runs.folders import make
from tests.tiny import ROOT, SLOW, tiny_flags, virtual_devices


def drawn(places, width, height=30):
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None, force_terminal=True)
    watch = top.Watch([f"{place}" for place in places])
    console.print(top.frame(watch, width, height))
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return "\n".join(lines)


def beat(run, process, **said):
    (run / "heartbeats").mkdir(exist_ok=True)
    (run / "heartbeats" / f"process-{process}").write_text(json.dumps(
        {"step": 3, "begun": 4, "phase": "train", "time": time.time(), "pid": os.getpid(), "host": "h[red]"} | said))


@pytest.mark.parametrize("width", [60, 100, 160])
def test_one_run(tmp_path, width):
    run = make(tmp_path / "run", steps=3, ended="", began=time.time() - 2005, checkpoints=(2,))
    runs(["tag", f"{run}", "base"])
    (run / "events.jsonl").write_text('{"kind": "hang", "time": 5.0, "reason": "[bold]\\u001b[2J"}\n')
    (run / "evaluations").mkdir()
    (run / "evaluations" / "metrics.jsonl").write_text('{"step": 2, "eval_copa_acc": 0.625}\n')
    beat(run, 0)
    beat(run, 1, time=time.time() - 100, quiet_s=90)
    text = drawn([run], width)
    assert "running" in text and "3/4  75.0%" in text and "1.0 s left" in text and "2.0000" in text and "█" in text
    assert "copa_acc" in text and "0.6250" in text
    assert "hang reason=[bold]?[2J" in text and "90.0%" in text and "step 2, 0 s ago" in text and "$" in text
    if width >= 100:
        assert "process 1 on h[red]: train, step 3, heartbeat 100 s ago, no progress for 90 s" in text
        assert "#base" in text


@pytest.mark.parametrize("width", [60, 100, 160])
def test_many_runs(tmp_path, width, capsys):
    make(tmp_path / "stopped", ended="stopped")
    make(tmp_path / "new", steps=0, ended="")
    (make(tmp_path / "torn") / "config.json").write_text("{")
    live = make(tmp_path / "live", steps=2, ended="", began=time.time() - 2005, loss=3.25)
    rows = {line.split()[0]: line for line in drawn([tmp_path], width).splitlines()}
    assert list(rows)[:2] == ["run", "live"] and "running" in rows["live"] and "3.2500" in rows["live"]
    assert ("2/4" if width >= 100 else "50%") in rows["live"] and "stopped" in rows["stopped"]
    assert "damaged" in rows["torn:"] and "left" in rows["run"] and ("data wait" in rows["run"]) == (width == 160)
    assert "and 3 more" in drawn([tmp_path], width, height=4)
    assert "live" in drawn([live, tmp_path / "stopped"], width)
    assert top_command.main([f"{tmp_path}", "--once"]) == 0 and "live" in capsys.readouterr().out
    assert top_command.main([f"{tmp_path / 'stopped'}"]) == 0
    assert "╭" in capsys.readouterr().out, "no terminal: one drawing"
    assert top_command.main([f"{tmp_path / 'stopped' / 'ledger'}"]) == 2
    assert "there is no run in" in capsys.readouterr().err
    assert top_command.main(["s3://me:key@bucket/runs"]) == 2 and capsys.readouterr().err == (
        "WORKDIR: s3://***@bucket/runs is a URL, and copies of runs do not grow while one watches; ask jaxtrain runs "
        "list or show\n")


def test_a_run_that_cannot_be_read_is_drawn_with_the_reason(tmp_path):
    run = make(tmp_path / "run")
    (run / "config.json").write_text("{")
    assert "damaged" in drawn([run], 100) and "is not valid JSON" in drawn([run], 100)


@pytest.mark.parametrize(("file", "content"), [
    ("run.json", {"mesh": [2], "device_kind": 7}), ("config.json", {"train": {"steps": "many"}}),
    ("metrics.jsonl", {"step": 10**400, "loss": 1}), ("metrics.jsonl", {"step": 5, "loss": 10**400}),
    ("events.jsonl", {"kind": "hang", "time": 10**400}),
    ("heartbeats/process-0", {"time": 10**400, "quiet_s": 10**400})])
def test_what_no_run_wrote_ends_in_no_traceback(tmp_path, file, content):
    run = make(tmp_path / "run")
    (run / "heartbeats").mkdir()
    with open(run / file, "a" if file.endswith("l") else "w") as out:
        out.write(f"{json.dumps(content)}\n")
    assert "run" in drawn([run], 120)
    assert runs(["list", f"{tmp_path}"]) == 0 and runs(["show", f"{run}"]) in (0, 2)


def test_a_process_that_ended_says_when(tmp_path):
    run = make(tmp_path / "run")
    beat(run, 0, phase="ended", time=time.time() - 5, quiet_s=90)
    assert "process 0 on h[red]: ended 5 s ago" in drawn([run], 100).replace("\n", " ")


def test_runs_are_followed(tmp_path, monkeypatch):
    run = make(tmp_path / "run", steps=1, ended="", began=time.time() - 2005)
    watch = top.Watch([f"{tmp_path}"])
    monkeypatch.setattr(top, "_SEARCH_EVERY", -1.0)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "loss": 0.75}\n')
    make(tmp_path / "second")
    (one, two) = (watch.look(), list(watch.runs.values()))[1]
    assert one.run.step == 2 and two.workdir.name == "second"
    shutil.rmtree(run)
    watch.look()
    assert "damaged" in top.reading(one, time.time()).state


@pytest.mark.slow
def test_a_terminal(tmp_path, tmp_path_factory, cache, forked):
    """A run that trains meanwhile is drawn again and again; the terminal is afterwards as it was."""
    flags = tiny_flags(tmp_path_factory, ["model.num_layers=1", "model.embed_dim=32", "train.steps=500"])
    training = forked.start(["-c", SLOW % 0.1, *flags, f"--workdir={tmp_path}/run"], ROOT,
                            os.environ | {"XLA_FLAGS": virtual_devices(1)})
    try:
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert training.poll() is None
            time.sleep(0.1)
        for end in (lambda main, _: os.write(main, b"q"), lambda _, watching: watching.send_signal(signal.SIGINT)):
            status, shown = watched(f"{tmp_path}/run", end)
            assert status == 0 and b"Traceback" not in shown and b"/500" in shown
            assert b"\x1b[?1049h" in shown and b"\x1b[?1049l" in shown[-200:]
    finally:
        training.kill()
        training.wait()


def watched(workdir, end):
    """Watch it in a terminal, and end that after three drawings; return the exit status and what was shown."""
    main, inside = pty.openpty()
    watching = subprocess.Popen(
        [sys.executable, "-m", "jaxtrain", "top", workdir], cwd=ROOT, stdin=inside, stdout=inside, stderr=inside,
        env=os.environ | {"COLUMNS": "100", "LINES": "30", "TERM": "xterm"}, start_new_session=True)
    try:
        shown = b""
        while shown.count(b"running") < 3:
            assert select.select([main], [], [], 60)[0] and watching.poll() is None
            shown += os.read(main, 65536)
        end(main, watching)
        while watching.poll() is None or select.select([main], [], [], 0)[0]:
            if select.select([main], [], [], 0.1)[0]:
                shown += os.read(main, 65536)
        return watching.returncode, shown
    finally:
        watching.kill()
        watching.wait()
        os.close(main)
        os.close(inside)
