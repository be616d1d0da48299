"""MiniMax-M2: norms of all heads together, rotary positions of a part of each, experts by biased sigmoid scores.

https://github.com/MiniMax-AI/MiniMax-M2
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import PartialRotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import BIASES, COMMON, Entry, HFConfig, Keys, Refuse, renaming
from jaxtrain.hf.rotary_keys import partial_rotary, published_partial_rotary
from jaxtrain.models.deepseek_v3 import BIAS_RATE
from jaxtrain.models.mixtral import ExpertsConfig

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class MiniMaxM2Config(ExpertsConfig, PartialRotaryConfig):
    """MiniMax-M2."""

    name: str = "minimax_m2"


def all_heads_normalised(c: ExpertsConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a decoder whose queries and keys are normalised over all heads together."""
    from jaxtrain.models.post_norm_layers import AllHeadsRMSNorm
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    attention = grouped_query(
        c, compute, qk_norm=partial(AllHeadsRMSNorm, c.num_heads, c.head_dim, c.norm_eps),
        k_norm=partial(AllHeadsRMSNorm, c.num_kv_heads, c.head_dim, c.norm_eps, axis="kv_heads"))
    return rotary_decoder(c, compute, attention, rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    if (width := known.get("rotary_dim")) is not None:
        if type(width) is not int or width < 1:
            raise refuse("rotary_dim", "is not a width that turns")
        known = {"partial_rotary_factor": width / known["head_dim"]} | known
    return {"router": "sigmoid", "router_bias_rate": BIAS_RATE} | partial_rotary("minimax_m2", 1.0, known, refuse)


def _layer(c: MiniMaxM2Config, experts: bool) -> list[Entry]:
    return [*decoder_tensors.ATTENTION, *decoder_tensors.ALL_HEADS_QK_NORMS, *decoder_tensors.NORMS,
            *decoder_tensors.experts(c, "block_sparse_moe", ("w1", "w3", "w2"), bias="e_score_correction_bias")]


FAMILY = Family(
    MiniMaxM2Config, all_heads_normalised, tensors=decoder_tensors.decoder(
        _layer, own_name=renaming({r"\.mlp\.": ".block_sparse_moe."})),
    hf=(HFConfig("minimax_m2", "MiniMaxM2ForCausalLM", COMMON | {
        "num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token",
        "intermediate_size": "expert_mlp_dim"}, fixed=BIASES, read=_read, write=published_partial_rotary,
        classifier=None),))
