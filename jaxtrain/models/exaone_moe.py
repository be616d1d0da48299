"""K-EXAONE: local layers by turns with global ones without positions, as in EXAONE 4, and DeepSeek-V3's experts.

https://huggingface.co/LGAI-EXAONE/K-EXAONE-236B-A23B
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import number
from jaxtrain.hf import decoder_tensors, layer_patterns
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys, Refuse, renaming
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.models.deepseek_v3 import BIAS_RATE
from jaxtrain.models.mixtral import SparseConfig

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class ExaoneMoeConfig(SparseConfig):
    """K-EXAONE."""

    name: str = "exaone_moe"
    window: int = number(4096, above=0)  # sliding window of the local layers, in tokens
    global_every: int = number(4, above=0)  # every N-th layer is global: it uses full attention, without positions

    @property
    def global_layers(self) -> int:
        """The number of layers without a window."""
        return self.num_layers // self.global_every


def exaone_moe(c: ExaoneMoeConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a K-EXAONE decoder."""
    import numpy as np

    from jaxtrain.models.attention.by_layer.local_or_global import BothRotaries, LocalOrGlobalAttention
    from jaxtrain.models.attention.rotary import Rotary, scaled_frequencies
    from jaxtrain.models.layers import RMSNorm
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    attention = grouped_query(c, compute, partial(LocalOrGlobalAttention, c.global_every),
                              qk_norm=partial(RMSNorm, c.head_dim, c.norm_eps, axis="head_dim"))
    rotary = BothRotaries(Rotary(*scaled_frequencies(c, c.head_dim)), Rotary(np.zeros(c.head_dim // 2)))
    return rotary_decoder(c, compute, attention, rotary=rotary, rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    pattern = known["sliding_window_pattern"]
    if known["layer_types"] is None and type(pattern) is not int:
        raise refuse("sliding_window_pattern", "cannot be read: it is not a whole number, and there are no layer_types")
    every = layer_patterns.global_every(known, pattern if type(pattern) is int else 4, refuse)
    return {"router": "sigmoid", "router_bias_rate": BIAS_RATE, "global_every": every} | layer_patterns.listed_mlps(
        known, refuse, known["first_k_dense_replace"]) | rotary("exaone_moe", known, refuse)


def _write(c: ExaoneMoeConfig) -> Keys:
    return published_rotary(c) | {
        "sliding_window_pattern": c.global_every, "pad_token_id": None, "first_k_dense_replace": c.dense_layers,
        "layer_types": layer_patterns.layer_types(c.global_every, c.num_layers),
        "mlp_layer_types": layer_patterns.published_mlps(c)}


def _layer(c: ExaoneMoeConfig, experts: bool) -> list[Entry]:
    routed = decoder_tensors.experts(c, bias="e_score_correction_bias")
    return [*decoder_tensors.ATTENTION, *decoder_tensors.QK_NORMS, *decoder_tensors.NORMS,
            *(routed if experts else decoder_tensors.swiglu())]


FAMILY = Family(
    ExaoneMoeConfig, exaone_moe, tensors=decoder_tensors.decoder(_layer, own_name=renaming({
        r"\.mlp\.gate\.e_score_correction_bias$": ".mlp.e_score_correction_bias"})),
    hf=(HFConfig("exaone_moe", "ExaoneMoeForCausalLM", COMMON | {
        "num_experts": "num_experts", "num_experts_per_tok": "experts_per_token", "sliding_window": "window",
        "num_shared_experts": "shared_experts", "moe_intermediate_size": "expert_mlp_dim",
        "routed_scaling_factor": "router_scale", "norm_topk_prob": "normalize_router", "n_group": "expert_groups",
        "topk_group": "expert_groups_used"}, fixed={"hidden_act": SILU}, read=_read, write=_write,
        classifier=None),))
