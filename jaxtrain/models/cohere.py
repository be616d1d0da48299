"""Command R: attention and MLP beside each other, LayerNorm without bias, and logits times a number.

Norms of queries and keys, where a model has them, are of each head, with scales of its own.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.base.annotations import PyTree
from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import number
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import SILU, WITHOUT_EPSILON, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import published_rotary, rotary

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder
    from jaxtrain.models.rotary_decoder import Part

KEYS = WITHOUT_EPSILON | {"layer_norm_eps": "norm_eps", "logit_scale": "logit_scale",
                          "attention_bias": "attention_bias"}


@dataclass(frozen=True)
class ParallelConfig(RotaryConfig):
    """The keys that the models of Cohere share."""

    logit_scale: float = number(0.0625, above=0)  # factor of logits
    attention_bias: bool = False  # whether queries, keys, values and what attention returns have biases


@dataclass(frozen=True)
class CohereConfig(ParallelConfig):
    """Command R."""

    name: str = "cohere"
    qk_norm: bool = False  # whether queries and keys are normalised


def parallel(c: ParallelConfig, compute: "Compute", attention: "Part", *, rotary: PyTree = None,
             rngs: "nnx.Rngs") -> "Decoder":
    """Build a decoder of Cohere's blocks with this attention."""
    from jaxtrain.models.layers import LayerNorm
    from jaxtrain.models.parallel_block import ParallelBlock
    from jaxtrain.models.rotary_decoder import rotary_decoder

    model = rotary_decoder(c, compute, attention, block=ParallelBlock, norm=partial(LayerNorm, bias=False),
                           rotary=rotary, rngs=rngs)
    model.logit_factor = c.logit_scale
    return model


def cohere(c: CohereConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Command R decoder."""
    from jaxtrain.models.layer_norms import HeadLayerNorm
    from jaxtrain.models.rotary_decoder import grouped_query

    norms = {"qk_norm": partial(HeadLayerNorm, c.num_heads, c.head_dim, c.norm_eps),
             "k_norm": partial(HeadLayerNorm, c.num_kv_heads, c.head_dim, c.norm_eps, axis="kv_heads")}
    attention = grouped_query(c, compute, qkv_bias=c.attention_bias, out_bias=c.attention_bias,
                              **norms if c.qk_norm else {})
    return parallel(c, compute, attention, rngs=rngs)


def layer(c: ParallelConfig, experts: bool) -> list[Entry]:
    """Return the entries of a layer, but norms of queries and keys."""
    attention = [*decoder_tensors.ATTENTION, *decoder_tensors.biases(c.attention_bias, c.attention_bias)]
    return [*decoder_tensors.neighbouring_pairs(attention, c.head_dim), decoder_tensors.NORMS[0],
            *decoder_tensors.swiglu()]


def _layer(c: CohereConfig, experts: bool) -> list[Entry]:
    norms = [Entry(f"attention/{name}_norm/scale", f"self_attn.{name}_norm.weight", "hk->hk") for name in "qk"]
    return [*layer(c, experts), *decoder_tensors.neighbouring_pairs(norms, c.head_dim) * c.qk_norm]


def _read(known: Keys, refuse: Refuse) -> Keys:
    return {"qk_norm": bool(known["use_qk_norm"])} | rotary("cohere", known, refuse)


def _write(c: CohereConfig) -> Keys:
    return published_rotary(c) | {"use_qk_norm": c.qk_norm, "pad_token_id": None}


FAMILY = Family(
    CohereConfig, cohere, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("cohere", "CohereForCausalLM", KEYS, fixed={"hidden_act": SILU}, read=_read, write=_write,
                 classifier=None),))
