"""The section of a config that says to whom a run tells what it measures, besides metrics.jsonl."""

from dataclasses import dataclass, field

from jaxtrain.config.field_checks import one_of

TRACKERS = ("tensorboard",)
TRACES = ("", "otlp", "file")


@dataclass(frozen=True)
class ObserveConfig:
    """What shows a run elsewhere; none of it changes a number, so that a run that resumes may change all of it."""

    trackers: list[str] = field(default_factory=list, hash=False)  # that get every line of metrics too: tensorboard
    traces: str = ""  # OpenTelemetry's, a span a phase: otlp (sent where OTEL_EXPORTER_OTLP_... say), file; "": none

    def __post_init__(self):
        one_of("observe.traces", self.traces, TRACES)
        for name in self.trackers:
            one_of("observe.trackers", name, TRACKERS)
