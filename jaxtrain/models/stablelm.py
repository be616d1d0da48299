"""StableLM: LayerNorm, rotary positions of a part of each head, and attention and MLP beside each other in some.

Norms of queries and keys, where a model has them, are of each head, with scales of its own (arXiv 2402.17834).
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import PartialRotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.decoder_tensors import pair
from jaxtrain.hf.hf_format import SILU, WITHOUT_EPSILON, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import partial_rotary, published_partial_rotary

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class StableLmConfig(PartialRotaryConfig):
    """StableLM."""

    name: str = "stablelm"
    rotary_part: float = 0.25
    qkv_bias: bool = False  # whether queries, keys and values have biases
    qk_norm: bool = False  # whether queries and keys are normalised
    parallel: bool = False  # whether the MLP reads what attention reads


def stablelm(c: StableLmConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a StableLM decoder."""
    from jaxtrain.models.decoder import Block
    from jaxtrain.models.layer_norms import HeadLayerNorm
    from jaxtrain.models.layers import LayerNorm
    from jaxtrain.models.parallel_block import ParallelBlock
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    norms = {"qk_norm": partial(HeadLayerNorm, c.num_heads, c.head_dim, c.norm_eps),
             "k_norm": partial(HeadLayerNorm, c.num_kv_heads, c.head_dim, c.norm_eps, axis="kv_heads")}
    attention = grouped_query(c, compute, qkv_bias=c.qkv_bias, **norms if c.qk_norm else {})
    return rotary_decoder(c, compute, attention, block=ParallelBlock if c.parallel else Block, norm=LayerNorm,
                          rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    if known.get("head_dim") not in (None, known["hidden_size"] // known["num_attention_heads"]):
        raise refuse("head_dim", "cannot be expressed: the width of heads in transformers does not follow from it")
    return partial_rotary("stablelm", 0.25, known, refuse)


def _layer(c: StableLmConfig, experts: bool) -> list[Entry]:
    norms = [Entry(f"attention/{name}_norm/scale", f"self_attn.{name}_layernorm.norms.{{expert}}.weight",
                   experts=count) for name, count in (("q", c.num_heads), ("k", c.num_kv_heads))]
    return [*decoder_tensors.ATTENTION, *decoder_tensors.biases(qkv=c.qkv_bias), *norms * c.qk_norm,
            *decoder_tensors.swiglu(), *pair("attention_norm", "input_layernorm"),
            *pair("mlp_norm", "post_attention_layernorm") * (not c.parallel)]


FAMILY = Family(
    StableLmConfig, stablelm, tensors=decoder_tensors.decoder(_layer, norm=pair("norm", "model.norm")),
    hf=(HFConfig("stablelm", "StableLmForCausalLM", WITHOUT_EPSILON | {
        "layer_norm_eps": "norm_eps", "use_qkv_bias": "qkv_bias", "qk_layernorm": "qk_norm",
        "use_parallel_residual": "parallel"}, fixed={"hidden_act": SILU}, read=_read,
        write=published_partial_rotary),))
