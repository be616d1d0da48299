"""Arcee's Trinity: gated attention, local with rotary positions by turns with global without, DeepSeek-V3's experts.

Attention and the MLP are normalised before and after (https://huggingface.co/arcee-ai/Trinity-Mini).
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import number
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, NO, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.layer_patterns import global_every, layer_types
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.models.deepseek_v3 import BIAS_RATE
from jaxtrain.models.mixtral import SparseConfig

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class AfmoeConfig(SparseConfig):
    """Trinity."""

    name: str = "afmoe"
    window: int = number(1024, above=0)  # sliding window of the local layers, in tokens
    global_every: int = number(4, above=0)  # every N-th layer is global: it uses full attention, without positions
    # whether embeddings are multiplied by the square root of their width
    # pyrefly: ignore[bad-override]
    scaled_embeddings: bool = False  # whether embeddings are multiplied by the square root of their width

    @property
    def global_layers(self) -> int:
        """The number of layers without a window."""
        return self.num_layers // self.global_every


def afmoe(c: AfmoeConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Trinity decoder."""
    import numpy as np

    from jaxtrain.models.attention.by_layer.local_or_global import BothRotaries, LocalOrGlobalAttention
    from jaxtrain.models.attention.rotary import Rotary, scaled_frequencies
    from jaxtrain.models.layers import RMSNorm
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder
    from jaxtrain.models.sandwich_layers import SandwichBlock, scaled_embed

    attention = grouped_query(c, compute, partial(LocalOrGlobalAttention, c.global_every), gated=True,
                              qk_norm=partial(RMSNorm, c.head_dim, c.norm_eps, axis="head_dim"))
    embed = scaled_embed(c.vocab_size, c.embed_dim, c.mup_base.get("embed_dim", 0),
                         rngs=rngs) if c.scaled_embeddings else None
    return rotary_decoder(
        c, compute, attention, block=SandwichBlock, embed=embed, rngs=rngs,
        rotary=BothRotaries(Rotary(*scaled_frequencies(c, c.head_dim)), Rotary(np.zeros(c.head_dim // 2))))


def _read(known: Keys, refuse: Refuse) -> Keys:
    every = known["global_attn_every_n_layers"]
    if known["layer_types"] is None and (every is None or every < 1):
        raise refuse("global_attn_every_n_layers", "is not a number of layers")
    every = global_every(known, max(every or 0, 1), refuse)
    window = known["sliding_window"]
    if every > 1 and (window is None or window < 1):
        raise refuse("sliding_window", "is not a size that a window has")
    return {"router": "sigmoid", "router_bias_rate": BIAS_RATE, "global_every": every,
            "window": window or AfmoeConfig.window} | rotary("afmoe", known, refuse)


def _write(c: AfmoeConfig) -> Keys:
    return published_rotary(c) | {"sliding_window": c.window, "global_attn_every_n_layers": c.global_every,
                                  "layer_types": layer_types(c.global_every, c.num_layers)}


def _layer(c: AfmoeConfig, experts: bool) -> list[Entry]:
    routed = decoder_tensors.experts(c, router="router.gate.weight", bias="expert_bias")
    return [*decoder_tensors.ATTENTION, *decoder_tensors.QK_NORMS,
            Entry("attention/gate/kernel", "self_attn.gate_proj.weight", decoder_tensors.HEADS),
            Entry("attention_norm/scale", "input_layernorm.weight"),
            Entry("attention_out_norm/scale", "post_attention_layernorm.weight"),
            Entry("mlp_norm/scale", "pre_mlp_layernorm.weight"),
            Entry("mlp_out_norm/scale", "post_mlp_layernorm.weight"),
            *(routed if experts else decoder_tensors.swiglu())]


FAMILY = Family(
    AfmoeConfig, afmoe, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("afmoe", "AfmoeForCausalLM", COMMON | {
        "num_experts": "num_experts", "num_experts_per_tok": "experts_per_token",
        "moe_intermediate_size": "expert_mlp_dim", "num_shared_experts": "shared_experts",
        "num_dense_layers": "dense_layers", "route_scale": "router_scale", "mup_enabled": "scaled_embeddings"},
        fixed={"hidden_act": SILU, "attention_bias": NO, "score_func": ("sigmoid",), "route_norm": (True,),
               "n_group": (1, None), "topk_group": (1, None)}, read=_read, write=_write, classifier=None),))
