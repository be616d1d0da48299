"""Seed-OSS: Llama's blocks with biases on queries, keys and values, and an independent head width."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig
from jaxtrain.hf.rotary_keys import published_rotary, rotary

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class SeedOssConfig(RotaryConfig):
    """Seed-OSS."""

    name: str = "seed_oss"
    attention_bias: bool = True  # whether queries, keys and values have biases
    attention_out_bias: bool = False  # whether what attention returns has a bias
    mlp_bias: bool = False  # whether the matrices of the MLP have biases


def seed_oss(c: SeedOssConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Seed-OSS decoder."""
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    attention = grouped_query(c, compute, qkv_bias=c.attention_bias, out_bias=c.attention_out_bias)
    return rotary_decoder(c, compute, attention, mlp_bias=c.mlp_bias, rngs=rngs)


def _layer(c: SeedOssConfig, experts: bool) -> list[Entry]:
    return [*decoder_tensors.ATTENTION, *decoder_tensors.NORMS, *decoder_tensors.swiglu(),
            *decoder_tensors.biases(c.attention_bias, c.attention_out_bias, c.mlp_bias)]


FAMILY = Family(
    SeedOssConfig, seed_oss, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("seed_oss", "SeedOssForCausalLM",
                 COMMON | {key: key for key in ("attention_bias", "attention_out_bias", "mlp_bias")},
                 fixed={"hidden_act": SILU}, read=partial(rotary, "seed_oss"), write=published_rotary),))
