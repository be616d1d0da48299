"""The page of runs: what it shows, that no text of a run becomes markup, and that nothing secret is in it."""

import json
import math
import re
import subprocess
import sys
import time
from base64 import b64decode

import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.commands.report import main
from jaxtrain.errors import UserError
from jaxtrain.pages.page_parts import html_table
from jaxtrain.pages.style import STYLE
from jaxtrain.runs.report import figures, run_facts
from jaxtrain.runs.report.report_page import ReportPage
from tests.runs.report.recorded import BEGAN, recorded

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>%{x}"
SECRET = "s3://key:hunter2@bucket/corpus?token=sesame"


def parts(page: str) -> tuple[str, dict]:
    """Return the visible part of a page, and the data of its figures."""
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S), json.loads(data)


def numbers(packed) -> np.ndarray:
    return np.frombuffer(b64decode(packed["bdata"]), packed["dtype"]) if isinstance(packed, dict) else np.array(packed)


@pytest.fixture
def eventful(tmp_path):
    workdir = tmp_path / "run<b>"
    events = ({"time": BEGAN + 50, "kind": "checkpoint", "process": 0, "step": 10, "blocked_s": 0.5},
              {"time": BEGAN + 55, "kind": "skip", "process": 0, "step": 21, "loss": 9.0},
              {"time": BEGAN + 60, "kind": "rollback", "process": 0, "step": 21, "restores_at_most": 10},
              {"time": BEGAN + 70, "kind": HOSTILE, "process": 0, "why": f"{HOSTILE} at {SECRET}"},
              {"time": "never", "kind": "sample", "step": 30, "text": f"Once {HOSTILE} {SECRET}"})
    recorded(workdir, events=events, starts=2, bad=(7,), overrides={"data.cache_dir": HOSTILE, "data.source": "SECRET"})
    config = (workdir / "config.json").read_text()  # as an older version, or a person, may have left it
    (workdir / "config.json").write_text(config.replace("SECRET", SECRET))
    (workdir / "checkpoints" / "10").mkdir(parents=True)
    (workdir / "metrics.rolled_back.jsonl").write_text("".join(
        json.dumps({"step": step, "loss": 9.0}) + "\n" for step in (16, 17, 11, 12)))
    (workdir / "evaluations").mkdir()
    (workdir / "evaluations" / "metrics.jsonl").write_text("".join(
        json.dumps({"step": step, "eval_copa_acc": step / 100}) + "\n" for step in (10, 20)))
    return workdir


def test_a_page_has_everything_of_a_run_and_nothing_that_acts_or_is_secret(eventful):
    page = ReportPage([eventful]).render()
    seen, data = parts(page)
    strings = json.dumps(data)
    for word in ("hunter2", "sesame"):
        assert word not in page, "a secret left the run"
    assert "***" in seen and "Once" in seen
    for text in (page, *re.findall(r'"((?:[^"\\]|\\.)*)"', strings)):
        assert "<script>alert" not in text and "<img" not in text
    assert "<b>" not in seen and not re.search(r'(?:src|href)=["\']?(?:https?:)?//', page), "it needs no network"
    for text in ("2.4489 at step 30", "best eval_loss", "NVIDIA H100 80GB HBM3", "data 2 × tensor 4", "rollback",
                 "20 layouts as one device (2026-11-30)",
                 "restores_at_most=10", "the run has cost about $", "2, 1 failed", "data.source"):
        assert text in seen, text
    loss = {trace["name"]: trace for trace in data["loss"]["data"] if trace["meta"]["role"] != "mean"}
    assert {"loss", "eval_loss", "taken back", "restart", "rollback", "loss: not finite"} <= set(loss)
    assert data["memory"]["data"][0]["name"] == "memory_peak_bytes" and "eval_perplexity" in seen
    assert "eval_copa_acc" in seen, "of a watcher"
    assert "spike" not in loss, "it is where the rollback is"
    assert numbers(loss["loss: not finite"]["x"]).tolist() == [7] and math.isnan(numbers(loss["loss"]["y"])[6])
    gone = numbers(loss["taken back"]["y"])
    assert len(gone) == 5 and math.isnan(gone[2]), "what was taken back twice is two curves"
    restart = loss["restart"]
    assert numbers(restart["x"])[:2].tolist() == [15, 15]
    np.testing.assert_allclose(numbers(restart["meta"]["x"]["tokens"])[0], 64 * 15)
    # The first step, whose time was not measured, counts as the others.
    np.testing.assert_allclose(numbers(restart["meta"]["x"]["hours"])[0], 15 * 36 / 3600)


def test_the_timeline_has_every_start_and_every_event_at_its_time(eventful):
    page = ReportPage([eventful])
    _, data = parts(page.render(bare=True))
    events = [trace for trace in data["timeline"]["data"] if trace["meta"]["role"] == "event"]
    assert sorted(trace["x"][0] for trace in events) == [1000 * (BEGAN + n) for n in (50, 55, 60, 70)]
    bars = {trace["name"]: trace for trace in data["timeline"]["data"] if trace["meta"]["role"] == "bar"}
    starts = sorted(part for bar in bars.values() for part in zip(bar["base"], bar["x"], strict=True))
    ends = np.cumsum([0, *(length for _, length in starts)])
    np.testing.assert_allclose([began - 1000 * BEGAN for began, _ in starts], ends[:-1], atol=1e-6)
    # The first start went on to step 17, and the second began at 15: 2 of 17 steps are lost.
    assert sum(bars["lost_work"]["x"]) / 1000 == pytest.approx(60 * 2 / 17)
    assert bars["restart_gap"]["x"] == [pytest.approx(1000 * (200 - 95))]
    assert [row[4] for row in run_facts.starts(page.runs[0].run)[1]] == ["17", "32"]


def test_runs_lie_over_each_other(tmp_path):
    workdirs = [recorded(tmp_path / name, overrides={"train.seed": seed}, shift=seed / 10)
                for seed, name in enumerate(("zero", "one<b>"))]
    seen, data = parts(ReportPage(workdirs).render(bare=True))
    named = {trace["name"] for trace in data["loss"]["data"]}
    one = "one&lt;b&gt;"  # Plotly reads tags
    each = {f"{run} {key}" for run in ("zero", one) for key in ("loss", "eval_loss")}
    assert each | {"zero and 1 more: mean of 2, 95 %"} <= named
    assert "<b>" not in seen and "<b>" not in json.dumps(data)
    dashes = {trace["line"]["dash"] for trace in data["grad_norm"]["data"]}
    assert len(dashes) == 2, "runs differ in more than colour"
    assert "Over seeds" in seen and "Where configs differ" in seen and "train.seed" in seen


def test_training_and_evaluation_are_told_apart(tmp_path):
    """A run without evaluations is not ranked among the evaluation losses of others, however low its loss is."""
    shifts = {"worse": 0.2, "better": 0.1, "none": -1}
    workdirs = [recorded(tmp_path / name, shift=shift) for name, shift in shifts.items()]
    lines = (workdirs[2] / "metrics.jsonl").read_text().splitlines()
    (workdirs[2] / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines if "eval_loss" not in line))
    page = ReportPage(workdirs)
    head, rows = run_facts.compared(page.runs)
    assert [row[1] for row in rows] == ["better", "worse", "none"]
    at = head.index("best eval_loss")
    assert head[at:at + 6] == ["best eval_loss", "at step", "newest eval_loss", "best loss", "at step", "newest loss"]
    assert rows[2][at:at + 3] == ["", "", ""] and all(rows[2][at + 3:at + 6])
    traces = parts(page.render(bare=True))[1]["loss"]["data"]
    better = [trace for trace in traces if trace["name"].startswith("better")]
    assert {trace["name"] for trace in better} == {"better loss", "better eval_loss"}


def test_few_outliers_do_not_flatten_a_chart(tmp_path):
    workdir = recorded(tmp_path / "run", steps=200)
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    for place, line in enumerate(line for line in lines if "step_time_s" in line):
        line["step_time_s"] = 300.0 if place in (1, 70) else 1 + place % 10 / 10
    (workdir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    _, data = parts(ReportPage([workdir]).render(bare=True))
    low, high = data["step_time"]["layout"]["yaxis"]["range"]
    assert low <= 1 and 1.9 <= high < 10
    assert max(numbers(data["step_time"]["data"][0]["y"])) == 300, "it is only out of view"
    assert "range" not in data["learning_rate"]["layout"]["yaxis"]


def test_a_long_run_has_few_points_and_all_spikes(tmp_path):
    _, data = parts(ReportPage([recorded(tmp_path / "run", steps=4_500, bad=(4_000,))]).render(bare=True))
    raw = next(trace for trace in data["grad_norm"]["data"] if trace["meta"]["role"] == "raw")
    mean = next(trace for trace in data["grad_norm"]["data"] if trace["meta"]["role"] == "mean")
    assert len(numbers(raw["y"])) <= figures.POINTS + 2 and len(numbers(mean["y"])) == figures.POINTS // 2
    assert numbers(raw["y"]).max() == 1.0 and numbers(mean["y"]).max() < 0.6


def test_a_chart_shows_the_range_of_the_data_and_not_of_outliers(tmp_path):
    workdir = recorded(tmp_path / "run", steps=200)
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    lines[0]["loss"], lines[1]["step_time_s"] = 500.0, 9000.0  # the first loss, and a step that compiled
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, data = parts(ReportPage([workdir]).render(bare=True))
    low, high = data["loss"]["layout"]["yaxis"]["range"]
    assert low < 2.2 and 2.5 < high < 6, "the loss of the first step does not hide the rest"
    assert 36 < data["step_time"]["layout"]["yaxis"]["range"][1] < 50
    assert "range" not in data["learning_rate"]["layout"]["yaxis"], "without outliers it shows all"
    assert jt.plot(workdir).figure.layout.yaxis.range[1] == high


def test_only_very_long_words_of_a_table_are_broken():
    page = html_table(["what", "n"], [["finished", "1"], ["x" * 200, "2"]], 1)
    assert '<td role="cell" class=text>finished' in page and '<td role="cell" class="text long">xxx' in page
    assert "overflow-wrap:anywhere" not in re.findall(r"(?<!\w)\.text\{(.*?)\}", STYLE)[0]


def test_the_command(eventful, tmp_path, capsys, monkeypatch):
    assert main([str(eventful)]) == 0
    file = eventful / "report.html"
    assert capsys.readouterr().out.strip() == str(file) and file.stat().st_size < 3e6
    monkeypatch.chdir(tmp_path)
    other = recorded(tmp_path / "other")
    assert main([str(eventful), str(other)]) == 0 and (tmp_path / "report.html").exists()
    assert main([str(other), f"--output={tmp_path / 'none' / 'page.html'}"]) == 2
    assert "--output: " in capsys.readouterr().err
    for words, said in ((["nowhere"], "has no config.json"), ([], "WORKDIR"),
                        ([str(other), "--live", "--output=x"], "--live writes no file"),
                        ([str(other), "--port=1"], "read with --live only")):
        assert main(words) == 2 and said in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    assert main([str(other)]) == 2 and "pip install -e '.[report]'" in capsys.readouterr().err


def test_a_notebook_shows_the_same_curves_without_the_network(eventful):
    plot = jt.plot(eventful)
    shown = plot._repr_html_()
    assert {"loss", "eval_loss", "restart"} <= {trace.name for trace in plot.figure.data}
    assert re.search(r"loss +[\d.]+ [▁▂▃▄▅▆▇█ ]{4,} [\d.]+", f"{plot}")
    assert not re.search(r'<script[^>]* src=', shown) and "<b>" not in "".join(trace.name for trace in plot.figure.data)


def test_a_run_without_a_step(tmp_path):
    workdir = recorded(tmp_path / "run")
    (workdir / "metrics.jsonl").write_text("")
    assert "No steps yet" in jt.plot(workdir)._repr_html_() and f"{jt.plot(workdir)}" == "no steps yet"
    assert "<p>No steps yet.</p>" in ReportPage([workdir]).render()


@pytest.mark.slow
def test_a_run_of_many_steps_is_a_small_page(tmp_path):
    workdir = recorded(tmp_path / "run", steps=200_000)
    began = time.process_time()
    page = ReportPage([workdir]).render()
    print(f"200,000 lines: {time.process_time() - began:.1f} s of processor time, {len(page) / 1e6:.1f} MB")
    assert len(page) < 4e6


@pytest.mark.slow
def test_it_needs_no_jax(eventful):
    code = ("import sys; from jaxtrain.commands.report import main; assert main(sys.argv[1:]) == 0; "
            "print('jax' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code, str(eventful)], capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


@pytest.mark.slow
def test_whatever_a_file_holds_there_is_a_page_or_one_sentence(eventful):
    """Values of any type in the place of others."""
    rng = np.random.default_rng(0)
    odd = [None, True, -1, 1e308, 10**400, "text", "", [], {}, [{}], {"a": 1}, "9" * 50]

    def spoilt(value):
        if isinstance(value, dict | list) and rng.random() < 0.9 and value:
            keys = [*value] if isinstance(value, dict) else range(len(value))
            key = keys[rng.integers(len(keys))]
            value[key] = spoilt(value[key])
            return value
        return odd[rng.integers(len(odd))]

    files = [eventful / name for name in ("config.json", "run.json", "ledger/0001.json", "ledger/0002.json")]
    logs = [eventful / name for name in ("metrics.jsonl", "events.jsonl", "metrics.rolled_back.jsonl")]
    before = {file: file.read_text() for file in (*files, *logs)}
    pages = 0
    for _ in range(60):
        for file, text in before.items():
            lines = [text] if file in files else text.splitlines()
            place = rng.integers(len(lines))
            if rng.random() < 0.3:
                lines[place] = json.dumps(spoilt(json.loads(lines[place])))
            file.write_text("\n".join(lines) + "\n")
        try:
            pages += bool(ReportPage([eventful]).render(bare=True))
        except UserError:
            continue
    assert pages > 30
