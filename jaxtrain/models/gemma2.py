"""Gemma 2: Gemma 3 with soft caps of scores and logits in place of norms of queries and keys (arXiv 2408.00118)."""

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import derive, number
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, NO, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.layer_patterns import global_every, layer_types, window_of_some
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.hf.soft_caps import LOGITS, SCORES, published_soft_caps, soft_caps
from jaxtrain.models.gemma3 import check_query_scale

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class Gemma2Config(RotaryConfig):
    """Gemma 2: local layers with a sliding window, and global layers."""

    name: str = "gemma2"
    window: int = number(4096, above=0)  # sliding window of the local layers, in tokens
    global_every: int = number(2, above=0)  # every N-th layer is global: it uses full attention
    query_scale: int = number(0, least=0)  # attention scores are divided by the square root of this number; 0: head_dim
    # pyrefly: ignore[bad-override]
    attention_cap: float = number(50.0, least=0)  # attention scores become cap x tanh(score / cap); 0: they stay
    logit_cap: float = number(30.0, least=0)  # logits become cap x tanh(logit / cap); 0: they stay
    norm_eps: float = 1e-6
    scaled_embeddings = True

    def __post_init__(self):
        super().__post_init__()
        derive(self, "query_scale", self.head_dim)
        check_query_scale(self, self.query_scale)

    @property
    def global_layers(self) -> int:
        """The number of layers without a window."""
        return self.num_layers // self.global_every


def gemma2(c: Gemma2Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Gemma 2 decoder."""
    from jaxtrain.models.attention.by_layer.local_or_global import BothRotaries, LocalOrGlobalAttention
    from jaxtrain.models.attention.rotary import Rotary, scaled_frequencies
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder
    from jaxtrain.models.sandwich_layers import GeGLU, SandwichBlock, ShiftedRMSNorm, scaled_embed

    attention = grouped_query(c, compute, partial(
        LocalOrGlobalAttention, c.global_every, query_factor=math.sqrt(c.head_dim / c.query_scale),
        soft_cap=c.attention_cap))
    turns = Rotary(*scaled_frequencies(c, c.head_dim))
    model = rotary_decoder(
        c, compute, attention, mlp=partial(GeGLU, c.embed_dim, c.mlp_dim), block=SandwichBlock, norm=ShiftedRMSNorm,
        embed=scaled_embed(c.vocab_size, c.embed_dim, c.mup_base.get("embed_dim", 0), rngs=rngs),
        rotary=BothRotaries(turns, turns), rngs=rngs)
    model.logit_cap = c.logit_cap
    return model


def _read(known: Keys, refuse: Refuse) -> Keys:
    every = global_every(known, 2, refuse)
    return {"global_every": every, "window": window_of_some(known, refuse, every)} | rotary(
        "gemma2", known, refuse) | soft_caps(known, refuse, LOGITS, SCORES)


def _write(c: Gemma2Config) -> Keys:
    return published_rotary(c) | published_soft_caps(c, LOGITS, SCORES) | {
        "layer_types": layer_types(c.global_every, c.num_layers), "sliding_window": c.window}


def _layer(c: Gemma2Config, experts: bool) -> list[Entry]:
    return [*decoder_tensors.ATTENTION, *decoder_tensors.SANDWICH_NORMS, *decoder_tensors.swiglu()]


FAMILY = Family(
    Gemma2Config, gemma2, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("gemma2", "Gemma2ForCausalLM", COMMON | {"query_pre_attn_scalar": "query_scale"},
                 fixed={"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": NO,
                        "use_bidirectional_attention": NO}, read=_read, write=_write),))
