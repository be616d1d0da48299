"""The section of a config that says to whom a run tells what it measures, besides metrics.jsonl."""

from dataclasses import dataclass, field

from jaxtrain.config.field_checks import not_negative, one_of
from jaxtrain.errors import UserError

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
HISTOGRAMS = ("weights", "gradients")


@dataclass(frozen=True)
class ObserveConfig:
    """What shows a run elsewhere; none of it changes a number, so that a run that resumes may change all of it."""

    # that get all metrics: tensorboard, wandb, mlflow, trackio
    trackers: list[str] = field(default_factory=list, hash=False)
    project: str = "jaxtrain"  # under which trackers list the run
    name: str = ""  # of the run in trackers; "": that of the workdir
    histograms_every: int = 0  # steps between histograms for the trackers; 0: none
    histograms: list[str] = field(default_factory=lambda: ["weights"], hash=False)  # of what: weights, gradients
    samples_every: int = 0  # steps between samples of train.sample_tokens tokens for the trackers; 0: none

    def __post_init__(self):
        for name in self.trackers:
            one_of("observe.trackers", name, TRACKERS)
        for name in self.histograms:
            one_of("observe.histograms", name, HISTOGRAMS)
        if len(set(self.trackers)) < len(self.trackers):
            raise UserError("observe.trackers", "it names a tracker twice", "name each once")
        if not self.project:
            raise UserError("observe.project", "it is empty", "give a name, such as jaxtrain")
        not_negative(self, "observe", "histograms_every samples_every")
