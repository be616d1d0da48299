"""GLM-4 (2024): rotary positions of half of each head, whose pairs are neighbours; a fused MLP."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import PartialRotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys
from jaxtrain.hf.rotary_keys import partial_rotary, published_partial_rotary

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class GlmConfig(PartialRotaryConfig):
    """GLM-4 of 2024."""

    name: str = "glm"
    rotary_part: float = 0.5
    attention_bias: bool = True  # whether queries, keys and values have biases


def glm(c: GlmConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a GLM decoder."""
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    return rotary_decoder(c, compute, grouped_query(c, compute, qkv_bias=c.attention_bias), rngs=rngs)


def _write(c: GlmConfig) -> Keys:
    return published_partial_rotary(c) | {"pad_token_id": None}


def _layer(c: GlmConfig, experts: bool) -> list[Entry]:
    return [*decoder_tensors.neighbouring_pairs(
        [*decoder_tensors.ATTENTION, *decoder_tensors.biases(qkv=c.attention_bias)], c.rotary_width),
        *decoder_tensors.fused_swiglu(), *decoder_tensors.NORMS]


FAMILY = Family(
    GlmConfig, glm, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("glm", "GlmForCausalLM", COMMON | {"attention_bias": "attention_bias"}, fixed={"hidden_act": SILU},
                 read=partial(partial_rotary, "glm", 0.5), write=_write),))
