"""The section of a config that says to whom a run tells what it measures, besides metrics.jsonl."""

from dataclasses import dataclass, field

from jaxtrain.config.field_checks import not_negative, one_of
from jaxtrain.errors import UserError

NOT_PUSHED = "a Pushgateway keeps the last values of a process that has died, and so hides the failures that count"
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
HISTOGRAMS = ("weights", "gradients")
TRACES = ("", "otlp", "file")


@dataclass(frozen=True)
class ObserveConfig:
    """The services that show a run; they change none of its numbers, so a resumed run may change all of these keys."""

    # services that get all metrics: tensorboard, wandb, mlflow, trackio
    trackers: list[str] = field(default_factory=list, hash=False)
    project: str = "jaxtrain"  # the project under which trackers list the run
    name: str = ""  # the run's name in trackers; "": that of the workdir
    histograms_every: int = 0  # steps between histograms for the trackers; 0: none
    # kinds of histograms: weights, gradients
    histograms: list[str] = field(default_factory=lambda: ["weights"], hash=False)
    samples_every: int = 0  # steps between samples of train.sample_tokens tokens for the trackers; 0: none
    traces: str = ""  # OpenTelemetry spans of phases: otlp (sent to OTEL_EXPORTER_OTLP_...), file; "": none
    prometheus_port: int = 0  # port of the Prometheus exporter; a host's other processes use the next ones; 0: none
    prometheus_host: str = "127.0.0.1"  # its address; with 0.0.0.0 anyone who can reach this machine can read it
    prometheus_textfile: str = ""  # folder of node_exporter's textfile collector, for metrics as a file; "": none

    def __post_init__(self):
        one_of("observe.traces", self.traces, TRACES)
        for name in self.trackers:
            one_of("observe.trackers", name, TRACKERS)
        for name in self.histograms:
            one_of("observe.histograms", name, HISTOGRAMS)
        if len(set(self.trackers)) < len(self.trackers):
            raise UserError("observe.trackers", "it names a tracker twice", "name each once")
        if not self.project:
            raise UserError("observe.project", "it is empty", "give a name, such as jaxtrain")
        not_negative(self, "observe", "histograms_every samples_every")
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
