"""Granite: Llama's blocks with fixed multipliers of embeddings, scores, residual branches and logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import number
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.models.llama import BIAS_KEYS

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder
    from jaxtrain.models.rotary_decoder import Part

MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


@dataclass(frozen=True)
class MultipliedConfig(RotaryConfig):
    """Multipliers of the parts of a decoder, and biases of attention."""

    attention_bias: bool = False  # whether queries, keys, values and what attention returns have biases
    embedding_multiplier: float = number(1.0, above=0)  # factor of token embeddings
    # factor of attention scores, in place of 1 / sqrt(head_dim)
    attention_multiplier: float = number(1.0, above=0)
    residual_multiplier: float = number(1.0, above=0)  # factor of what attention and the MLP add
    logits_scaling: float = number(1.0, above=0)  # divisor of logits


@dataclass(frozen=True)
class GraniteConfig(MultipliedConfig):
    """Granite."""

    name: str = "granite"
    mlp_bias: bool = False  # whether the matrices of the MLP have biases


def granite(c: GraniteConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Granite decoder."""
    return multiplied(c, compute, mlp_bias=c.mlp_bias, rngs=rngs)


def multiplied_attention(c: MultipliedConfig, compute: "Compute") -> "Part":
    """Return what makes the attention of a layer, with its multiplier."""
    from jaxtrain.models.rotary_decoder import grouped_query

    return grouped_query(c, compute, qkv_bias=c.attention_bias, out_bias=c.attention_bias,
                         score_factor=c.attention_multiplier * c.head_dim**0.5)


def multiplied(c: MultipliedConfig, compute: "Compute", attention: "Part | Sequence[Part] | None" = None, *,
               mlp: "Part | None" = None, mlp_bias: bool = False, rngs: "nnx.Rngs") -> "Decoder":
    """Build a decoder with Granite's multipliers; `attention`, `mlp` and `mlp_bias` are `rotary_decoder`'s."""
    from jaxtrain.models.layers import MultipliedEmbed
    from jaxtrain.models.multiplied_block import MultipliedBlock
    from jaxtrain.models.rotary_decoder import rotary_decoder

    model = rotary_decoder(
        c, compute, attention or multiplied_attention(c, compute),
        block=partial(MultipliedBlock, c.residual_multiplier),
        embed=MultipliedEmbed(c.vocab_size, c.embed_dim, c.embedding_multiplier, rngs=rngs), mlp=mlp,
        mlp_bias=mlp_bias, rngs=rngs)
    model.logit_factor = 1 / c.logits_scaling
    return model


def _layer(c: GraniteConfig, experts: bool) -> list[Entry]:
    return [*decoder_tensors.ATTENTION, *decoder_tensors.NORMS, *decoder_tensors.swiglu(),
            *decoder_tensors.biases(c.attention_bias, c.attention_bias, c.mlp_bias)]


FAMILY = Family(
    GraniteConfig, granite, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("granite", "GraniteForCausalLM", COMMON | BIAS_KEYS | {key: key for key in MULTIPLIERS},
                 fixed={"hidden_act": SILU}, read=partial(rotary, "granite"), write=published_rotary,
                 classifier=None),))
