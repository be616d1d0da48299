"""Gemma: Llama's blocks with norms times 1 + scale, GeGLU and scaled embeddings (arXiv 2403.08295)."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, NO, Entry, HFConfig
from jaxtrain.hf.rotary_keys import published_rotary, rotary

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class GemmaConfig(RotaryConfig):
    """Gemma."""

    name: str = "gemma"
    attention_bias: bool = False  # whether queries, keys, values and what attention returns have biases
    norm_eps: float = 1e-6
    scaled_embeddings = True


def gemma(c: GemmaConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Gemma decoder."""
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder
    from jaxtrain.models.sandwich_layers import GeGLU, ShiftedRMSNorm, scaled_embed

    return rotary_decoder(
        c, compute, grouped_query(c, compute, qkv_bias=c.attention_bias, out_bias=c.attention_bias),
        mlp=partial(GeGLU, c.embed_dim, c.mlp_dim), norm=ShiftedRMSNorm,
        embed=scaled_embed(c.vocab_size, c.embed_dim, c.mup_base.get("embed_dim", 0), rngs=rngs), rngs=rngs)


def _layer(c: GemmaConfig, experts: bool) -> list[Entry]:
    return [*decoder_tensors.ATTENTION, *decoder_tensors.biases(c.attention_bias, c.attention_bias),
            *decoder_tensors.NORMS, *decoder_tensors.swiglu()]


FAMILY = Family(
    GemmaConfig, gemma, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("gemma", "GemmaForCausalLM", COMMON | {"attention_bias": "attention_bias"},
                 fixed={"hidden_act": ("gelu_pytorch_tanh", "gelu"), "use_bidirectional_attention": NO},  # both tanh
                 read=partial(rotary, "gemma"), write=published_rotary),))
