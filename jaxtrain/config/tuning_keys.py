"""The sections of a config that are for tuning a trained model: adapters and preferences."""

from dataclasses import dataclass, field
from typing import Any

from jaxtrain.config.field_checks import not_negative, one_of, positive
from jaxtrain.errors import UserError

# The keys that each loss of preferences reads beside beta.
PREFERENCE_LOSSES = {"dpo": "label_smoothing", "robust": "label_smoothing", "ipo": "", "hinge": "",
                     "simpo": "label_smoothing margin", "orpo": ""}


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of low rank beside frozen linear layers (docs/tuning.md); none by default."""

    rank: int = 0  # of the adapters, which are all that is trained; 0: no adapters
    alpha: float = 16.0  # adapters are multiplied by alpha / rank
    rank_stabilized: bool = False  # by alpha / sqrt(rank) instead, which lets higher ranks learn as fast
    targets: list[str] = field(default_factory=lambda: ["*"], hash=False)  # paths with wildcards of linear layers

    def __post_init__(self):
        not_negative(self, "lora", "rank")
        positive(self, "lora", "alpha")
        if not self.targets or not all(isinstance(pattern, str) for pattern in self.targets):
            raise UserError("lora.targets", f"{self.targets} is not a list of paths",
                            "give ['*'] for all linear layers")


@dataclass(frozen=True)
class PreferenceConfig:
    """Learning from pairs of a chosen and a rejected answer (docs/tuning.md); off by default."""

    loss: str = ""  # dpo, robust, ipo, hinge, simpo or orpo; "": next-token prediction
    beta: float = 0.1  # how far the policy may leave the reference: less for higher values
    label_smoothing: float = 0.0  # the share of pairs that may be swapped; of dpo, robust and simpo
    margin: float = 0.0  # of simpo: by how much the chosen answer's reward per token is to be higher

    def __post_init__(self):
        one_of("preference.loss", self.loss, ("", *PREFERENCE_LOSSES))
        positive(self, "preference", "beta")
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError("preference.label_smoothing", f"{self.label_smoothing} is not in [0, 0.5)", "try 0.1")
        for name in ("label_smoothing", "margin"):
            if getattr(self, name) and name not in PREFERENCE_LOSSES.get(self.loss, ""):
                raise UserError(f"preference.{name}", f"preference.loss={self.loss!r} does not read it",
                                "leave it out, or choose another loss")


def check(config: Any) -> None:
    """Refuse a `Config` in which these sections do not go with the others."""
    if config.lora.rank and config.train.freeze:
        raise UserError("train.freeze", "with lora.rank everything is frozen but the adapters",
                        "leave it out; train.trainable names what is trained beside them")
    loss, packing = config.preference.loss, config.data.packing
    if loss and packing != "pairs":
        raise UserError("preference.loss", f"{loss} needs rows of whole pairs, not data.packing={packing}",
                        "set data.packing=pairs and data.source to a corpus of preferences")
    if packing == "pairs" and not loss:
        raise UserError("data.packing", "pairs hold rejected answers too, which next-token prediction would learn",
                        "set preference.loss, such as dpo, or use data.packing=best_fit")
    for key, value in (("data.cross_document_attention", config.data.cross_document_attention),
                       ("train.z_loss", config.train.z_loss)):
        if loss and value:
            raise UserError(key, f"preference.loss={loss} does not support it", "leave it out")
