"""Helium: Llama's blocks, whose rotary positions turn pairs of neighbours (https://kyutai.org)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.models.llama import BIAS_KEYS, BiasedConfig

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class HeliumConfig(BiasedConfig):
    """Helium; what attention returns has no bias."""

    name: str = "helium"


def helium(c: HeliumConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Helium decoder."""
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    return rotary_decoder(c, compute, grouped_query(c, compute, qkv_bias=c.attention_bias), mlp_bias=c.mlp_bias,
                          rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    if known["head_dim"] * known["num_attention_heads"] != known["hidden_size"]:
        raise refuse("head_dim", "is not that of heads which are as wide as hidden_size together")
    return rotary("helium", known, refuse)


def _write(c: HeliumConfig) -> Keys:
    return published_rotary(c) | {"pad_token_id": None}


def _layer(c: HeliumConfig, experts: bool) -> list[Entry]:
    attention = [*decoder_tensors.ATTENTION, *decoder_tensors.biases(qkv=c.attention_bias)]
    return [*decoder_tensors.neighbouring_pairs(attention, c.head_dim), *decoder_tensors.NORMS,
            *decoder_tensors.swiglu(), *decoder_tensors.biases(mlp=c.mlp_bias)]


FAMILY = Family(
    HeliumConfig, helium, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("helium", "HeliumForCausalLM", COMMON | BIAS_KEYS, fixed={"hidden_act": SILU}, read=_read,
                 write=_write),))
