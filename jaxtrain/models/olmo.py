"""OLMo: Llama's blocks with LayerNorm without parameters (arXiv 2402.00838)."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import number
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import SILU, WITHOUT_EPSILON, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import published_rotary, rotary

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class OlmoConfig(RotaryConfig):
    """OLMo."""

    name: str = "olmo"
    attention_bias: bool = False  # whether queries, keys, values and what attention returns have biases
    clip_qkv: float = number(0.0, least=0)  # queries, keys and values are clipped to this size; 0: they are not


def olmo(c: OlmoConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build an OLMo decoder."""
    from jaxtrain.models.attention.clipped import ClippedAttention
    from jaxtrain.models.attention.self_attention import Attention
    from jaxtrain.models.layers import LayerNorm
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    kind = partial(ClippedAttention, c.clip_qkv) if c.clip_qkv else Attention
    attention = grouped_query(c, compute, kind, qkv_bias=c.attention_bias, out_bias=c.attention_bias)
    return rotary_decoder(c, compute, attention, norm=partial(LayerNorm, scale=False, bias=False), rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    clip = known["clip_qkv"]
    if clip is not None and clip <= 0:
        raise refuse("clip_qkv", "is not a size to clip to: it is not positive")
    return {"clip_qkv": float(clip or 0)} | rotary("olmo", known, refuse)


def _write(c: OlmoConfig) -> Keys:
    return published_rotary(c) | {"clip_qkv": c.clip_qkv or None, "pad_token_id": None}


def _layer(c: OlmoConfig, experts: bool) -> list[Entry]:
    return [*decoder_tensors.ATTENTION, *decoder_tensors.biases(c.attention_bias, c.attention_bias),
            *decoder_tensors.swiglu()]


FAMILY = Family(
    OlmoConfig, olmo, tensors=decoder_tensors.decoder(_layer, norm=[]),
    hf=(HFConfig("olmo", "OlmoForCausalLM", WITHOUT_EPSILON | {"attention_bias": "attention_bias"},
                 fixed={"hidden_act": SILU}, read=_read, write=_write),))
