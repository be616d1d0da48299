"""OLMo Hybrid: OLMo 3's attention in some layers, Gated DeltaNet in most (https://allenai.org/blog/olmohybrid)."""

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.config.hybrids.layer_pattern import ATTENTION
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.decoder_tensors import HEADS
from jaxtrain.hf.hf_format import COMMON, NO, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.layer_patterns import FULL, LINEAR, pattern, published_pattern
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.models.qwen3_5 import DELTA, DELTA_KEYS, LETTERS, DeltaConfig, delta_net, delta_rest

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder

_DELTA_NORMS = [Entry("attention_norm/scale", "attention_layer_norm.weight"),
                Entry("mlp_norm/scale", "feedforward_layer_norm.weight")]
EPSILON = 1e-5  # of the norm in Gated DeltaNet, whatever `norm_eps` is


@dataclass(frozen=True)
class OlmoHybridConfig(DeltaConfig, RotaryConfig):
    """OLMo Hybrid."""

    name: str = "olmo_hybrid"
    no_rope: bool = False  # whether attention has no rotary positions
    negative_eigenvalues: bool = True  # whether what a token replaces in a state may be turned around: beta up to 2
    norm_eps: float = 1e-6

    @property
    def rotary_width(self) -> int:
        """The width of the part of a head that turns with its position."""
        return 0 if self.no_rope else self.head_dim


def olmo_hybrid(c: OlmoHybridConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build an OLMo Hybrid decoder."""
    from jaxtrain.models.decoder import Block
    from jaxtrain.models.post_norm_layers import AllHeadsRMSNorm, PostNormBlock
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    attention = grouped_query(
        c, compute, qk_norm=partial(AllHeadsRMSNorm, c.num_heads, c.head_dim, c.norm_eps),
        k_norm=partial(AllHeadsRMSNorm, c.num_kv_heads, c.head_dim, c.norm_eps, axis="kv_heads"))
    parts = {DELTA: delta_net(c, compute, 2.0 if c.negative_eigenvalues else 1.0, EPSILON), ATTENTION: attention}
    blocks = {DELTA: Block, ATTENTION: PostNormBlock}
    return rotary_decoder(c, compute, [parts[kind] for kind in c.layer_kinds],
                          block=[blocks[kind] for kind in c.layer_kinds], rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    if known["layer_types"] is None:
        count = known["num_hidden_layers"]
        full = {n for n in range(count) if n % 4 == 3} or {count - 1}
        known = known | {"layer_types": [FULL if n in full else LINEAR for n in range(count)]}
    found = pattern(known, refuse, LETTERS)
    if {*found["layer_pattern"]} != {DELTA, ATTENTION}:
        raise refuse("layer_types", "does not have both kinds of layers")
    heads, width = known["num_attention_heads"], known["linear_key_head_dim"]
    key_heads = known["linear_num_key_heads"] or heads
    width = int(0.75 * known["hidden_size"] / key_heads) if width is None else width
    values = 2 * width if known["linear_value_head_dim"] is None else known["linear_value_head_dim"]
    turning = known.get("rope_scaling") or known.get("rope_parameters") or {}
    base = turning.get("rope_theta", known.get("rope_theta", True))
    turns = {"no_rope": True} if base is None else rotary("olmo_hybrid", known, refuse)
    return found | turns | {
        "state_key_dim": width, "state_value_dim": values, "state_key_heads": key_heads,
        "state_heads": known["linear_num_value_heads"] or heads}


def _write(c: OlmoHybridConfig) -> Keys:
    turns: Keys = published_rotary(c) | ({"rope_theta": None} if c.no_rope else {})
    scaling = {"rope_type": "default", "rope_theta": turns["rope_theta"]} | (turns["rope_scaling"] or {})
    return {"layer_types": published_pattern(c.layer_kinds, LETTERS), "pad_token_id": None, "rope_parameters": scaling}


def _layer(c: OlmoHybridConfig, experts: bool, kind: str) -> list[Entry]:
    if kind == ATTENTION:
        return [*decoder_tensors.ATTENTION, *decoder_tensors.ALL_HEADS_QK_NORMS, *decoder_tensors.POST_NORMS,
                *decoder_tensors.swiglu()]
    names = {"q": "q", "k": "k", "v": "v", "gate": "g"}
    return [*(Entry(f"attention/{ours}/kernel", f"linear_attn.{name}_proj.weight", HEADS)
              for ours, name in names.items()),
            *(Entry(f"attention/{ours}/kernel", f"linear_attn.{name}_proj.weight", "hd->dh")
              for ours, name in (("beta", "b"), ("step", "a"))),
            *(decoder_tensors.convolution(f"attention/{name}_conv", f"linear_attn.{name}_conv1d") for name in "qkv"),
            *delta_rest("linear_attn", norm="o_norm", out="o_proj"), *_DELTA_NORMS, *decoder_tensors.swiglu()]


def _own_name(c: OlmoHybridConfig, name: str) -> str:
    """Return the name of a norm that transformers calls otherwise: in memory, or, of layers with attention, on disk."""
    found = re.search(r"layers\.(\d+)\.(\w+)\.weight$", name)
    if found is None or int(found[1]) >= c.num_layers:
        return name
    full = c.layer_kinds[int(found[1])] == ATTENTION
    others = {"feedforward_layer_norm": "post_attention_layernorm"} if full else {
        "input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
    return name.replace(found[2], others.get(found[2], found[2]))


FAMILY = Family(
    OlmoHybridConfig, olmo_hybrid, tensors=decoder_tensors.decoder(_layer, own_name=_own_name),
    hf=(HFConfig("olmo_hybrid", "OlmoHybridForCausalLM",
                 COMMON | DELTA_KEYS | {"linear_allow_neg_eigval": "negative_eigenvalues"},
                 fixed={"attention_bias": NO, "hidden_act": SILU}, read=_read, write=_write),))
