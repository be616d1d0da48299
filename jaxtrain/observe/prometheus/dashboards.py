"""The Grafana dashboards: one of a run, one of its machines, and one of all runs, as Grafana imports them."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.observe.prometheus.alert_rules import rules_file
from jaxtrain.observe.prometheus.metric_table import METRICS

SCHEMA = 39  # of Grafana 11; later ones bring it up to theirs
_WIDTH = 24  # of Grafana's grid
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_METRIC = re.compile(r"\b(jaxtrain_\w+)(\{)?")
_NUMBER = {"colorMode": "value", "graphMode": "none", "justifyMode": "auto", "textMode": "auto", "orientation": "auto",
           "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "wideLayout": True,
           "showPercentChange": False, "percentChangeColorMode": "standard"}
_GRAPH = {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
          "tooltip": {"mode": "multi", "sort": "desc"}}
Json = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """A panel: queries and their legends, as a graph, or as the last number of each."""

    title: str
    unit: str  # as Grafana names it
    queries: Sequence[tuple[str, str]]
    number: bool = False
    share: bool = False  # from 0 to 1
    stacked: bool = False
    width: int = 8


@dataclass(frozen=True)
class Dashboard:
    """A dashboard: rows of panels, for what its variables pick."""

    uid: str
    title: str
    picks: Sequence[str]  # labels that are variables, and that every query selects by
    rows: Sequence[tuple[str, Sequence[Panel]]]


def graph(title: str, unit: str, *queries: tuple[str, str], share: bool = False, stacked: bool = False,
          width: int = 8) -> Panel:
    """Return a panel with a graph."""
    return Panel(title, unit, queries, share=share, stacked=stacked, width=width)


def number(title: str, unit: str, expr: str, legend: str = "{{run}}", width: int = 4) -> Panel:
    """Return a panel with the last value."""
    return Panel(title, unit, [(expr, legend)], number=True, width=width)


_STEP = "jaxtrain_step_duration_seconds"
_BY_PROCESS = "process {{process}}"
_RATE = "[$__rate_interval]"


def _mean(of: str) -> str:
    return f"rate({of}_sum{_RATE}) / rate({of}_count{_RATE})"


def _quantile(share: float) -> str:
    return f"histogram_quantile({share}, sum by (run, le) (rate({_STEP}_bucket{_RATE})))"


def _line(*keys: str) -> tuple[str, str]:
    """Return a query of some numbers of a line of metrics, and the legend that names each."""
    return f'jaxtrain_line_value{{process="0",key=~"{"|".join(keys)}"}}', "{{key}}"


RUN = Dashboard("jaxtrain-run", "jaxtrain: a run", ["run"], [
    ("Progress", [
        number("Step", "none", "max by (run) (jaxtrain_step)"),
        number("Done", "percentunit", "max by (run) (jaxtrain_step / jaxtrain_target_step)"),
        number("Left", "s", "max by (run) (jaxtrain_remaining_seconds)"),
        number("Since the last step", "s", "time() - max by (run) (jaxtrain_last_step_timestamp_seconds)"),
        number("Goodput", "percentunit", "max by (run) (jaxtrain_goodput_ratio)"),
        number("Failures", "none", "max by (run) (jaxtrain_failures)"),
    ]),
    ("Training", [
        graph("Loss", "none", ('jaxtrain_loss{process="0"}', "training"), ('jaxtrain_eval_loss{process="0"}', "eval")),
        graph("Gradient norm", "none", ('jaxtrain_gradient_norm{process="0"}', "before clipping")),
        graph("Learning rate", "none", ('jaxtrain_learning_rate{process="0"}', "learning rate")),
        graph("Anomalies", "none", ("increase(jaxtrain_anomalies_total[10m])", "anomalies in 10 minutes"),
              ("increase(jaxtrain_rollbacks_total[10m])", "rollbacks in 10 minutes")),
        graph("Other numbers of a line", "none", ('jaxtrain_line_value{process="0"}', "{{key}}"), width=16),
    ]),
    ("Reinforcement learning", [
        graph("Reward", "none", _line("reward", "score_.*", "equal_groups")),
        graph("Length of answers", "none", _line("answer_tokens", "turns")),
        graph("Entropy of the policy, divergence from the sampler", "none", _line("entropy", "kl_sampled", "kl")),
        graph("Staleness", "none", _line("staleness")),
        graph("Distance of the sampler's log-probabilities", "none", _line("sampler_mismatch", "sampler_mismatch_max")),
        graph("Time of a step's parts", "s", _line(
            "rollout_s", "sampler_wait_s", "environment_s", "reward_s", "teacher_s", "sync_s", "sampler_load_s",
            "exact_s"), stacked=True),
    ]),
    ("Speed", [
        graph("Throughput", "none", ('jaxtrain_tokens_per_second{process="0"}', "tokens per second")),
        graph("Model FLOPs utilization", "percentunit", ('jaxtrain_mfu_ratio{process="0"}', "MFU"), share=True),
        graph("Step duration", "s", (_quantile(0.5), "median"), (_quantile(0.99), "99 of 100"),
              (f"max by (run) ({_mean(_STEP)})", "mean")),
    ]),
    ("Where the time goes", [
        graph("Process 0, by what it did", "percentunit",
              (f'rate(jaxtrain_time_seconds_total{{process="0"}}{_RATE})', "{{category}}"), share=True, stacked=True),
        graph("Devices that wait for data", "percentunit",
              (f'rate(jaxtrain_time_seconds_total{{category="data_wait"}}{_RATE})', _BY_PROCESS), share=True),
        graph("Loops that wait for data", "s", ("jaxtrain_data_wait_seconds", _BY_PROCESS),
              ("jaxtrain_data_wait_max_seconds", "the longest")),
        graph("Goodput", "percentunit", ("max by (run) (jaxtrain_goodput_ratio)", "goodput"),
              ("max by (run) (jaxtrain_ettr_ratio)", "ETTR"), share=True),
        graph("Work lost", "s", ("max by (run) (jaxtrain_lost_work_seconds_total)", "by rollbacks of this start")),
        graph("Starts", "none", ("max by (run) (jaxtrain_starts)", "starts"),
              ("max by (run) (jaxtrain_failures)", "failures")),
    ]),
    ("Checkpoints", [
        graph("Steps that a failure would lose", "none",
              ('jaxtrain_step{process="0"} - jaxtrain_checkpoint_last_step', "since the newest good checkpoint"),
              ("2 * jaxtrain_checkpoint_interval_steps", "the alert")),
        graph("Seconds of a save", "s", ("jaxtrain_checkpoint_blocked_seconds", "loop held up"),
              ("jaxtrain_checkpoint_write_seconds", "written"), ("jaxtrain_checkpoint_verify_seconds", "read back")),
        number("Size", "bytes", "jaxtrain_checkpoint_size_bytes", width=2),
        number("Age", "s", "time() - jaxtrain_checkpoint_last_timestamp_seconds", width=2),
        number("Good", "none", "jaxtrain_checkpoints_total", width=2),
        number("Failed", "none", "max by (run) (jaxtrain_checkpoint_failures_total)", width=2),
    ]),
    ("Processes", [
        graph("Slowest process against its peers", "none", ("jaxtrain_slowest_ratio", "times as slow"),
              ("jaxtrain_slowest_process", "its number")),
        graph("Probe of the slowest device", "s", ("jaxtrain_probe_seconds", _BY_PROCESS)),
        graph("Memory of devices", "bytes", ("jaxtrain_device_memory_used_bytes", "process {{process}} {{device}}"),
              ("max by (run) (jaxtrain_device_memory_peak_bytes)", "the most"),
              ("min by (run) (jaxtrain_device_memory_limit_bytes)", "limit")),
        graph("Events", "none", (f"sum by (kind) (increase(jaxtrain_events_total{_RATE}))", "{{kind}}"), width=16),
        number("Processes that export", "none", "count by (run) (jaxtrain_start_timestamp_seconds)"),
        number("Processes", "none", "max by (run) (jaxtrain_processes)"),
    ]),
])

NODE = Dashboard("jaxtrain-node", "jaxtrain: machines", ["host"], [
    ("GPUs", [
        graph("Utilization", "percentunit", ("max by (host, gpu) (jaxtrain_gpu_utilization_ratio)", "{{host}} {{gpu}}"),
              share=True),
        graph("Memory", "bytes", ("max by (host, gpu) (jaxtrain_gpu_memory_used_bytes)", "{{host}} {{gpu}}"),
              ("max by (host) (jaxtrain_gpu_memory_size_bytes)", "{{host}} size")),
        graph("Power", "watt", ("max by (host, gpu) (jaxtrain_gpu_power_watts)", "{{host}} {{gpu}}")),
        graph("Temperature", "celsius", ("max by (host, gpu) (jaxtrain_gpu_temperature_celsius)", "{{host}} {{gpu}}")),
        graph("Clock", "hertz", ("max by (host, gpu) (jaxtrain_gpu_clock_hertz)", "{{host}} {{gpu}}")),
        graph("Uncorrected memory errors", "none",
              ("max by (host, gpu) (jaxtrain_gpu_ecc_errors_total)", "{{host}} {{gpu}}")),
    ]),
    ("Host", [
        graph("Processors", "percentunit", ("max by (host) (jaxtrain_host_cpu_ratio)", "{{host}}"), share=True),
        graph("Load", "none", ("max by (host) (jaxtrain_host_load1)", "{{host}}")),
        graph("Memory", "bytes", ("max by (host) (jaxtrain_host_memory_used_bytes)", "{{host}} used"),
              ("max by (host) (jaxtrain_host_memory_size_bytes)", "{{host}} size"),
              ("max by (host) (jaxtrain_host_swap_used_bytes)", "{{host}} swapped")),
        graph("Disk of the workdir", "bytes",
              ("min by (host, run) (jaxtrain_disk_free_bytes)", "{{host}} {{run}} free"),
              ("min by (host, run) (jaxtrain_disk_size_bytes)", "{{host}} {{run}} size")),
        graph("Disks", "Bps", (f"max by (host) (rate(jaxtrain_host_disk_read_bytes_total{_RATE}))", "{{host}} read"),
              (f"max by (host) (rate(jaxtrain_host_disk_written_bytes_total{_RATE}))", "{{host}} written")),
        graph("Network", "Bps",
              (f"max by (host) (rate(jaxtrain_host_network_received_bytes_total{_RATE}))", "{{host}} received"),
              (f"max by (host) (rate(jaxtrain_host_network_sent_bytes_total{_RATE}))", "{{host}} sent")),
    ]),
    ("Processes", [
        graph("Processor time", "none", (f"rate(jaxtrain_process_cpu_seconds_total{_RATE})", "{{run}} {{process}}")),
        graph("Memory", "bytes", ("jaxtrain_process_memory_bytes", "{{run}} {{process}}")),
        graph("Threads", "none", ("jaxtrain_process_threads", "{{run}} {{process}}")),
        graph("Memory of devices", "percentunit",
              ("jaxtrain_device_memory_used_bytes / jaxtrain_device_memory_limit_bytes", "{{run}} {{device}}"),
              share=True, width=16),
        graph("Sources that answer", "none", ("min by (host, source) (jaxtrain_source_up)", "{{host}} {{source}}")),
    ]),
])

FLEET = Dashboard("jaxtrain-fleet", "jaxtrain: all runs", ["run"], [
    ("Now", [
        number("Runs", "none", "count(count by (run) (jaxtrain_start_timestamp_seconds))", "runs"),
        number("Processes", "none", "count(jaxtrain_start_timestamp_seconds)", "processes"),
        number("Devices", "none", "sum(max by (run) (jaxtrain_devices))", "devices"),
        number("Tokens per second", "none", 'sum(jaxtrain_tokens_per_second{process="0"})', "of all runs"),
        number("Stalled for ten minutes", "none",
               "count(time() - max by (run) (jaxtrain_last_step_timestamp_seconds) > 600) or vector(0)", "runs"),
        number("Alerts", "none", 'count(ALERTS{alertname=~"Jaxtrain.*", alertstate="firing"}) or vector(0)', "firing"),
    ]),
    ("Runs", [
        graph("Done", "percentunit", ("max by (run) (jaxtrain_step / jaxtrain_target_step)", "{{run}}"), share=True),
        graph("Loss", "none", ('jaxtrain_loss{process="0"}', "{{run}}")),
        graph("Throughput", "none", ('jaxtrain_tokens_per_second{process="0"}', "{{run}}")),
        graph("Goodput", "percentunit", ("max by (run) (jaxtrain_goodput_ratio)", "{{run}}"), share=True),
        graph("Model FLOPs utilization", "percentunit", ('jaxtrain_mfu_ratio{process="0"}', "{{run}}"), share=True),
        graph("Since the last step", "s", ("time() - max by (run) (jaxtrain_last_step_timestamp_seconds)", "{{run}}")),
        graph("Devices that wait for data", "percentunit",
              (f'max by (run) (rate(jaxtrain_time_seconds_total{{category="data_wait"}}{_RATE}))', "{{run}}"),
              share=True),
        graph("Slowest process against its peers", "none", ("max by (run) (jaxtrain_slowest_ratio)", "{{run}}")),
        graph("Failures", "none", ("max by (run) (jaxtrain_failures)", "{{run}}")),
    ]),
    ("GPUs of all machines", [
        graph("Utilization", "percentunit", ("avg by (host) (jaxtrain_gpu_utilization_ratio)", "{{host}}"), share=True),
        graph("Power", "watt", ("sum by (host) (max by (host, gpu) (jaxtrain_gpu_power_watts))", "{{host}}")),
        graph("Hottest", "celsius", ("max by (host) (jaxtrain_gpu_temperature_celsius)", "{{host}}")),
    ]),
])
ALL = (RUN, NODE, FLEET)


def dashboard(of: Dashboard) -> Json:
    """Return a dashboard as Grafana's JSON."""
    panels, top = [], 0
    for title, row in of.rows:
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": top, "w": _WIDTH, "h": 1}})
        top, left, high = top + 1, 0, 0
        for one in row:
            if left + one.width > _WIDTH:
                top, left, high = top + high, 0, 0
            height = 4 if one.number and one.width == 4 else 8
            panels.append({"id": len(panels) + 1, **_panel(of, one),
                           "gridPos": {"x": left, "y": top, "w": one.width, "h": height}})
            left, high = left + one.width, max(high, height)
        top += high
    links = [{"type": "dashboards", "title": "jaxtrain", "tags": ["jaxtrain"], "asDropdown": True, "includeVars": True,
              "keepTime": True, "targetBlank": False, "icon": "external link", "tooltip": "", "url": ""}]
    return {
        "uid": of.uid, "title": of.title, "tags": ["jaxtrain"], "schemaVersion": SCHEMA, "version": 1, "editable": True,
        "graphTooltip": 1, "refresh": "30s", "timezone": "browser", "time": {"from": "now-6h", "to": "now"},
        "annotations": {"list": []}, "links": links, "panels": panels,
        "templating": {"list": [
            {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus", "hide": 0},
            *(_variable(name) for name in of.picks)]}}


def selected(expr: str, picks: Sequence[str]) -> str:
    """Return a query in which every metric of jaxtrain is selected by the variables of these labels."""
    own = ", ".join(f'{name}=~"${name}"' for name in picks)
    return _METRIC.sub(lambda found: f"{found[1]}{{{own}{', ' if found[2] else '}'}", expr)


def _panel(of: Dashboard, one: Panel) -> Json:
    targets = [{"refId": chr(ord("A") + n), "datasource": _SOURCE, "expr": selected(expr, of.picks),
                "legendFormat": legend, "instant": one.number, "range": not one.number}
               for n, (expr, legend) in enumerate(one.queries)]
    defaults: Json = {"unit": one.unit, **({"min": 0, "max": 1} if one.share else {})}
    if not one.number:
        defaults["custom"] = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 60 if one.stacked else 0,
                              "showPoints": "never", "spanNulls": False,
                              "stacking": {"mode": "normal" if one.stacked else "none", "group": "A"}}
    return {"type": "stat" if one.number else "timeseries", "title": one.title, "description": _about(one),
            "datasource": _SOURCE, "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": _NUMBER if one.number else _GRAPH, "targets": targets}


def _about(one: Panel) -> str:
    """Return what the table says of the metrics in a panel."""
    used = " ".join(re.sub(r"_(bucket|sum|count)\b", "", expr) for expr, _ in one.queries)
    return "\n".join(f"{metric.name}: {metric.help}" for metric in METRICS if re.search(rf"\b{metric.name}\b", used))


def _variable(name: str) -> Json:
    return {"name": name, "type": "query", "label": name, "datasource": _SOURCE, "hide": 0, "refresh": 2, "sort": 1,
            "query": f"label_values(jaxtrain_start_timestamp_seconds, {name})", "multi": True, "includeAll": True,
            "allValue": ".*", "current": {"text": "All", "value": "$__all"}}


def files() -> dict[str, str]:
    """Return all dashboards and the alert rules, each by its path in a folder."""
    found = {f"grafana/{of.uid}.json": json.dumps(dashboard(of), indent=1) + "\n" for of in ALL}
    return {**found, "prometheus/alerts.yml": rules_file()}
