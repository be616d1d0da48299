"""EXAONE 4: norms after attention and the MLP; local layers by turns with global ones, which have no positions.

All layers of models without a window are global and have positions (arXiv 2507.11407).
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import number
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.layer_patterns import FULL, SLIDING, global_every, layer_types, listed
from jaxtrain.hf.rotary_keys import published_rotary, rotary

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class Exaone4Config(RotaryConfig):
    """EXAONE 4: local layers with a sliding window, and global layers without positions."""

    name: str = "exaone4"
    # sliding window of the local layers, in tokens; 0: all layers are global and have positions
    window: int = number(4096, least=0)
    # with model.window: every N-th layer is global: it uses full attention, without positions
    global_every: int = number(4, above=0)

    @property
    def global_layers(self) -> int:
        """The number of layers without a window where the others have one."""
        return self.num_layers // self.global_every if self.window else 0


def exaone4(c: Exaone4Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build an EXAONE 4 decoder."""
    import numpy as np

    from jaxtrain.models.attention.by_layer.local_or_global import BothRotaries, LocalOrGlobalAttention
    from jaxtrain.models.attention.rotary import Rotary, scaled_frequencies
    from jaxtrain.models.attention.self_attention import Attention
    from jaxtrain.models.layers import RMSNorm
    from jaxtrain.models.post_norm_layers import PostNormBlock
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    kind = partial(LocalOrGlobalAttention, c.global_every) if c.window else Attention
    turns = Rotary(*scaled_frequencies(c, c.head_dim))
    attention = grouped_query(c, compute, kind, qk_norm=partial(RMSNorm, c.head_dim, c.norm_eps, axis="head_dim"))
    return rotary_decoder(
        c, compute, attention, block=PostNormBlock,
        rotary=BothRotaries(turns, Rotary(np.zeros(c.head_dim // 2))) if c.window else turns, rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    window, pattern, types = (known[key] for key in ("sliding_window", "sliding_window_pattern", "layer_types"))
    found = rotary("exaone4", known, refuse)
    if window is None:
        if types is not None and SLIDING in listed(known, refuse):
            raise refuse("layer_types", "cannot be expressed: it has layers with a window, and there is no window")
        return {"window": 0} | found
    if window < 1:
        raise refuse("sliding_window", "is not a size that a window has")
    if types is None and type(pattern) is not int:
        raise refuse("sliding_window_pattern", "cannot be read: it is not a whole number, and there are no layer_types")
    every = global_every(known, pattern if types is None else 4, refuse)
    return {"window": window, "global_every": every} | found


def _write(c: Exaone4Config) -> Keys:
    types = layer_types(c.global_every, c.num_layers) if c.window else [FULL] * c.num_layers
    return published_rotary(c) | {"sliding_window": c.window or None, "layer_types": types,
                                  "sliding_window_pattern": c.global_every if c.window else None}


def _layer(c: Exaone4Config, experts: bool) -> list[Entry]:
    return [*decoder_tensors.ATTENTION, *decoder_tensors.QK_NORMS, *decoder_tensors.POST_NORMS,
            *decoder_tensors.swiglu()]


FAMILY = Family(
    Exaone4Config, exaone4, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("exaone4", "Exaone4ForCausalLM", COMMON, fixed={"hidden_act": SILU}, read=_read, write=_write),))
