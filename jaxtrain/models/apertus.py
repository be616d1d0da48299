"""Apertus: norms of queries and keys, and an MLP without a gate, whose activation is xIELU (arXiv 2509.14233)."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, Entry, HFConfig, Keys
from jaxtrain.hf.rotary_keys import published_rotary, rotary

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder

_USUAL = {"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192,
          "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_XIELU = {"positive": ("alpha_p", "d->d"), "negative": ("alpha_n", "d->d"), "beta": ("beta", "->"),
          "eps": ("eps", "->")}


@dataclass(frozen=True)
class ApertusConfig(RotaryConfig):
    """Apertus."""

    name: str = "apertus"
    attention_bias: bool = False  # whether queries, keys, values and what attention returns have biases
    fixed = ("blocks/layer/mlp/xielu/beta", "blocks/layer/mlp/xielu/eps")


def apertus(c: ApertusConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build an Apertus decoder."""
    from jaxtrain.models.layers import RMSNorm
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder
    from jaxtrain.models.xielu import XieluMLP

    attention = grouped_query(c, compute, qkv_bias=c.attention_bias, out_bias=c.attention_bias,
                              qk_norm=partial(RMSNorm, c.head_dim, c.norm_eps, axis="head_dim"))
    return rotary_decoder(c, compute, attention, mlp=partial(XieluMLP, c.embed_dim, c.mlp_dim), rngs=rngs)


def _write(c: ApertusConfig) -> Keys:
    turns = published_rotary(c)
    return {"pad_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": turns["rope_theta"]} | (
        turns["rope_scaling"] or {})}


def _layer(c: ApertusConfig, experts: bool) -> list[Entry]:
    return [*decoder_tensors.ATTENTION, *decoder_tensors.biases(c.attention_bias, c.attention_bias),
            *decoder_tensors.QK_NORMS, Entry("attention_norm/scale", "attention_layernorm.weight"),
            Entry("mlp_norm/scale", "feedforward_layernorm.weight"), *decoder_tensors.ungated(False),
            *(Entry(f"mlp/xielu/{ours}", f"mlp.act_fn.{name}", layout) for ours, (name, layout) in _XIELU.items())]


FAMILY = Family(
    ApertusConfig, apertus, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("apertus", "ApertusForCausalLM", COMMON | {"attention_bias": "attention_bias"},
                 fixed={"hidden_act": ("xielu",)}, read=partial(rotary, "apertus", usual=_USUAL), write=_write,
                 classifier=None),))
