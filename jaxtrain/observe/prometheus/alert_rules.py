"""The alert rules for Prometheus: what someone on call wants to be told of a run, and what to look at then."""

from dataclasses import dataclass

import yaml

_WHO = "{{ $labels.run }}"
_WHERE = "process {{ $labels.process }} ({{ $labels.host }})"


@dataclass(frozen=True)
class Alert:
    """One rule. `hold` is for how long the expression must be true, as Prometheus writes durations; "": not at all."""

    name: str
    expr: str
    hold: str
    severity: str  # critical: the run makes no progress or loses work; warning: it is slower than it could be
    summary: str
    description: str


def alerts(pace: float = 1.0) -> tuple[Alert, ...]:
    """Return all alerts; `pace` scales the times in them, for trying them out on a short run."""
    def t(minutes: float) -> str:
        seconds = max(1, round(60 * minutes * pace))
        return f"{seconds // 60}m" if seconds % 60 == 0 else f"{seconds}s"

    def s(minutes: float) -> str:
        return f"{60 * minutes * pace:g}"

    step, age = "jaxtrain_step_duration_seconds", "time() - jaxtrain_start_timestamp_seconds"
    mean, usual = (f"(rate({step}_sum[{t(span)}]) / rate({step}_count[{t(span)}]))" for span in (10, 360))
    return (
        Alert("JaxtrainStepStalled",
              f"(time() - jaxtrain_last_step_timestamp_seconds > {s(10)} + 10 * ({step}_sum / {step}_count >= 0 or "
              f"0 * jaxtrain_last_step_timestamp_seconds) or ({age} > {s(60)} unless "
              "jaxtrain_last_step_timestamp_seconds)) unless jaxtrain_step >= jaxtrain_target_step",
              "", "critical", f"{_WHO}: no step for {{{{ $value | humanizeDuration }}}}",
              f"{_WHERE} completed no step for ten steps and ten minutes, or none at all in the first hour. See "
              "WORKDIR/hangs and the heartbeats; docs/operations-hangs.md."),
        Alert("JaxtrainProcessMissing",
              "max by (run) (jaxtrain_processes) > count by (run) (jaxtrain_start_timestamp_seconds)",
              t(5), "critical", f"{_WHO}: fewer processes export metrics than the run has",
              "The process, its machine or the exporter of one is gone. See WORKDIR/events.jsonl."),
        Alert("JaxtrainRestarting",
              f"max by (run) (jaxtrain_failures) - min by (run) (min_over_time(jaxtrain_failures[{t(60)}])) >= 2",
              "", "critical", f"{_WHO}: failed {{{{ $value }}}} times within an hour",
              "The run is started again and fails again. See WORKDIR/events.jsonl; docs/operations-supervisor.md."),
        Alert("JaxtrainLossNotFinite", "jaxtrain_loss != jaxtrain_loss",
              "", "critical", f"{_WHO}: the loss is not finite",
              "See docs/operations-anomalies.md."),
        Alert("JaxtrainLossSpike",
              f"increase(jaxtrain_anomalies_total[{t(10)}]) > 0 or (jaxtrain_loss > 0 and jaxtrain_loss > 1.5 * "
              f"quantile_over_time(0.5, jaxtrain_loss[{t(60)}]))",
              "", "warning", f"{_WHO}: the loss or the gradient spikes",
              "A step was an anomaly, or the loss is half as high again as its median of the last hour. See "
              "docs/operations-anomalies.md."),
        Alert("JaxtrainSamplerMismatch", 'jaxtrain_line_value{key="sampler_mismatch",process="0"} > 0.1',
              t(10), "warning",
              f"{_WHO}: the sampler's log-probabilities are {{{{ $value | humanize }}}} nats from the trainer's",
              "Reinforcement learning collapses where the two disagree. The sampler has other weights, another "
              "precision or another temperature, or rl.staleness and the learning rate are large. See docs/rl.md."),
        Alert("JaxtrainLowGpuUtilization",
              f"avg by (run, host) (avg_over_time(jaxtrain_gpu_utilization_ratio[{t(15)}]) and "
              "jaxtrain_gpu_memory_used_bytes / jaxtrain_gpu_memory_size_bytes > 0.1) < 0.5",
              t(15), "warning", f"{_WHO}: GPUs of {{{{ $labels.host }}}} are busy for {{{{ $value | "
              "humanizePercentage }} of the time",
              "GPUs whose memory is in use are idle for more than half of the time. Look at data waits and saves "
              "first; docs/performance.md."),
        Alert("JaxtrainThroughputDrop",
              f"max_over_time(jaxtrain_tokens_per_second[{t(10)}]) < 0.7 * quantile_over_time(0.5, "
              f"jaxtrain_tokens_per_second[{t(360)}])",
              t(5), "warning", f"{_WHO}: throughput fell to {{{{ $value | humanize }}}} tokens per second",
              "It is less than 70% of its median of the last six hours; MFU fell with it."),
        Alert("JaxtrainDataWait",
              f'rate(jaxtrain_time_seconds_total{{category="data_wait"}}[{t(10)}]) > 0.1',
              t(10), "warning", f"{_WHO}: devices wait for data {{{{ $value | humanizePercentage }}}} of the time",
              f"{_WHERE} has no step in flight while it waits for a batch. See the loader's keys in docs/data.md."),
        Alert("JaxtrainSlowCollectives",
              f"{mean} > 1.3 * {usual} and jaxtrain_devices > 1 and on (run) max by (run) (jaxtrain_slowest_ratio) < "
              "1.1 and on (run) max by (run) (jaxtrain_probe_seconds / "
              f"avg_over_time(jaxtrain_probe_seconds[{t(360)}])) < 1.1",
              t(10), "warning", f"{_WHO}: steps are slower, and collectives are suspected",
              "Steps take 1.3 times as long as in the last six hours, while no process waits for data, no host is busy "
              "and every device computes as fast as before (resilience.probe_every): what is left is the network. This "
              "is inferred; a profile shows it."),
        Alert("JaxtrainStraggler", "jaxtrain_slowest_ratio > 1.25",
              t(10), "warning", f"{_WHO}: one process is {{{{ $value | humanize }}}} times as slow as its peers",
              "jaxtrain_slowest_process tells which; the event `straggler` why. See docs/operations-devices.md."),
        Alert("JaxtrainCheckpointOverdue",
              "jaxtrain_step - jaxtrain_checkpoint_last_step > 2 * jaxtrain_checkpoint_interval_steps and "
              "jaxtrain_checkpoint_interval_steps > 0",
              t(5), "critical", f"{_WHO}: the newest good checkpoint is {{{{ $value }}}} steps old",
              "More than two intervals of checkpoint.every passed without a checkpoint that was read back. A failure "
              "now loses that work. See docs/operations-checkpoints.md."),
        Alert("JaxtrainCheckpointFailed", f"increase(jaxtrain_checkpoint_failures_total[{t(15)}]) > 0",
              "", "critical", f"{_WHO}: a checkpoint could not be saved, or is damaged",
              "The event `checkpoint_failed` or `checkpoint_damaged` has the reason."),
        Alert("JaxtrainLowGoodput",
              f'rate(jaxtrain_time_seconds_total{{category="step"}}[{t(60)}]) - ignoring (category) '
              f"rate(jaxtrain_lost_work_seconds_total[{t(60)}]) < 0.8 and on (run, process) {age} > {s(60)}",
              t(10), "warning", f"{_WHO}: {{{{ $value | humanizePercentage }}}} of the last hour was steps that count",
              f"jaxtrain_time_seconds_total tells where the time of {_WHERE} goes; docs/operations-goodput.md."),
        Alert("JaxtrainDeviceMemoryNearEnd",
              "jaxtrain_device_memory_peak_bytes / jaxtrain_device_memory_limit_bytes > 0.97",
              t(5), "warning", f"{_WHO}: device {{{{ $labels.device }}}} used {{{{ $value | humanizePercentage }}}} of "
              "its memory", "A longer batch or another shape may not fit. See docs/planner.md."),
        Alert("JaxtrainHostMemoryNearEnd",
              "max by (run, host) (jaxtrain_host_memory_used_bytes / jaxtrain_host_memory_size_bytes) > 0.95",
              t(5), "warning",
              f"{_WHO}: memory of {{{{ $labels.host }}}} is {{{{ $value | humanizePercentage }}}} full",
              "The kernel ends a process when it is full."),
        Alert("JaxtrainDiskFilling",
              "min by (run, host) (jaxtrain_disk_free_bytes / jaxtrain_disk_size_bytes) < 0.05 or min by (run, host) "
              f"(predict_linear(jaxtrain_disk_free_bytes[{t(60)}], {s(360)})) < 0",
              t(10), "warning", f"{_WHO}: the disk of the workdir is filling up",
              "Less than 5% is free, or none will be in six hours at the pace of the last one. Lower "
              "checkpoint.keep, or free space."),
        Alert("JaxtrainGpuErrors", f"increase(jaxtrain_gpu_ecc_errors_total[{t(60)}]) > 0",
              "", "critical", f"{_WHO}: uncorrected memory errors on GPU {{{{ $labels.gpu }}}} of "
              "{{ $labels.host }}", "Drain the machine. See docs/operations-devices.md."),
        Alert("JaxtrainGpuHot", "max by (run, host, gpu) (jaxtrain_gpu_temperature_celsius) > 87",
              t(10), "warning", f"{_WHO}: GPU {{{{ $labels.gpu }}}} of {{{{ $labels.host }}}} has {{{{ $value }}}} °C",
              "It is about to lower its clock, and with it the pace of all others."),
    )


def rules_file(pace: float = 1.0) -> str:
    """Return the file of rules for Prometheus."""
    rules = [{"alert": one.name, "expr": one.expr, **({"for": one.hold} if one.hold else {}),
              "labels": {"severity": one.severity},
              "annotations": {"summary": one.summary, "description": one.description}} for one in alerts(pace)]
    content = {"groups": [{"name": "jaxtrain", "rules": rules}]}
    return yaml.safe_dump(content, sort_keys=False, width=10000, allow_unicode=True)
