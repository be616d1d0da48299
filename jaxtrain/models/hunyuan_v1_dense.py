"""Hunyuan (dense): Llama's blocks with norms of queries and keys behind their rotation.

The base of its rotary positions is stretched by a fixed `alpha`, which its files call "dynamic".
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.alpha_rotary import alpha_rotary, published_alpha_rotary
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class HunyuanConfig(RotaryConfig):
    """Hunyuan."""

    name: str = "hunyuan_v1_dense"
    attention_bias: bool = False  # whether queries, keys, values and what attention returns have biases


def hunyuan(c: HunyuanConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Hunyuan decoder."""
    from jaxtrain.models.attention.norm_last import NormLastAttention
    from jaxtrain.models.layers import RMSNorm
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    attention = grouped_query(c, compute, NormLastAttention, qkv_bias=c.attention_bias, out_bias=c.attention_bias,
                              qk_norm=partial(RMSNorm, c.head_dim, c.norm_eps, axis="head_dim"))
    return rotary_decoder(c, compute, attention, rngs=rngs)


def _write(c: HunyuanConfig) -> Keys:
    return published_alpha_rotary(c) | {"pad_token_id": None}


def attention_tensors(c: HunyuanConfig) -> list[Entry]:
    """Return the entries of attention with its norms, and those of a layer's norms."""
    norms = [Entry(f"attention/{name[0]}_norm/scale", f"self_attn.{name}_layernorm.weight")
             for name in ("query", "key")]
    return [*decoder_tensors.ATTENTION, *decoder_tensors.biases(c.attention_bias, c.attention_bias), *norms,
            *decoder_tensors.NORMS]


def _layer(c: HunyuanConfig, experts: bool) -> list[Entry]:
    return [*attention_tensors(c), *decoder_tensors.swiglu()]


FAMILY = Family(
    HunyuanConfig, hunyuan, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", COMMON | {"attention_bias": "attention_bias"},
                 fixed={"hidden_act": SILU}, read=partial(alpha_rotary, "hunyuan_v1_dense"), write=_write),))
