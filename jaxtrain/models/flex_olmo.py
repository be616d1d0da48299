"""FlexOlmo: OLMo 2's attention and norms, and experts that were trained apart (arXiv 2507.07024)."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, NO, SILU, Entry, HFConfig, Keys
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.models.mixtral import ExpertsConfig
from jaxtrain.models.olmo2 import post_norm

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class FlexOlmoConfig(ExpertsConfig):
    """FlexOlmo."""

    name: str = "flex_olmo"


def flex_olmo(c: FlexOlmoConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a FlexOlmo decoder."""
    from jaxtrain.models.attention.self_attention import Attention

    return post_norm(c, compute, Attention, rngs=rngs)


def _write(c: FlexOlmoConfig) -> Keys:
    return published_rotary(c) | {"pad_token_id": None}


def _layer(c: FlexOlmoConfig, experts: bool) -> list[Entry]:
    return [*decoder_tensors.ATTENTION, *decoder_tensors.ALL_HEADS_QK_NORMS, *decoder_tensors.POST_NORMS,
            *decoder_tensors.experts(c)]


FAMILY = Family(
    FlexOlmoConfig, flex_olmo, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("flex_olmo", "FlexOlmoForCausalLM", COMMON | {
        "num_experts": "num_experts", "num_experts_per_tok": "experts_per_token", "norm_topk_prob": "normalize_router",
        "intermediate_size": "expert_mlp_dim"}, fixed={"attention_bias": NO, "hidden_act": SILU},
        read=partial(rotary, "flex_olmo"), write=_write, classifier=None),))
