"""GLM-4 (0414): norms before and after attention and MLP, and rotary positions of half of each head."""

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
class Glm4Config(PartialRotaryConfig):
    """GLM-4."""

    name: str = "glm4"
    rotary_part: float = 0.5
    attention_bias: bool = True  # whether queries, keys and values have biases


def glm4(c: Glm4Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a GLM-4 decoder."""
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder
    from jaxtrain.models.sandwich_layers import SandwichBlock

    attention = grouped_query(c, compute, qkv_bias=c.attention_bias)
    return rotary_decoder(c, compute, attention, block=SandwichBlock, rngs=rngs)


def _write(c: Glm4Config) -> Keys:
    return published_partial_rotary(c) | {"pad_token_id": None}


def _layer(c: Glm4Config, experts: bool) -> list[Entry]:
    turned = decoder_tensors.neighbouring_pairs(
        [*decoder_tensors.ATTENTION, *decoder_tensors.biases(qkv=c.attention_bias)], c.rotary_width)
    return [*turned, *decoder_tensors.fused_swiglu(), Entry("attention_norm/scale", "input_layernorm.weight"),
            Entry("attention_out_norm/scale", "post_self_attn_layernorm.weight"),
            Entry("mlp_norm/scale", "post_attention_layernorm.weight"),
            Entry("mlp_out_norm/scale", "post_mlp_layernorm.weight")]


FAMILY = Family(
    Glm4Config, glm4, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("glm4", "Glm4ForCausalLM", COMMON | {"attention_bias": "attention_bias"}, fixed={"hidden_act": SILU},
                 read=partial(partial_rotary, "glm4", 0.5), write=_write),))
