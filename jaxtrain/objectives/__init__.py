"""The objectives that a train step can minimise; `Run` takes one as it is and knows nothing else about it."""

import importlib
from dataclasses import replace

from jaxtrain.config.family import family
from jaxtrain.config.part_tables import OBJECTIVES
from jaxtrain.config.schema import Config
from jaxtrain.objectives.objective import MakeObjective, Objective
from jaxtrain.train_step.state import Skeleton

# The key of a config, or its value, that asks for an objective -> where it is. The first one that applies counts.
ASKED = {
    "preference.loss=reward": "jaxtrain.objectives.reward_model:RewardModel",
    "preference.loss=kto": "jaxtrain.objectives.kto:Kto",
    "preference.loss": "jaxtrain.objectives.preference:Preference",
    "reinforce.prompts": "jaxtrain.objectives.policy_gradient:PolicyGradient",
}


def configured(config: Config, model: Skeleton) -> Objective:
    """Return the objective that a config names or asks for, or that its family has."""
    asked = next((place for key, place in ASKED.items() if _asks(config, key)), "")
    place = family(config.model.name).objective or asked
    if config.train.objective or not place:
        name = config.train.objective or "next_token"
        made, options = OBJECTIVES.load(name).of(config, model), config.plug_ins.get(name)
        return made if options is None else replace(made, options=options)
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name).of(config, model)


def _asks(config: Config, key: str) -> bool:
    key, _, wanted = key.partition("=")
    section, _, name = key.partition(".")
    value = getattr(getattr(config, section), name)
    return value == wanted if wanted else bool(value)


__all__ = ["MakeObjective", "Objective", "configured"]
