"""The export of a run's metrics to Prometheus: those of this process, at a port or in a file of its own."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxtrain.distributed.coordination import exchange
from jaxtrain.observe.ledger import Ledger
from jaxtrain.observe.prometheus.exporter import exporting
from jaxtrain.observe.prometheus.run_metrics import RunMetrics
from jaxtrain.observe.versions import version_of
from jaxtrain.run import Run


@contextlib.contextmanager
def exported(run: Run, workdir: str | Path, ledger: Ledger) -> Iterator[RunMetrics]:
    """Export the metrics of this process within this context, as `observe` says; every process makes this call.

    Of several processes on a host, the first takes the port of the config, and the others those that follow.
    """
    c, me = run.config, jax.process_index()
    port = c.observe.prometheus_port
    if port:
        hosts = exchange(socket.gethostname())
        port += hosts[:me].count(hosts[me])
    metrics = RunMetrics(
        workdir, ledger,
        info={"version": version_of("jaxtrain") or "", "jax_version": version_of("jax") or "",
              "device_kind": jax.devices()[0].device_kind},
        constants={"processes": jax.process_count(), "devices": jax.device_count(), "target_step": c.train.steps,
                   "checkpoint_every": c.checkpoint.every})
    with exporting(metrics, workdir, host=c.observe.prometheus_host, port=port,
                   textfile=c.observe.prometheus_textfile):
        yield metrics
