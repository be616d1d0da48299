"""The objectives that a train step can minimise; `Run` takes one as it is and knows nothing else about it."""

import importlib

from jaxtrain.config.family import family
from jaxtrain.config.schema import Config
from jaxtrain.objectives.objective import MakeObjective, Objective
from jaxtrain.train_step.state import Skeleton


def configured(config: Config, model: Skeleton) -> Objective:
    """Return the objective that a config names, or that its family has."""
    if where := family(config.model.name).objective:
        module, _, name = where.partition(":")
        return getattr(importlib.import_module(module), name).of(config, model)
    if config.preference.reward_head:
        from jaxtrain.objectives.reward_model import RewardModel

        return RewardModel.of(config, model)
    if config.preference.loss == "kto":
        from jaxtrain.objectives.kto import Kto

        return Kto.of(config, model)
    if config.preference.loss:
        from jaxtrain.objectives.preference import Preference

        return Preference.of(config, model)
    if config.reinforce.prompts:
        from jaxtrain.objectives.policy_gradient import PolicyGradient

        return PolicyGradient.of(config, model)
    from jaxtrain.objectives.next_token import NextToken

    return NextToken.of(config, model)


__all__ = ["MakeObjective", "Objective", "configured"]
