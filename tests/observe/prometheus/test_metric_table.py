"""The table of metrics keeps Prometheus's conventions, and what is made from it is not stale."""

import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from jaxtrain.commands.dashboards import main
from jaxtrain.launch.kubernetes.jobset import NAME_LABEL
from jaxtrain.observe.prometheus.alert_rules import alerts
from jaxtrain.observe.prometheus.dashboards import files
from jaxtrain.observe.prometheus.metric_table import COMMON, METRICS, markdown

ROOT = Path(__file__).parents[3]
UNITS = ("seconds", "bytes", "ratio", "celsius", "watts", "hertz")


def test_names():
    every = [metric.name for metric in METRICS]
    assert len(set(every)) == len(every)
    for metric in METRICS:
        assert re.fullmatch(r"jaxtrain(_[a-z0-9]+)+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help.endswith(".") and not set(metric.labels) & set(COMMON), metric.name
        assert len(metric.labels) <= 1 or metric.name.endswith("_info")
        units = [unit for unit in UNITS if unit in metric.name.split("_")]
        assert all(metric.name.removesuffix("_total").endswith(unit) for unit in units), "a unit comes last"
        assert not re.search(r"_(ms|percent|mb|gb|minutes|milliseconds)\b", metric.name)


def test_the_files_are_current(tmp_path, capsys):
    for name, content in files().items():
        path = ROOT / "deploy" / name
        assert path.read_text() == content, "run jaxtrain dashboards --output=deploy"
    assert main([f"--output={tmp_path}"]) == 0
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")} == files().keys()
    assert main(["--output=/dev/null/x"]) == 2 and "--output: /dev/null" in capsys.readouterr().err


def test_the_page_has_the_table():
    page = (ROOT / "docs/observe-prometheus.md").read_text()
    assert markdown() in page, "put what jaxtrain.observe.prometheus.metric_table.markdown() returns there"
    listed = re.findall(r"^\| `(Jaxtrain\w+)` \| (\w+) \|", page, re.M)
    assert listed == [(one.name, one.severity) for one in alerts()]


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (apt-get install prometheus)")
def test_prometheus_takes_the_configs_on_the_page(tmp_path):
    configs = re.findall(r"^ *```yaml\n(.*?)```", (ROOT / "docs/observe-prometheus.md").read_text(), re.M | re.S)
    assert len(configs) == 2 and re.sub(r"\W", "_", NAME_LABEL) in configs[1]
    (tmp_path / "alerts.yml").write_text(files()["prometheus/alerts.yml"])
    for config in configs:  # Debian's Prometheus is built without Kubernetes
        config = config.replace("kubernetes_sd_configs: [{role: pod}]", 'static_configs: [{targets: ["10.0.0.1"]}]')
        (tmp_path / "prometheus.yml").write_text(textwrap.dedent(config))
        done = subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True,
                              text=True)
        assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr
