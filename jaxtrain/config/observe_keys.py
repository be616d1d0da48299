"""The section of a config that says to whom a run tells what it measures, besides metrics.jsonl."""

from dataclasses import dataclass, field

from jaxtrain.config.field_checks import one_of
from jaxtrain.errors import UserError

NOT_PUSHED = "a Pushgateway keeps the last values of a process that has died, and so hides the failures that count"
TRACKERS = ("tensorboard",)
TRACES = ("", "otlp", "file")


@dataclass(frozen=True)
class ObserveConfig:
    """What shows a run elsewhere; none of it changes a number, so that a run that resumes may change all of it."""

    trackers: list[str] = field(default_factory=list, hash=False)  # that get every line of metrics too: tensorboard
    traces: str = ""  # OpenTelemetry's, a span a phase: otlp (sent where OTEL_EXPORTER_OTLP_... say), file; "": none

    prometheus_port: int = 0  # of the exporter for Prometheus; a host's other processes take the next ones; 0: none
    prometheus_host: str = "127.0.0.1"  # its address; with 0.0.0.0 whoever reaches this machine can read
    prometheus_textfile: str = ""  # a folder that node_exporter's textfile collector reads

    def __post_init__(self):
        one_of("observe.traces", self.traces, TRACES)
        for name in self.trackers:
            one_of("observe.trackers", name, TRACKERS)
        if not 0 <= self.prometheus_port < 65536:
            raise UserError("observe.prometheus_port", f"there is no port {self.prometheus_port}",
                            "give one from 1024 to 65535, or 0 for none")
        if self.prometheus_host != "127.0.0.1" and not self.prometheus_port:
            raise UserError("observe.prometheus_host", "it is read with observe.prometheus_port only",
                            "give the port too, or leave it out")
        for key in ("prometheus_host", "prometheus_textfile"):
            if "://" in getattr(self, key):
                raise UserError(f"observe.{key}", f"{getattr(self, key)} is a URL, and nothing is pushed: {NOT_PUSHED}",
                                "let Prometheus scrape observe.prometheus_port, or give a folder as "
                                "observe.prometheus_textfile")
