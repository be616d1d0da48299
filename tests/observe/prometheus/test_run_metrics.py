"""The metrics that a process exports: its lines' numbers, its time, its events, in the form that Prometheus reads."""

import math
import shutil
import subprocess
import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxtrain.observe import events
from jaxtrain.observe.prometheus import run_metrics
from jaxtrain.observe.prometheus.metric_table import COMMON, METRICS
from tests.observe.prometheus.exposition import made, values


@pytest.fixture
def run(tmp_path):
    return made(tmp_path / "run")


def steps(metrics, ledger, clock, numbers, seconds=2.0):
    for step in numbers:
        ledger.dispatched(step)
        clock.time += seconds
        ledger.completed(step)
        metrics.completed(step)


def test_time_and_steps(run):
    metrics, ledger, clock = run
    clock.time += 7
    ledger.resumed(10)
    steps(metrics, ledger, clock, [11, 12, 13])
    with ledger.book("data_wait"):
        clock.time += 5
    steps(metrics, ledger, clock, [14])
    found = values(metrics.text())
    assert found["jaxtrain_step"] == 14 and found["jaxtrain_steps_total"] == 4
    assert found["jaxtrain_step_duration_seconds_count"] == 3  # the first has no predecessor
    assert found["jaxtrain_step_duration_seconds_sum"] == 6  # the wait for data is not in it
    assert found['jaxtrain_step_duration_seconds_bucket,le="1"'] == 0
    assert found['jaxtrain_step_duration_seconds_bucket,le="2"'] == 3
    assert found['jaxtrain_step_duration_seconds_bucket,le="+Inf"'] == 3
    assert found['jaxtrain_time_seconds_total,category="step"'] == 8
    assert found['jaxtrain_time_seconds_total,category="data_wait"'] == 5
    assert found['jaxtrain_time_seconds_total,category="init"'] == 7
    assert found["jaxtrain_start_timestamp_seconds"] == 1000 and found["jaxtrain_goodput_ratio"] == 8 / 20
    assert abs(found["jaxtrain_last_step_timestamp_seconds"] - time.time()) < 5


def test_a_rollback_takes_nothing_back_from_counters(run):
    metrics, ledger, clock = run
    ledger.resumed(0)
    steps(metrics, ledger, clock, range(1, 11))
    for step in (9, 10):
        metrics.write({"step": step, "tokens": 100 * step, "loss": 2.0})
    before = values(metrics.text())
    ledger.resumed(5)
    steps(metrics, ledger, clock, [6, 7])
    for step in (6, 7):
        metrics.write({"step": step, "tokens": 100 * step, "loss": 2.0})
    after = values(metrics.text())
    assert [key for key in before if "_total" in key and after[key] < before[key]] == []
    assert after["jaxtrain_lost_work_seconds_total"] == 10 and before["jaxtrain_lost_work_seconds_total"] == 0
    assert after['jaxtrain_time_seconds_total,category="step"'] == 24
    assert (after["jaxtrain_step"], after["jaxtrain_tokens"], after["jaxtrain_tokens_total"]) == (7, 700, 200)
    assert after["jaxtrain_step_duration_seconds_count"] == 10 and after["jaxtrain_step_duration_seconds_sum"] == 20


def test_lines(run, monkeypatch):
    metrics, *_ = run
    monkeypatch.setattr(run_metrics, "MOST_KEYS", 2)
    metrics.write({"step": 1, "memory_bytes": 7, "memory_peak_bytes": 8})  # a scrape asks each device itself
    metrics.write({"step": 1, "loss": 2.5, "tokens_per_s": 3.0, "a": 1.0, "b": 2, "c": 3})
    metrics.write({"step": 1, "eval_loss": 2.25})
    metrics.write({"step": 2, "loss": None, "tokens_per_s": None, "a": None})
    found = values(metrics.text())
    assert math.isnan(found["jaxtrain_loss"]) and found["jaxtrain_eval_loss"] == 2.25
    assert "jaxtrain_tokens_per_second" not in found, "unknown is not exported"
    assert math.isnan(found['jaxtrain_line_value,key="a"']) and found['jaxtrain_line_value,key="b"'] == 2
    assert 'jaxtrain_line_value,key="c"' not in found, "the number of series is bounded"


def test_events_and_checkpoints(run, tmp_path):
    metrics, ledger, _ = run
    ledger.resumed(30)
    first = values(metrics.text())
    assert first["jaxtrain_anomalies_total"] == 0, "an increase from nothing is not seen"
    assert first["jaxtrain_checkpoint_last_step"] == 30
    events.listeners.append(metrics.heard)
    try:
        for kind in ("spike", "skip", "skip", "checkpoint_failed"):
            events.record(tmp_path / "missing", kind, why='a "quote"')
        events.record(tmp_path, "checkpoint", step=50, blocked_s=0.5, written_s=2.0, verified_s=1.0, bytes=1000)
    finally:
        events.listeners.remove(metrics.heard)
    events.record(tmp_path, "spike")
    found = values(metrics.text())
    assert found["jaxtrain_anomalies_total"] == 3 and found["jaxtrain_checkpoint_failures_total"] == 1
    assert found['jaxtrain_events_total,kind="skip"'] == 2 and found["jaxtrain_checkpoints_total"] == 1
    assert found["jaxtrain_checkpoint_last_step"] == 50 and found["jaxtrain_checkpoint_size_bytes"] == 1000
    assert abs(found["jaxtrain_checkpoint_last_timestamp_seconds"] - time.time()) < 5


def test_other_processes_leave_out_what_is_the_runs(run, monkeypatch):
    metrics, ledger, _ = run
    ledger.resumed(0)
    metrics.process = 1
    text = metrics.text()
    assert [metric.name for metric in METRICS if metric.first and metric.name in text] == []
    assert "jaxtrain_step{" in text and "jaxtrain_time_seconds_total{" in text


def test_the_machine_and_its_devices(run, monkeypatch):
    metrics, *_ = run
    monkeypatch.setattr(run_metrics.system_metrics, "read", lambda folder: {
        "host_cpu_percent": 25.0, "gpu0_utilization_percent": 50.0, "gpu12_power_watts": 300.0})
    monkeypatch.setattr(run_metrics.jax, "local_devices", lambda: [Device(3), Device(4)])
    found = values(metrics.text())
    assert found["jaxtrain_host_cpu_ratio"] == 0.25 and found['jaxtrain_gpu_utilization_ratio,gpu="0"'] == 0.5
    assert found['jaxtrain_gpu_power_watts,gpu="12"'] == 300 and found['jaxtrain_source_up,source="system"'] == 1
    assert found['jaxtrain_device_memory_used_bytes,device="4"'] == 40


class Device:
    def __init__(self, number):
        self.id = number

    def memory_stats(self):
        return {"bytes_in_use": 10 * self.id, "num_allocs": 1} if self.id else None


def test_a_driver_that_hangs_or_fails_hides_nothing_else(run, monkeypatch):
    metrics, *_ = run
    hang, calls = threading.Event(), []
    monkeypatch.setattr(run_metrics, "PATIENCE_S", 0.05)
    monkeypatch.setattr(run_metrics.system_metrics, "read", lambda folder: (calls.append(1), hang.wait(), {})[2])
    monkeypatch.setattr(run_metrics.jax, "local_devices", lambda: 1 / 0)
    for _ in range(3):
        found = values(metrics.text())
        assert found['jaxtrain_source_up,source="system"'] == found['jaxtrain_source_up,source="devices"'] == 0
        assert found["jaxtrain_devices"] == 4
    assert len(calls) == 1, "no second call while one hangs"
    hang.set()
    while metrics._slow["system"]._thread.is_alive():
        time.sleep(0.01)
    assert values(metrics.text())['jaxtrain_source_up,source="system"'] == 1


def test_the_form(tmp_path):
    metrics, ledger, clock = made(tmp_path / 'a "run" \\ of mine')
    steps(metrics, ledger, clock, [1, 2])
    metrics.write({"step": 1, "loss": None, "tokens": 5, "eval_loss": 1.5, "other": 2.0})
    families = {family.name: family for family in text_string_to_metric_families(metrics.text())}
    table = {metric.name.removesuffix("_total"): metric for metric in METRICS}
    assert families.keys() <= table.keys() and len(families) > 30
    for name, family in families.items():
        assert (family.type, family.documentation) == (table[name].kind, table[name].help)
        for sample in family.samples:
            own = {"le"} & sample.labels.keys() if table[name].kind == "histogram" else set(table[name].labels)
            assert sample.labels.keys() == {*COMMON, *own} and sample.labels["run"] == 'a "run" \\ of mine'
    if shutil.which("promtool"):
        done = subprocess.run(["promtool", "check", "metrics"], input=metrics.text(), capture_output=True, text=True)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_no_credentials(tmp_path):
    metrics, *_ = made(tmp_path / "s3:%2F%2Fkey:password@host")
    metrics.run = run_metrics.redacted("s3://key:password@bucket")
    events.listeners.append(metrics.heard)
    try:
        events.record(tmp_path, "mirror_failed", reason="https://user:password@host/x?token=password is gone")
    finally:
        events.listeners.remove(metrics.heard)
    metrics.write({"step": 1, "loss": 1.0})
    assert "mirror_failed" in metrics.text() and "reason" not in metrics.text() and "token" not in metrics.text()
