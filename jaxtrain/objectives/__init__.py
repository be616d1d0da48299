"""The objectives that a train step can minimise; `Run` takes one as it is and knows nothing else about it."""

from jaxtrain.config.schema import Config
from jaxtrain.objectives.captioning import Captioning
from jaxtrain.objectives.clip_label import ClipLabel
from jaxtrain.objectives.contrastive import Contrastive
from jaxtrain.objectives.flow_matching import FlowMatching
from jaxtrain.objectives.next_event import NextEvent
from jaxtrain.objectives.next_token import NextToken
from jaxtrain.objectives.objective import MakeObjective, Objective
from jaxtrain.objectives.transcription import Transcription
from jaxtrain.train_step.state import Skeleton

# What the families minimise that are not decoders of text, by `model.name`.
FAMILIES: dict[str, MakeObjective] = {
    "events": NextEvent.of, "clips": ClipLabel.of, "siglip": Contrastive.of, "clip": Contrastive.of,
    "vision_language": Captioning.of, "picture_flow": FlowMatching.of,
    "whisper": Transcription.of}


def configured(config: Config, model: Skeleton) -> Objective:
    """Return the objective that a config names, or that its family has."""
    if config.model.name in FAMILIES:
        return FAMILIES[config.model.name](config, model)
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
    return NextToken.of(config, model)


__all__ = ["FAMILIES", "MakeObjective", "NextEvent", "NextToken", "Objective", "configured"]
