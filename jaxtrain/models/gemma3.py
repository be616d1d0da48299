"""Gemma 3: local and global attention by turns, norms before and after each sublayer (arXiv 2503.19786).

Norms multiply by 1 + scale, embeddings are multiplied by the square root of their width, and queries and keys are
normalised.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import DecoderConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import derive, number
from jaxtrain.errors import UserError
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, NO, Entry, HFConfig, Keys
from jaxtrain.hf.layer_patterns import layer_types
from jaxtrain.hf.rotary_keys import gemma_layers

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class Gemma3Config(DecoderConfig):
    """Gemma 3: local layers with a sliding window, and global layers, each kind with its own rotary base."""

    name: str = "gemma3"
    window: int = number(512, above=0)  # sliding window of the local layers, in tokens
    global_every: int = number(6, above=0)  # every N-th layer is global: it uses full attention
    rope_theta: float = number(1_000_000.0, above=0)  # base frequency of the rotary positions in the global layers
    local_rope_theta: float = number(10_000.0, above=0)  # base frequency of the rotary positions in the local layers
    # divisor of positions in the global layers: 1 in Gemma 3 1B, 8 in 4B and larger
    rope_factor: float = number(1.0, above=0)
    query_scale: int = number(0, least=0)  # attention scores are divided by the square root of this number; 0: head_dim
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


def check_query_scale(c: DecoderConfig, query_scale: int) -> None:
    """Refuse a divisor of scores that does not grow with heads that do."""
    if c.growth.get("head_dim", 1) != 1 and query_scale != c.head_dim:
        raise UserError("model.query_scale", f"{query_scale} does not grow with heads that grow by "
                        "model.mup_base", "leave it 0, or keep head_dim")


def gemma3(c: Gemma3Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Return a decoder in the style of Gemma 3."""
    from jaxtrain.models.attention.by_layer.local_or_global import BothRotaries, LocalOrGlobalAttention
    from jaxtrain.models.attention.rotary import Rotary, frequencies
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder
    from jaxtrain.models.sandwich_layers import GeGLU, SandwichBlock, ShiftedRMSNorm, scaled_embed

    attention = grouped_query(  # which itself divides by sqrt(head_dim)
        c, compute, partial(LocalOrGlobalAttention, c.global_every,
                            query_factor=math.sqrt(c.head_dim / c.query_scale)),
        qk_norm=partial(ShiftedRMSNorm, c.head_dim, c.norm_eps, axis="head_dim"))
    rotary = BothRotaries(Rotary(frequencies(c.head_dim, c.local_rope_theta)),
                          Rotary(frequencies(c.head_dim, c.rope_theta) / c.rope_factor))
    return rotary_decoder(
        c, compute, attention, mlp=partial(GeGLU, c.embed_dim, c.mlp_dim), block=SandwichBlock, norm=ShiftedRMSNorm,
        embed=scaled_embed(c.vocab_size, c.embed_dim, c.mup_base.get("embed_dim", 0), rngs=rngs), rotary=rotary,
        rngs=rngs)


def _write(c: Gemma3Config) -> Keys:
    return {"layer_types": layer_types(c.global_every, c.num_layers), "rope_theta": c.rope_theta,
            "rope_local_base_freq": c.local_rope_theta, "sliding_window_pattern": c.global_every,
            "rope_scaling": {"rope_type": "linear", "factor": c.rope_factor} if c.rope_factor != 1 else None}


def _layer(c: Gemma3Config, experts: bool) -> list[Entry]:
    return [*decoder_tensors.ATTENTION, *decoder_tensors.QK_NORMS, *decoder_tensors.SANDWICH_NORMS,
            *decoder_tensors.swiglu()]


FAMILY = Family(
    Gemma3Config, gemma3, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("gemma3_text", "Gemma3ForCausalLM",
                 COMMON | {"sliding_window": "window", "query_pre_attn_scalar": "query_scale"},
                 fixed={"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": NO,
                        "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,),
                        "use_bidirectional_attention": NO},
                 read=gemma_layers, write=_write, nested="gemma3",
                 classifier="Gemma3TextForSequenceClassification"),))
