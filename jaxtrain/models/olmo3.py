"""OLMo 3: OLMo 2 with local and global attention by turns (https://allenai.org/blog/olmo3)."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import number
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, NO, SILU, HFConfig, Keys, Refuse
from jaxtrain.hf.layer_patterns import layer_types
from jaxtrain.hf.rotary_keys import olmo_layers, published_olmo_layers
from jaxtrain.models.olmo2 import layer, post_norm

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class Olmo3Config(RotaryConfig):
    """OLMo 3: local layers with a sliding window, and global layers, whose rotary positions may be scaled."""

    name: str = "olmo3"
    window: int = number(4096, above=0)  # sliding window of the local layers, in tokens
    global_every: int = number(4, above=0)  # every N-th layer is global: it uses full attention
    rope_theta: float = number(500_000.0, above=0)  # base frequency of the rotary positions in the global layers
    # base frequency of the rotary positions in the local layers
    local_rope_theta: float = number(500_000.0, above=0)

    @property
    def global_layers(self) -> int:
        """The number of layers without a window."""
        return self.num_layers // self.global_every


def olmo3(c: Olmo3Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build an OLMo 3 decoder."""
    from jaxtrain.models.attention.by_layer.local_or_global import BothRotaries, LocalOrGlobalAttention
    from jaxtrain.models.attention.rotary import Rotary, frequencies, scaled_frequencies

    rotary = BothRotaries(Rotary(frequencies(c.head_dim, c.local_rope_theta)),
                          Rotary(*scaled_frequencies(c, c.head_dim)))
    return post_norm(c, compute, partial(LocalOrGlobalAttention, c.global_every), rotary=rotary, rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    if known["sliding_window"] is None or known["sliding_window"] < 1:
        raise refuse("sliding_window", "is not a size that a window has")
    return {"window": known["sliding_window"]} | olmo_layers(known, refuse)


def _write(c: Olmo3Config) -> Keys:
    return published_olmo_layers(c, c.local_rope_theta) | {
        "sliding_window": c.window, "layer_types": layer_types(c.global_every, c.num_layers), "pad_token_id": None}


FAMILY = Family(
    Olmo3Config, olmo3, tensors=decoder_tensors.decoder(layer),
    hf=(HFConfig("olmo3", "Olmo3ForCausalLM", COMMON, fixed={"attention_bias": NO, "hidden_act": SILU}, read=_read,
                 write=_write),))
