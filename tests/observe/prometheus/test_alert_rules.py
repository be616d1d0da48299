"""Every alert fires on what it is for, and keeps silent on what looks alike; asked of Prometheus's own promtool."""

import re
import shutil
import subprocess

import pytest
import yaml

from jaxtrain.observe.prometheus.alert_rules import alerts, rules_file
from jaxtrain.observe.prometheus.metric_table import names

promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (apt-get install prometheus)")
STEP = "step_duration_seconds"
GPU = {"gpu_memory_used_bytes;gpu=0": "80x60", "gpu_memory_size_bytes;gpu=0": "100x60"}
SLOWER = {f"{STEP}_sum": "0+60x400", f"{STEP}_count": "0+60x300 18030+30x60", "devices": "8x400"}
# alert: (minute, series, whether it fires then); a series is NAME;LABEL=VALUE and its values, as promtool writes them
CASES = {
    "JaxtrainStepStalled": [
        (25, {"last_step_timestamp_seconds": "0+60x10 600x30", f"{STEP}_sum": "9x40", f"{STEP}_count": "9x40"}, True),
        (25, {"last_step_timestamp_seconds": "0+60x10 600x30", f"{STEP}_sum": "180x40", f"{STEP}_count": "9x40"}, True),
        (25, {"last_step_timestamp_seconds": "0+60x10 600x30", f"{STEP}_sum": "0x40", f"{STEP}_count": "0x40"}, True),
        (70, {"start_timestamp_seconds": "0x80"}, True),
        (25, {"last_step_timestamp_seconds": "0+60x40", f"{STEP}_sum": "9x40", f"{STEP}_count": "9x40"}, False),
        (25, {"last_step_timestamp_seconds": "0+60x10 600x30", f"{STEP}_sum": "990x40", f"{STEP}_count": "9x40"},
         False),
        (25, {"last_step_timestamp_seconds": "0+60x10 600x30", f"{STEP}_sum": "9x40", f"{STEP}_count": "9x40",
              "step": "100x40", "target_step": "100x40"}, False),
        (50, {"start_timestamp_seconds": "0x80"}, False)],
    "JaxtrainProcessMissing": [
        (10, {"processes": "2x20", "start_timestamp_seconds": "1x20"}, True),
        (10, {"processes": "2x20", "start_timestamp_seconds": "1x20", "start_timestamp_seconds;process=1": "1x20"},
         False)],
    "JaxtrainRestarting": [
        (25, {"failures": "0x10 1x10 2x10"}, True), (25, {"failures": "5x30"}, False),
        (25, {"failures": "0x10 1x20"}, False)],
    "JaxtrainLossNotFinite": [(3, {"loss": "3 2 NaN NaN"}, True), (3, {"loss": "3 2 1 1"}, False)],
    "JaxtrainLossSpike": [
        (52, {"loss": "2x50 4x5"}, True), (13, {"anomalies_total": "0x10 1x10"}, True),
        (52, {"loss": "2x60", "anomalies_total": "0x60"}, False), (52, {"loss": "-2x50 -1x5"}, False)],
    "JaxtrainSamplerMismatch": [
        (20, {"line_value;key=sampler_mismatch": "0.3x30"}, True),
        (20, {"line_value;key=sampler_mismatch": "0.01x30"}, False), (20, {"line_value;key=reward": "0.5x30"}, False),
        (12, {"line_value;key=sampler_mismatch": "0.01x10 0.3x10"}, False)],
    "JaxtrainLowGpuUtilization": [
        (40, {"gpu_utilization_ratio;gpu=0": "0.2x60", **GPU}, True),
        (40, {"gpu_utilization_ratio;gpu=0": "0.9x60", **GPU}, False),
        (40, {"gpu_utilization_ratio;gpu=0": "0.9x60", "gpu_utilization_ratio;gpu=1": "0x60", **GPU,
              "gpu_memory_used_bytes;gpu=1": "1x60", "gpu_memory_size_bytes;gpu=1": "100x60"}, False)],
    "JaxtrainThroughputDrop": [
        (325, {"tokens_per_second": "1000x300 500x40"}, True), (325, {"tokens_per_second": "1000x340"}, False),
        (325, {"tokens_per_second": "1000x318 500x3 1000x30"}, False)],
    "JaxtrainDataWait": [
        (30, {"time_seconds_total;category=data_wait": "0+12x60"}, True),
        (30, {"time_seconds_total;category=data_wait": "0+3x60"}, False),
        (30, {"time_seconds_total;category=eval": "0+30x60"}, False)],
    "JaxtrainSlowCollectives": [
        (330, {**SLOWER, "slowest_ratio": "1x400", "probe_seconds": "0.1x400"}, True),
        (330, {**SLOWER, f"{STEP}_count": "0+60x400", "slowest_ratio": "1x400", "probe_seconds": "0.1x400"}, False),
        (330, {**SLOWER, "slowest_ratio": "1x300 1.5x100", "probe_seconds": "0.1x400"}, False),
        (330, {**SLOWER, "slowest_ratio": "1x400", "probe_seconds": "0.1x300 0.2x100"}, False),
        (330, {**SLOWER}, False)],
    "JaxtrainStraggler": [(20, {"slowest_ratio": "1.5x30"}, True), (20, {"slowest_ratio": "1.1x30"}, False)],
    "JaxtrainCheckpointOverdue": [
        (30, {"step": "0+10x60", "checkpoint_last_step": "0x60", "checkpoint_interval_steps": "100x60"}, True),
        (30, {"step": "0+10x60", "checkpoint_last_step": "0+9x60", "checkpoint_interval_steps": "100x60"}, False),
        (30, {"step": "0+10x60", "checkpoint_last_step": "0x60", "checkpoint_interval_steps": "0x60"}, False)],
    "JaxtrainCheckpointFailed": [
        (12, {"checkpoint_failures_total": "0x10 1x10"}, True), (12, {"checkpoint_failures_total": "3x20"}, False)],
    "JaxtrainLowGoodput": [
        (120, {"time_seconds_total;category=step": "0+30x130", "lost_work_seconds_total": "0x130",
               "start_timestamp_seconds": "0x130"}, True),
        (120, {"time_seconds_total;category=step": "0+57x130", "lost_work_seconds_total": "0+20x130",
               "start_timestamp_seconds": "0x130"}, True),
        (120, {"time_seconds_total;category=step": "0+57x130", "lost_work_seconds_total": "0x130",
               "start_timestamp_seconds": "0x130"}, False),
        (120, {"time_seconds_total;category=step": "0+30x130", "lost_work_seconds_total": "0x130",
               "start_timestamp_seconds": "5400x130"}, False)],
    "JaxtrainDeviceMemoryNearEnd": [
        (10, {"device_memory_peak_bytes;device=0": "98x20", "device_memory_limit_bytes;device=0": "100x20"}, True),
        (10, {"device_memory_peak_bytes;device=0": "90x20", "device_memory_limit_bytes;device=0": "100x20"}, False)],
    "JaxtrainHostMemoryNearEnd": [
        (10, {"host_memory_used_bytes": "96x20", "host_memory_size_bytes": "100x20"}, True),
        (10, {"host_memory_used_bytes": "80x20", "host_memory_size_bytes": "100x20"}, False)],
    "JaxtrainDiskFilling": [
        (20, {"disk_free_bytes": "4x30", "disk_size_bytes": "100x30"}, True),
        (70, {"disk_free_bytes": "500-2x90", "disk_size_bytes": "1000x90"}, True),
        (70, {"disk_free_bytes": "500x90", "disk_size_bytes": "1000x90"}, False)],
    "JaxtrainGpuErrors": [
        (15, {"gpu_ecc_errors_total;gpu=3": "7x10 8x10"}, True), (15, {"gpu_ecc_errors_total;gpu=3": "7x30"}, False)],
    "JaxtrainGpuHot": [
        (15, {"gpu_temperature_celsius;gpu=3": "90x30"}, True),
        (15, {"gpu_temperature_celsius;gpu=3": "70x30"}, False)],
}


def series(given, run="big"):
    """Return series as promtool has them; a process's labels are there unless others are given."""
    found = []
    for what, values in given.items():
        name, *more = what.split(";")
        labels = {"run": run, "process": "0", "host": "node1", **dict(one.split("=") for one in more)}
        shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
        found.append({"series": f"jaxtrain_{name}{{{shown}}}", "values": values})
    return found


def test_every_alert_has_both_cases():
    assert CASES.keys() == {alert.name for alert in alerts()}
    assert all({fires for _, _, fires in cases} == {True, False} for cases in CASES.values())


def test_alerts_use_metrics_that_exist():
    used = {name for alert in alerts() for name in re.findall(r"jaxtrain_\w+", alert.expr)}
    assert used <= names() and len(used) > 20
    assert {alert.severity for alert in alerts()} == {"critical", "warning"}


@promtool
@pytest.mark.slow
def test_each_fires_on_its_cause_only(tmp_path):
    (tmp_path / "alerts.yml").write_text(rules_file())
    inputs, queries = [], []  # all in one, since a test takes half a second: each case is a run of its own
    for name, cases in CASES.items():
        for minute, given, fires in cases:
            inputs += series(given, run=f"case{len(queries)}")
            queries.append({
                "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing", run="case{len(queries)}"}})',
                "eval_time": f"{minute}m", "exp_samples": [{"labels": "{}", "value": 1}] if fires else []})
    text = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": [
        {"interval": "1m", "input_series": inputs, "promql_expr_test": queries}]}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(text))
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "tests.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
@pytest.mark.parametrize("pace", [1.0, 1 / 60])
def test_promtool_takes_the_rules(pace, tmp_path):
    (tmp_path / "alerts.yml").write_text(rules_file(pace))
    done = subprocess.run(["promtool", "check", "rules", tmp_path / "alerts.yml"], capture_output=True, text=True)
    assert done.returncode == 0 and f"SUCCESS: {len(alerts())} rules" in done.stdout, done.stdout + done.stderr


@promtool
def test_what_an_alert_says(tmp_path):
    (tmp_path / "alerts.yml").write_text(rules_file())
    expected = {"summary": "big: devices wait for data 20% of the time", "description": "process 0 (node1) has no step "
                "in flight while it waits for a batch. See the loader's keys in docs/data.md."}
    labels = {"severity": "warning", "run": "big", "process": "0", "host": "node1", "category": "data_wait"}
    test = {"interval": "1m", "input_series": series({"time_seconds_total;category=data_wait": "0+12x60"}),
            "alert_rule_test": [{"eval_time": "30m", "alertname": "JaxtrainDataWait", "exp_alerts": [
                {"exp_labels": labels, "exp_annotations": expected}]}]}
    text = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(text))
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "tests.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
