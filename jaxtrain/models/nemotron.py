"""Nemotron-4 and Minitron: LayerNorm times 1 + scale, squared ReLU, rotary positions of half of each head.

As in arXiv 2402.16819 and 2407.14679.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import PartialRotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.decoder_tensors import pair
from jaxtrain.hf.hf_format import WITHOUT_EPSILON, Entry, HFConfig
from jaxtrain.hf.rotary_keys import partial_rotary, published_partial_rotary
from jaxtrain.models.llama import BIAS_KEYS

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class NemotronConfig(PartialRotaryConfig):
    """Nemotron-4 and Minitron."""

    name: str = "nemotron"
    rotary_part: float = 0.5
    attention_bias: bool = False  # whether queries, keys, values and what attention returns have biases
    mlp_bias: bool = False  # whether the matrices of the MLP have biases


def nemotron(c: NemotronConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Nemotron decoder."""
    from jaxtrain.models.layer_norms import ShiftedLayerNorm
    from jaxtrain.models.layers import SquaredReLU
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    attention = grouped_query(c, compute, qkv_bias=c.attention_bias, out_bias=c.attention_bias)
    return rotary_decoder(c, compute, attention, mlp=partial(SquaredReLU, c.embed_dim, c.mlp_dim, bias=c.mlp_bias),
                          norm=ShiftedLayerNorm, rngs=rngs)


def _layer(c: NemotronConfig, experts: bool) -> list[Entry]:
    return [*decoder_tensors.ATTENTION, *decoder_tensors.biases(c.attention_bias, c.attention_bias),
            *decoder_tensors.ungated(c.mlp_bias), *pair("attention_norm", "input_layernorm", weight="shift"),
            *pair("mlp_norm", "post_attention_layernorm", weight="shift")]


FAMILY = Family(
    NemotronConfig, nemotron,
    tensors=decoder_tensors.decoder(_layer, norm=pair("norm", "model.norm", weight="shift")),
    hf=(HFConfig("nemotron", "NemotronForCausalLM", WITHOUT_EPSILON | BIAS_KEYS | {"norm_eps": "norm_eps"},
                 fixed={"hidden_act": ("relu2",)}, read=partial(partial_rotary, "nemotron", 0.5),
                 write=published_partial_rotary),))
