"""The section of a config that says to whom a run tells what it measures, besides metrics.jsonl."""

from dataclasses import dataclass, field

from jaxtrain.config import part_tables
from jaxtrain.config.field_checks import at_most, bounded, choice, each_of, number
from jaxtrain.errors import UserError

NOT_PUSHED = "a Pushgateway keeps the last values of a process that has died, and so hides the failures that count"
HISTOGRAMS = ("weights", "gradients")
TRACES = ("", "otlp", "file")


@dataclass(frozen=True)
class ObserveConfig:
    """Trackers and metrics services; they do not affect training, so a resumed run may change all of these keys."""

    trackers: list[str] = field(default_factory=list, hash=False)  # experiment trackers that receive all metrics
    project: str = "jaxtrain"  # project name in the trackers
    name: str = ""  # name of the run in the trackers; "": the name of the workdir
    histograms_every: int = number(0, least=0)  # steps between histograms sent to the trackers; 0: none
    # what the histograms show: weights, gradients
    histograms: list[str] = field(default_factory=lambda: ["weights"], hash=False, metadata=each_of(*HISTOGRAMS))
    # steps between samples of train.sample_tokens tokens sent to the trackers; 0: none
    samples_every: int = number(0, least=0)
    # OpenTelemetry traces of the run's phases: "otlp" (sent to OTEL_EXPORTER_OTLP_...) or "file"; "": none
    traces: str = choice("", *TRACES)
    # port of the Prometheus exporter; further processes on a host use the next ports; 0: no exporter
    prometheus_port: int = at_most(0, 2**16 - 1, least=0)
    # address of the Prometheus exporter; 0.0.0.0 lets anyone who can reach this machine read it
    prometheus_host: str = "127.0.0.1"
    prometheus_textfile: str = ""  # folder that is read by the textfile collector of node_exporter; "": none

    def __post_init__(self):
        bounded(self, "observe")
        for name in self.trackers:
            part_tables.TRACKERS.check(name)
        if len(set(self.trackers)) < len(self.trackers):
            raise UserError("observe.trackers", "it names a tracker twice", "name each once")
        if not self.project:
            raise UserError("observe.project", "it is empty", "give a name, such as jaxtrain")
        if self.prometheus_host != "127.0.0.1" and not self.prometheus_port:
            raise UserError("observe.prometheus_host", "it is read with observe.prometheus_port only",
                            "give the port too, or leave it out")
        for key in ("prometheus_host", "prometheus_textfile"):
            if "://" in getattr(self, key):
                raise UserError(f"observe.{key}", f"{getattr(self, key)} is a URL, and nothing is pushed: {NOT_PUSHED}",
                                "let Prometheus scrape observe.prometheus_port, or give a folder as "
                                "observe.prometheus_textfile")
