"""Arcee's AFM: Llama's blocks with an MLP without a gate, whose activation is the square of ReLU."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, Entry, HFConfig
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.models.llama import BIAS_KEYS, BiasedConfig

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class ArceeConfig(BiasedConfig):
    """Arcee's AFM."""

    name: str = "arcee"


def arcee(c: ArceeConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build an Arcee decoder."""
    from jaxtrain.models.layers import SquaredReLU
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    attention = grouped_query(c, compute, qkv_bias=c.attention_bias, out_bias=c.attention_bias)
    mlp = partial(SquaredReLU, c.embed_dim, c.mlp_dim, bias=c.mlp_bias)
    return rotary_decoder(c, compute, attention, mlp=mlp, rngs=rngs)


def _layer(c: ArceeConfig, experts: bool) -> list[Entry]:
    return [*decoder_tensors.ATTENTION, *decoder_tensors.NORMS, *decoder_tensors.ungated(c.mlp_bias),
            *decoder_tensors.biases(c.attention_bias, c.attention_bias)]


FAMILY = Family(
    ArceeConfig, arcee, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("arcee", "ArceeForCausalLM", COMMON | BIAS_KEYS, fixed={"hidden_act": ("relu2",)},
                 read=partial(rotary, "arcee"), write=published_rotary),))
