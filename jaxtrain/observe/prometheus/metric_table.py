"""The table of all exported metrics, from which exporter, dashboards, alert rules and their documentation are made.

Names and units follow Prometheus's conventions: seconds, bytes and ratios from 0 to 1, and `_total` for what only grows
while a process lives. Every metric has the labels `run` (the name of the workdir), `process` and `host`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

COMMON = ("run", "process", "host")  # labels of every metric
Samples = Mapping[tuple[str, ...], float]  # the values of a metric's own labels -> its value


@dataclass(frozen=True)
class Metric:
    """A metric, and where its value comes from."""

    name: str
    kind: str  # counter, gauge or histogram
    help: str
    source: str  # which of the collector's sources has it
    key: str  # its name there
    labels: tuple[str, ...] = ()  # its own, besides those of every metric
    scale: float = 1.0  # what the source's number is multiplied by
    first: bool = False  # only the first process of a run has it


def _run() -> Iterator[Metric]:
    """Yield the run itself and its steps."""
    yield from (
        Metric("jaxtrain_run_info", "gauge", "Always 1; the labels tell what runs.", "run", "info",
               ("version", "jax_version", "device_kind")),
        Metric("jaxtrain_processes", "gauge", "Processes that the run has.", "run", "processes"),
        Metric("jaxtrain_devices", "gauge", "Devices of all processes of the run.", "run", "devices"),
        Metric("jaxtrain_target_step", "gauge", "The last step of the run, train.steps.", "run", "target_step"),
        Metric("jaxtrain_start_timestamp_seconds", "gauge", "When this start of the run began, in seconds since 1970.",
               "ledger", "began"),

        Metric("jaxtrain_step", "gauge", "The last completed step of the run; a rollback sets it back.",
               "ledger", "step"),
        Metric("jaxtrain_steps_total", "counter", "Steps that this process completed, with those done again.",
               "steps", "count"),
        Metric("jaxtrain_last_step_timestamp_seconds", "gauge",
               "When this process completed a step last, in seconds since 1970.", "steps", "last"),
        Metric("jaxtrain_step_duration_seconds", "histogram", "Seconds for which a step was in flight on the devices, "
               "without waits for data, saves and evaluations.", "steps", "duration"),
    )


def _lines() -> Iterator[Metric]:
    """Yield the numbers of the newest lines of metrics."""
    yield from (
        Metric(f"jaxtrain_{name}", "gauge", about, "line", key) for name, key, about in (
            ("loss", "loss", "Training loss of the newest line of metrics; NaN if it was not finite."),
            ("eval_loss", "eval_loss", "Loss of the newest evaluation."),
            ("gradient_norm", "grad_norm", "Norm of the gradient before clipping."),
            ("learning_rate", "learning_rate", "Learning rate of the newest line of metrics."),
            ("tokens", "tokens", "Tokens of all steps since step 0; a rollback sets it back."),
            ("tokens_per_second", "tokens_per_s", "Tokens per second of the whole run."),
            ("examples", "examples", "Examples of all steps since step 0, where batches have no tokens."),
            ("examples_per_second", "examples_per_s", "Examples per second, where batches have no tokens."),
            ("mfu_ratio", "mfu", "Model FLOPs utilization, where the peak of the devices is known."),
            ("data_wait_seconds", "data_wait_s", "Mean seconds for which the loop of this process waited for a batch, "
             "whether or not devices were idle meanwhile."),
            ("data_wait_max_seconds", "data_wait_max_s", "The longest such mean among all processes."),
            ("probe_seconds", "probe_s", "Seconds that the slowest device of this process takes for a small "
             "computation alone (resilience.probe_every)."),
            ("slowest_process", "slowest_process", "The process that is slowest compared with its peers."),
            ("slowest_ratio", "slowest_ratio", "How many times as slow as the median of its peers that process is."),
        ))
    yield from (
        Metric("jaxtrain_tokens_total", "counter", "Tokens that the run trained on since this process's first line "
               "of metrics, with those of steps done again.", "line", "tokens_done"),
        Metric("jaxtrain_line_value", "gauge", "Any other number of the newest lines of metrics, by its name.",
               "line", "others", ("key",)),
    )


def _ledger() -> Iterator[Metric]:
    """Yield where time went: this process by category, and goodput of the whole run."""
    yield from (
        Metric("jaxtrain_time_seconds_total", "counter", "Seconds of this process by what it did; the categories add "
               "up to its age.", "ledger", "seconds", ("category",)),
        Metric("jaxtrain_lost_work_seconds_total", "counter", "Those seconds of category step that rollbacks of this "
               "process made worthless.", "ledger", "lost_work"),
    )
    yield from (
        Metric(f"jaxtrain_{name}", "gauge", about, "ledger", name, first=True) for name, about in (
            ("goodput_ratio", "Share of the run's life, over all its starts, spent on steps that count."),
            ("ettr_ratio", "Share of the run's life spent on steps that count, data, saves and evaluations."),
            ("starts", "Starts of the run so far."),
            ("failures", "Starts of the run that ended by a failure."),
            ("remaining_seconds", "Estimated seconds to the last step, failures included."),
        ))


def _checkpoints() -> Iterator[Metric]:
    """Yield the newest checkpoint and how long it took."""
    yield from (
        Metric("jaxtrain_checkpoint_last_step", "gauge", "Step of the newest checkpoint that was read back; before the "
               "first save, the step from which this process started.", "checkpoint", "step", first=True),
        Metric("jaxtrain_checkpoint_interval_steps", "gauge", "Steps between checkpoints, checkpoint.every; 0: none.",
               "run", "checkpoint_every", first=True),
    )
    yield from (
        Metric(f"jaxtrain_checkpoint_{name}", "gauge", about, "checkpoint", key, first=True) for name, key, about in (
            ("last_timestamp_seconds", "time", "When that checkpoint was found good, in seconds since 1970."),
            ("blocked_seconds", "blocked_s", "Seconds for which the last save blocked the training loop."),
            ("write_seconds", "written_s", "Seconds that the last save took to be written, in the background."),
            ("verify_seconds", "verified_s", "Seconds that it took to read the last checkpoint back."),
            ("size_bytes", "bytes", "Bytes of the arrays in a checkpoint."),
        ))


def _events() -> Iterator[Metric]:
    """Yield counts of the lines in events.jsonl."""
    yield from (
        Metric(f"jaxtrain_{name}_total", "counter", about, "events", kinds) for name, kinds, about in (
            ("checkpoints", "checkpoint", "Checkpoints that were written and read back."),
            ("checkpoint_failures", "checkpoint_failed checkpoint_damaged", "Saves that failed, and checkpoints found "
             "damaged."),
            ("anomalies", "spike skip", "Steps whose loss or gradient was a spike or not finite."),
            ("rollbacks", "rollback", "Rollbacks to an earlier checkpoint."),
        ))
    yield Metric("jaxtrain_events_total", "counter", "Lines of events.jsonl from this process, by kind.",
                 "events", "all", ("kind",))


def _machine() -> Iterator[Metric]:
    """Yield what devices, host and process use."""
    yield from (
        Metric(f"jaxtrain_device_memory_{name}_bytes", "gauge", about, "devices", key, ("device",))
        for name, key, about in (
            ("used", "bytes_in_use", "Bytes in use on a device of this process."),
            ("peak", "peak_bytes_in_use", "The most bytes that were in use on a device."),
            ("limit", "bytes_limit", "Bytes that JAX may use on a device."),
        ))
    yield from (
        Metric(f"jaxtrain_{name}", "counter" if name.endswith("_total") else "gauge", about, "system", key, scale=scale)
        for name, key, scale, about in (
            ("host_cpu_ratio", "host_cpu_percent", 0.01, "Share of the host's processors that is busy."),
            ("host_load1", "host_load_1m", 1.0, "Load average of the host over a minute."),
            ("host_memory_used_bytes", "host_memory_used_bytes", 1.0, "Memory of the host that is not available."),
            ("host_memory_size_bytes", "host_memory_total_bytes", 1.0, "Memory of the host."),
            ("host_swap_used_bytes", "host_swap_used_bytes", 1.0, "Swap space of the host in use."),
            ("disk_free_bytes", "disk_free_bytes", 1.0, "Free bytes on the disk of the workdir."),
            ("disk_size_bytes", "disk_total_bytes", 1.0, "Bytes of the disk of the workdir."),
            ("host_disk_read_bytes_total", "host_disk_read_bytes_total", 1.0, "Bytes read from the host's disks."),
            ("host_disk_written_bytes_total", "host_disk_written_bytes_total", 1.0,
             "Bytes written to the host's disks."),
            ("host_network_received_bytes_total", "host_network_received_bytes_total", 1.0,
             "Bytes received on the host's network interfaces; RDMA is not counted."),
            ("host_network_sent_bytes_total", "host_network_sent_bytes_total", 1.0,
             "Bytes sent on the host's network interfaces; RDMA is not counted."),
            ("process_cpu_seconds_total", "process_cpu_seconds_total", 1.0, "Processor time of this process."),
            ("process_memory_bytes", "process_memory_bytes", 1.0, "Resident memory of this process."),
            ("process_threads", "process_threads", 1.0, "Threads of this process."),
        ))


def _gpus() -> Iterator[Metric]:
    """Yield what NVIDIA's GPUs report, and whether the sources of all these answered."""
    yield from (
        Metric(f"jaxtrain_gpu_{name}", "counter" if name.endswith("_total") else "gauge", about, "gpus", key, ("gpu",),
               scale) for name, key, scale, about in (
            ("utilization_ratio", "utilization_percent", 0.01, "Share of the time in which a kernel ran on the GPU."),
            ("memory_used_bytes", "memory_used_bytes", 1.0, "Memory of the GPU in use, whoever uses it."),
            ("memory_size_bytes", "memory_total_bytes", 1.0, "Memory of the GPU."),
            ("temperature_celsius", "temperature_celsius", 1.0, "Temperature of the GPU."),
            ("power_watts", "power_watts", 1.0, "Power that the GPU draws."),
            ("clock_hertz", "clock_hertz", 1.0, "Clock of the GPU's multiprocessors."),
            ("ecc_errors_total", "ecc_errors_total", 1.0, "Uncorrected memory errors of the GPU in its lifetime."),
        ))
    yield Metric("jaxtrain_source_up", "gauge", "Whether a source of metrics answered within two seconds: devices, or "
                 "system, which is the machine and its GPUs.", "sources", "up", ("source",))


METRICS = (*_run(), *_lines(), *_ledger(), *_checkpoints(), *_events(), *_machine(), *_gpus())


def names() -> set[str]:
    """Return all names that a query can use."""
    parts = {"histogram": ("_bucket", "_sum", "_count")}
    return {metric.name + part for metric in METRICS for part in parts.get(metric.kind, ("",))}


def markdown() -> str:
    """Return the table for people."""
    rows = ["| metric | type | labels | |", "|---|---|---|---|"]
    for metric in METRICS:
        about = metric.help + " First process only." * metric.first
        rows.append(f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | {about} |")
    return "\n".join(rows)
