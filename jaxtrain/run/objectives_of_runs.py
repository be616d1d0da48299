"""The objective of a run: made from just those sections of the config that it reads."""

from jaxtrain.config.schema import Config
from jaxtrain.config.with_sections import named, with_sections
from jaxtrain.objectives import MakeObjective, Objective, objective_of
from jaxtrain.train_step.state import Skeleton


def configured(config: Config, skeleton: Skeleton) -> Objective:
    """Return the objective that a config names, or that its family has."""
    return with_sections(with_sections(objective_of, config), config, skeleton)


def made_by(make: MakeObjective, config: Config, skeleton: Skeleton) -> Objective:
    """Return the objective that `make` returns, which takes sections by name, or the whole config and the model."""
    return with_sections(make, config, skeleton) if named(make) else make(config, skeleton)
