"""The report of a sweep: the order of its points, what its keys explain, and the page."""

import html
import itertools
import json
import math
import random
import re
import shlex
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from jaxtrain.launch.sweep import findings, sweep_page
from jaxtrain.launch.sweep.findings import explained
from jaxtrain.launch.sweep.metric_curve import MetricCurve
from jaxtrain.launch.sweep.search_space import Range
from jaxtrain.launch.sweep.trials import Trial, points_of, read
from tests.launch.sweep.simulated import RATE, Machine, described

KEYS = {RATE: {"low": 1e-4, "high": 1.0, "log": True}, "optimizer.weight_decay": [0.0, 0.1], "model.num_layers": [1, 2]}


@pytest.fixture
def found(tmp_path):
    """A sweep of 40 points; what came of them follows from the rate, and a little from the decay."""
    machine = Machine(tmp_path)
    sweep = described(machine, keys=KEYS, budget={"trials": 40}, stop={"first": 9})
    for number, keys in enumerate(sweep.points()):
        workdir = machine.root / f"trial-{number:04}"
        workdir.mkdir(parents=True)
        state = "stopped" if number % 5 == 4 else "failed" if number == 7 else "complete"
        value = abs(math.log10(keys[RATE]) + 2) + keys["optimizer.weight_decay"]
        lines = [{"step": step, "eval_loss": value + 1 / step} for step in (1, 9, 81 if state == "complete" else 10)]
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        ended = {"trial": number, "state": state, "value": None if number == 7 else lines[-1]["eval_loss"],
                 "tokens": 5, "seconds": 2.0, "dollars": None}
        (workdir / "trial.json").write_text(json.dumps({
            "trial": number, "keys": keys, "seed": None, "length": 81, "sampler": {}, "passed": 0, "job": 1,
            "devices": "", "ended": ended}))
    return sweep, points_of(read(sweep, machine.root), 1)


def test_the_best_comes_first(found):
    sweep, tried = found
    order = findings.ranked(sweep, tried)
    assert [point.state for point in order] == ["complete"] * 31 + ["stopped"] * 8 + ["failed"]
    values = [findings.value_of(point) for point in order]
    assert values[:31] == sorted(values[:31]) and values[31:39] == sorted(values[31:39]) and values[39] is None
    head, rows = findings.rows(sweep, tried)
    assert head == ["trial", "state", "eval_loss", "steps", "tokens", "time, s", *KEYS]
    assert rows[0][:2] == [f"{order[0].number}", "complete"] and rows[-1][:3] == ["7", "failed", ""]
    said = [*findings.points(sweep, tried)]
    assert [point["value"] for point in said] == values and said[-1]["state"] == "failed"
    assert [point["trials"] for point in said] == [[point.number] for point in order]
    assert said[0]["keys"] == order[0].keys and f"{said[0]['tokens']:,.0f}" == rows[0][4]
    tried[0].trials[0].ended = None  # it runs, and the table says how far it is
    (runs,) = (row for row in findings.rows(sweep, points_of([tried[0].trials[0]], 1))[1])
    assert runs[1] == "runs" and runs[2] == rows[[row[0] for row in rows].index("0")][2] and runs[3] == "81"
    upside_down = described(Machine(sweep.workdir), keys=KEYS, objective={"goal": "maximise"}, stop={"first": 9})
    assert [point.number for point in findings.ranked(upside_down, tried)][:31] == [
        point.number for point in reversed(order[:31])]


def test_what_keys_explain():
    chance = random.Random(0)
    keys = [chance.random() for _ in range(80)]
    wide, two = Range(low=0, high=1), Range(("a", "b"))
    assert explained(keys, [key ** 3 for key in keys], wide) > 0.9
    assert explained(keys, [-key for key in keys], wide) > 0.9
    assert explained(keys, [chance.random() for _ in keys], wide) < 0.15
    few = [explained(keys[:8], [chance.random() for _ in range(8)], wide) for _ in range(200)]
    assert sum(few) / 200 < 0.25, "four groups of eight points explain something by chance"
    names = [chance.choice("ab") for _ in keys]
    noisy = [(name == "a") + chance.gauss(0, 0.5) for name in names]
    assert 0.3 < explained(names, noisy, two) < 0.8
    assert explained([1.0], [1.0], wide) == explained([], [], wide) == explained(["a"] * 5, [1, 2, 3, 4, 5], two) == 0


@pytest.mark.slow
def test_importance_of_a_sweep(found):
    head, rows = findings.importance(*found)
    assert head[:2] == ["key", "explains"] and rows[0][0] == RATE
    shares = {row[0]: [int(cell.rstrip("%")) for cell in row[1:]] for row in rows}
    assert shares[RATE][0] > 40 and shares["model.num_layers"][0] < 15
    if len(head) > 2:  # Optuna's measure too
        assert sum(share[1] for share in shares.values()) in range(98, 103) and shares[RATE][1] > 60


def test_the_page_needs_nothing_and_draws_all_points(found, monkeypatch):
    monkeypatch.setattr(findings, "_ENOUGH", 1000)  # Optuna takes seconds to import
    sweep, tried = found
    text = sweep_page.page(sweep, tried)
    assert not re.search(r"https?:|<script|<link|src=|url\(", text) and "nan" not in text
    lines, curves = (ElementTree.fromstring(drawn) for drawn in re.findall(r"<svg.*?</svg>", text, re.S))
    for drawn, count, best in ((lines, 31, 1), (curves, 40, 1)):
        paths = [path for path in drawn.iter("path") if path.get("class") != "axis"]
        assert len(paths) == count and sum(path.get("class") == "best" for path in paths) == best
        assert paths[-1].get("class") == "best", "the best is drawn over the others"
        left, top, width, height = map(float, drawn.get("viewBox").split())
        for path in paths:
            for x, y in (map(float, place.split()) for place in path.get("d")[1:].split("L")):
                assert left <= x <= left + width and 0 <= y <= 260 <= top + height
    best = findings.ranked(sweep, tried)[0]
    assert f"--config.{RATE}={best.keys[RATE]}" in text
    up = [float(place.split()[1]) for place in list(lines.iter("path"))[30].get("d")[1:].split("L")]
    assert up[-1] == 0, "the best end of the metric is above"
    ends = [float(path.get("d").split("L")[-1].split()[1]) for path in curves.iter("path")
            if path.get("class") != "axis"]
    assert ends[-1] > 200 > min(ends), "the lower, the lower"
    assert {word.text for word in lines.iter("text")} >= {*KEYS, "eval_loss", "0.0001", "1", "0", "0.1"}


def test_labels_of_many_keys_do_not_overlap(tmp_path):
    keys = {f"optimizer.a_rather_long_key_{i}": [1, 2] for i in range(9)}
    sweep = replace(described(Machine(tmp_path)), ranges={key: Range(tuple(values)) for key, values in keys.items()})
    curve = MetricCurve(tmp_path, "eval_loss")
    curve.values = {1: 2.0}
    trials = [Trial(tmp_path, n, dict.fromkeys(keys, 1 + n), None, 1, curve, ended={
        "state": "complete", "value": 1.0 + n, "seconds": 1.0, "tokens": 5, "dollars": None}) for n in range(2)]
    (drawn,) = re.findall(r"<svg.*?</svg>", sweep_page.coordinates(sweep, points_of(trials, 1)), re.S)
    svg = ElementTree.fromstring(drawn)
    ends = [(x - 3.5 * len(word.text), x + 3.5 * len(word.text)) for word in svg.iter("text")
            if word.get("y") == "-24.0" for x in [float(word.get("x"))]]
    assert len(ends) == 10 and ends[0][0] >= 0 and ends[-1][1] <= float(svg.get("viewBox").split()[2])
    assert all(one[1] < other[0] for one, other in itertools.pairwise(ends))


def test_what_a_page_says_is_text_and_its_command_a_command(tmp_path):
    machine, odd = Machine(tmp_path / "it's <b>"), ["a 'b' <i>", "$c"]
    sweep = replace(described(machine), ranges={'data.x<">': Range(tuple(odd))}, metric="loss<b>")
    curve = MetricCurve(machine.root, "loss<b>")
    curve.values = {1: 2.0, 5: 1.0}
    tried = points_of([Trial(machine.root, 0, {'data.x<">': odd[0]}, None, 5, curve, ended={
        "state": "complete", "value": 1.0, "seconds": 1.0, "tokens": 5, "dollars": None})], 1)
    text = sweep_page.page(sweep, tried)
    ElementTree.fromstring(re.sub(r"<!DOCTYPE.*?>|<(meta|link)[^>]*>", "", text).replace(" class=text", "")
                           .replace(" class=soft", ""))
    (command,) = re.findall(r'<pre class="command">(.*?)</pre>', text)
    assert shlex.split(html.unescape(command)) == [f"""--config.data.x<">={odd[0]}"""]
    assert "<b>" not in text and "<i>" not in text


def test_a_page_of_nothing(tmp_path):
    assert "None." in sweep_page.page(described(Machine(tmp_path)), [])
