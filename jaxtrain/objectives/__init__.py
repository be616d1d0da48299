"""The objectives that a train step can minimise; `Run` takes one as it is and knows nothing else about it."""

import importlib

from jaxtrain.config.family import family
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.sections.tuning_keys import PreferenceConfig, ReinforceConfig
from jaxtrain.objectives.objective import MakeObjective, Objective


def objective_of(*, model: ModelConfig, preference: PreferenceConfig, reinforce: ReinforceConfig) -> MakeObjective:
    """Return the function that makes the objective which these sections name, or which the family has."""
    if not (place := family(model.name).objective):
        place = f"jaxtrain.objectives.{_tuned_by(preference, reinforce)}"
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name).of


def _tuned_by(preference: PreferenceConfig, reinforce: ReinforceConfig) -> str:
    """Return the module and the class of the objective of a decoder of text."""
    if preference.reward_head:
        return "reward_model:RewardModel"
    if preference.loss == "kto":
        return "kto:Kto"
    if preference.loss:
        return "preference:Preference"
    return "policy_gradient:PolicyGradient" if reinforce.prompts else "next_token:NextToken"


__all__ = ["MakeObjective", "Objective", "objective_of"]
