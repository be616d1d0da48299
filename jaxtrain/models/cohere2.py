"""Command R7B and Command A: Command R with local layers, and global ones without positions (arXiv 2504.00698)."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import number
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import SILU, HFConfig, Keys, Refuse
from jaxtrain.hf.layer_patterns import global_every, layer_types, window_of_some
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.models.cohere import KEYS, ParallelConfig, layer, parallel

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class Cohere2Config(ParallelConfig):
    """Command R7B and Command A."""

    name: str = "cohere2"
    window: int = number(4096, above=0)  # sliding window of the local layers, in tokens
    # every N-th layer is global: it uses full attention, without positions
    global_every: int = number(4, above=0)

    @property
    def global_layers(self) -> int:
        """The number of layers without a window."""
        return self.num_layers // self.global_every


def cohere2(c: Cohere2Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Command A decoder."""
    import numpy as np

    from jaxtrain.models.attention.by_layer.local_or_global import BothRotaries, LocalOrGlobalAttention
    from jaxtrain.models.attention.rotary import Rotary, scaled_frequencies
    from jaxtrain.models.rotary_decoder import grouped_query

    attention = grouped_query(c, compute, partial(LocalOrGlobalAttention, c.global_every), qkv_bias=c.attention_bias,
                              out_bias=c.attention_bias)
    turns = Rotary(*scaled_frequencies(c, c.head_dim))
    return parallel(c, compute, attention, rotary=BothRotaries(turns, Rotary(np.zeros(c.head_dim // 2))), rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    every = global_every(known, known.get("sliding_window_pattern", 4), refuse)
    return {"global_every": every, "window": window_of_some(known, refuse, every)} | rotary("cohere2", known, refuse)


def _write(c: Cohere2Config) -> Keys:
    return published_rotary(c) | {"layer_types": layer_types(c.global_every, c.num_layers),
                                  "sliding_window": c.window, "pad_token_id": None}


FAMILY = Family(
    Cohere2Config, cohere2, tensors=decoder_tensors.decoder(layer),
    hf=(HFConfig("cohere2", "Cohere2ForCausalLM", KEYS, fixed={"hidden_act": SILU}, read=_read, write=_write,
                 classifier=None),))
