"""A real sweep on this machine, whose sweeper is killed in the middle."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.commands import jobs as jobs_command
from tests.launch.waiting import wait_for
from tests.tiny import QUICKLY, ROOT

EXAMPLE = (ROOT / "examples" / "sweep.toml").read_text()
CHANGED = {'"runs/sweep"': '"{folder}"', '"random"': '{name = "tpe", n_startup_trials = 2}', "trials = 6": "trials = 3",
           "[keys]": """objective.metric = "loss"
fixed.data.source = "README.md"
fixed.train = {steps = 4, eval_every = 0}
fixed.model = {embed_dim = 32, max_seq_len = 32}
fixed.data.seq_len = 32
fixed.checkpoint.every = 0

[keys]"""}


def begin(folder: Path) -> subprocess.Popen:
    file = folder.with_suffix(".toml")
    text = EXAMPLE
    for before, after in CHANGED.items():
        assert before in text
        text = text.replace(before, after.replace("{folder}", str(folder)))
    file.write_text(text)
    return subprocess.Popen([sys.executable, "-m", "jaxtrain", "sweep", str(file), "--on=local"], cwd=ROOT,
                            env={**os.environ, "XLA_FLAGS": QUICKLY}, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def ended(sweeper: subprocess.Popen, folder: Path) -> tuple[str, list[dict]]:
    out, err = sweeper.communicate(timeout=600)
    assert sweeper.returncode == 0, err
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return out, [{key: line[key] for key in ("trial", "state", "keys", "seed", "value", "steps", "tokens")}
                 for line in lines]


@pytest.mark.slow
def test_a_sweep_that_is_killed_ends_as_one_that_is_not(tmp_path, capsys):
    pytest.importorskip("optuna")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    sweeper = begin(killed)
    wait_for((killed / "trial-0001" / "jobs" / "1" / "job.json").exists, lambda: sweeper.poll())
    sweeper.kill()
    sweeper.communicate()
    out, found = ended(begin(killed), killed)
    assert [line["state"] for line in found] == ["complete"] * 3 and [line["steps"] for line in found] == [4] * 3
    assert [path.name for path in sorted(killed.glob("trial-*/jobs/*"))] == ["1"] * 3, "no trial was begun twice"
    assert out.splitlines()[0].split() == ["trial", "state", "loss", "steps", "tokens", "time,", "s",
                                           "optimizer.learning_rate", "model.num_layers"]
    best = min(found, key=lambda line: line["value"])
    assert out.splitlines()[1].split()[:3] == [f"{best['trial']}", "complete", f"{best['value']:.6g}"]
    page = (killed / "report.html").read_text()
    assert page.count("<svg") == 2 and "http" not in page and f"{best['value']:.6g}" in page
    assert ended(begin(whole), whole)[1] == found
    assert jobs_command.main(["list", str(whole)]) == 0
    assert [line.split()[3] for line in capsys.readouterr().out.splitlines()[1:]] == ["done"] * 3
    other = begin(whole.with_name("killed"))
    assert ended(other, killed)[1] == found, "a sweep that has ended is reported again"
