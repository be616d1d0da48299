"""The dashboards: every query is PromQL over metrics that exist, and nothing lies over anything else."""

import itertools
import re
import shutil
import subprocess

import pytest
import yaml

from jaxtrain.observe.prometheus.alert_rules import alerts
from jaxtrain.observe.prometheus.dashboards import ALL, dashboard, selected
from jaxtrain.observe.prometheus.metric_table import METRICS, names


def queries():
    return [target["expr"] for of in ALL for panel in dashboard(of)["panels"] for target in panel.get("targets", [])]


def test_every_metric_is_shown_and_every_name_exists():
    shown = {name for expr in queries() for name in re.findall(r"jaxtrain_\w+", expr)}
    assert shown <= names()
    whole = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    told = {name for alert in alerts() for name in re.findall(r"jaxtrain_\w+", alert.expr)}
    left = sorted({metric.name for metric in METRICS} - whole - told)  # for queries of one's own
    assert left == ["jaxtrain_examples", "jaxtrain_examples_per_second", "jaxtrain_run_info", "jaxtrain_steps_total",
                    "jaxtrain_tokens", "jaxtrain_tokens_total"]


@pytest.mark.parametrize("of", ALL, ids=lambda of: of.uid)
def test_panels_have_a_place_and_say_what_they_show(of):
    panels = dashboard(of)["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    places = [panel["gridPos"] for panel in panels]
    assert all(at["x"] >= 0 and at["x"] + at["w"] <= 24 for at in places)
    for a, b in itertools.combinations(places, 2):
        apart = (a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"] or a["y"] + a["h"] <= b["y"]
                 or b["y"] + b["h"] <= a["y"])
        assert apart, (a, b)
    for panel in panels:
        if panel["type"] != "row":
            assert panel["description"] or "ALERTS" in panel["targets"][0]["expr"]
            assert all(f'{pick}=~"${pick}"' in target["expr"] or "ALERTS" in target["expr"]
                       for target in panel["targets"] for pick in of.picks)


def test_a_query_is_selected_by_the_variables():
    assert selected('rate(jaxtrain_a_total[5m]) / jaxtrain_b{process="0"}', ["run", "host"]) == (
        'rate(jaxtrain_a_total{run=~"$run", host=~"$host"}[5m]) / jaxtrain_b{run=~"$run", host=~"$host", process="0"}')


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (apt-get install prometheus)")
def test_promtool_takes_every_query(tmp_path):
    rules = [{"record": f"query:{n}", "expr": re.sub(r"\$__rate_interval", "5m", expr).replace("$", "")}
             for n, expr in enumerate(queries())]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", tmp_path / "queries.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
