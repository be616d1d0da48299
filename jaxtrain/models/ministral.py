"""Ministral 8B (2410): Mistral with a sliding window in the layers that a list names."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.errors import UserError
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, SILU, HFConfig, Keys, Refuse
from jaxtrain.hf.layer_patterns import FULL, SLIDING, listed, window_of_some
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.models.llama import layer

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class MinistralConfig(RotaryConfig):
    """Ministral 8B."""

    name: str = "ministral"
    # with model.window: the layers in turn, "L" with the window and "G" without, such as "GLLL"; "": all have it
    layer_pattern: str = ""

    def __post_init__(self):
        super().__post_init__()
        if {*self.layer_pattern} - {*"GL"} or (self.layer_pattern and not self.window):
            raise UserError("model.layer_pattern", f"{self.layer_pattern!r} does not say which layers have "
                            f"model.window={self.window}", "write it of the letters G and L, or leave it out")

    @property
    def kinds(self) -> str:
        """The letter of each layer."""
        pattern = self.layer_pattern or ("L" if self.window else "G")
        return "".join(pattern[n % len(pattern)] for n in range(self.num_layers))

    @property
    def global_layers(self) -> int:
        """The number of layers without a window where the others have one."""
        return self.kinds.count("G") if self.window else 0


def ministral(c: MinistralConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Ministral decoder."""
    from jaxtrain.models.attention.by_layer.window_pattern import WindowPatternAttention
    from jaxtrain.models.attention.self_attention import Attention
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    kind = partial(WindowPatternAttention, c.layer_pattern) if c.layer_pattern else Attention
    return rotary_decoder(c, compute, grouped_query(c, compute, kind), rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    types = known["layer_types"]
    if types is None:
        types = [FULL if known["sliding_window"] is None else SLIDING] * known["num_hidden_layers"]
    kinds = "".join("G" if kind == FULL else "L" for kind in listed(known | {"layer_types": types}, refuse))
    found = rotary("ministral", known, refuse)
    if "L" not in kinds:
        return {"window": 0} | found
    window = {"window": window_of_some(known, refuse, 0)}
    period = next(n for n in range(1, len(kinds) + 1) if (kinds[:n] * len(kinds))[:len(kinds)] == kinds)
    return window | ({"layer_pattern": kinds[:period]} if "G" in kinds else {}) | found


def _write(c: MinistralConfig) -> Keys:
    return published_rotary(c) | {
        "sliding_window": c.window or None, "layer_types": [FULL if kind == "G" else SLIDING for kind in c.kinds]}


FAMILY = Family(
    MinistralConfig, ministral, tensors=decoder_tensors.decoder(layer),
    hf=(HFConfig("ministral", "MinistralForCausalLM", COMMON, fixed={"hidden_act": SILU}, read=_read, write=_write),))
