"""Ling 3.0: Kimi delta attention in most layers, gated latent attention in the others, and DeepSeek-V3's experts.

Decays and output gates of Kimi delta attention come through whole matrices, and decays have a lower bound. The model
type was that of Ling 2.5 before, whose layers with states are others; those files are refused.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import number
from jaxtrain.config.hybrids.layer_pattern import ATTENTION
from jaxtrain.hf import decoder_tensors, layer_patterns
from jaxtrain.hf.decoder_tensors import HEADS, OUT
from jaxtrain.hf.hf_format import COMMON, NO, SILU, Entry, HFConfig, Keys, Refuse, renaming
from jaxtrain.hf.layer_patterns import FULL, LINEAR, pattern, published_pattern
from jaxtrain.models.deepseek_v3 import (
    BIAS_RATE,
    EXPERT_KEYS,
    LATENT_KEYS,
    DeepseekV3Config,
    latent,
    latents,
    written_latents,
)
from jaxtrain.models.qwen3_5 import DELTA, LETTERS, DeltaConfig

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder

_LIGHTNING = "BailingMoeV2_5ForCausalLM"  # Ling 2.5
_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


@dataclass(frozen=True)
class BailingHybridConfig(DeltaConfig, DeepseekV3Config):
    """Ling 3.0."""

    name: str = "bailing_hybrid"
    tied_embeddings: bool = False
    # the logarithm of a decay is this times a sigmoid (kda_lower_bound); 0: that of Kimi Linear, without a bound
    decay_bound: float = number(-5.0, most=0.0, fix="give a negative number, or 0 for no bound")
    kinds: ClassVar = {DELTA: "Kimi delta attention", ATTENTION: "latent attention"}


def bailing_hybrid(c: BailingHybridConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Ling 3.0 decoder."""
    from jaxtrain.models.recurrent.kimi_delta_net import WholeKimiDeltaNet
    from jaxtrain.models.rotary_decoder import rotary_decoder

    delta = partial(WholeKimiDeltaNet, c.embed_dim, c.state_heads, c.state_heads, c.state_key_dim, c.state_key_dim,
                    c.conv_width, c.norm_eps, decay_bound=c.decay_bound, kernel=compute.recurrent_kernel)
    parts = {DELTA: delta, ATTENTION: latent(c, compute, gated=True)}
    return rotary_decoder(c, compute, [parts[kind] for kind in c.layer_kinds], rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    if _LIGHTNING in (known.get("architectures") or ()):
        raise refuse("architectures", "cannot be expressed: Ling 2.5 has lightning attention")
    for key in _LIMITS:
        if any(known.get(key) or ()):
            raise refuse(key, "cannot be expressed: transformers reads the file as if it were null")
    if known["kda_safe_gate"] and known["kda_lower_bound"] >= 0:
        raise refuse("kda_lower_bound", "cannot be expressed: it is not negative")
    heads = known.get("linear_num_heads", known["num_attention_heads"])
    width = known.get("linear_head_dim", known["head_dim"])
    return pattern(known | {"layer_types": _kinds(known, refuse)}, refuse, LETTERS) | latents(
        "bailing_hybrid", _all_turning(known), refuse) | layer_patterns.listed_mlps(
        known, refuse, known["first_k_dense_replace"]) | {
        "router": "sigmoid", "router_bias_rate": BIAS_RATE,
        "state_heads": heads, "state_key_heads": heads, "state_key_dim": width, "state_value_dim": width,
        "conv_width": known.get("linear_conv_kernel_dim", known["short_conv_kernel_size"]),
        "decay_bound": float(known["kda_lower_bound"]) if known["kda_safe_gate"] else 0.0}


def _kinds(known: Keys, refuse: Refuse) -> list[str]:
    """Return the published kind of each layer."""
    if known["layer_types"] is not None:
        return known["layer_types"]
    if (every := known["layer_group_size"]) < 1:
        raise refuse("layer_group_size", "is not a number of layers")
    return [FULL if (n + 1) % every == 0 else LINEAR for n in range(known["num_hidden_layers"])]


def _all_turning(known: Keys) -> Keys:
    """Return the keys without the part of a width that turns: transformers turns all unless positions are scaled."""
    scaling = known.get("rope_scaling") or known.get("rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        return known
    part = "partial_rotary_factor"
    return {key: value for key, value in known.items() if key != part} | {
        key: {name: value for name, value in known[key].items() if name != part}
        for key in ("rope_scaling", "rope_parameters") if known.get(key)}


def _write(c: BailingHybridConfig) -> Keys:
    return written_latents(c) | {
        "layer_types": published_pattern(c.layer_kinds, LETTERS), "mlp_layer_types": layer_patterns.published_mlps(c),
        "head_dim": c.state_key_dim, "linear_num_heads": c.state_heads, "short_conv_kernel_size": c.conv_width,
        "kda_safe_gate": c.decay_bound < 0, "kda_lower_bound": c.decay_bound or -5.0, "pad_token_id": None,
        "num_nextn_predict_layers": 0}


def _mixer(c: BailingHybridConfig, kind: str) -> Iterable[Entry]:
    if kind == ATTENTION:
        yield from decoder_tensors.latent_attention(c, paired=c.rope_head_dim, at="attention", out="dense")
        yield Entry("attention/gate/kernel", "attention.g_proj.weight", "hd->dh")
        return
    for name in "qkv":
        yield Entry(f"attention/{name}/kernel", f"attention.{name}_proj.weight", HEADS)
        yield decoder_tensors.convolution(f"attention/{name}_conv", f"attention.{name}_conv1d")
    yield Entry("attention/step/kernel", "attention.f_proj.weight", HEADS)
    yield Entry("attention/gate/kernel", "attention.g_proj.weight", HEADS)
    yield Entry("attention/beta/kernel", "attention.b_proj.weight", "hd->dh")
    yield Entry("attention/decay/rate", "attention.A_log")
    yield Entry("attention/decay/bias", "attention.dt_bias", "(hk)->hk")
    yield Entry("attention/norm/scale", "attention.o_norm.weight")
    yield Entry("attention/out/kernel", "attention.o_proj.weight", OUT)


def _layer(c: BailingHybridConfig, experts: bool, kind: str) -> list[Entry]:
    mlp = decoder_tensors.experts(c, bias="gate.expert_bias") if experts else decoder_tensors.swiglu()
    return [*_mixer(c, kind), *decoder_tensors.NORMS, *mlp]


_IN_MEMORY = renaming({
    r"^(model\.)?embed_tokens\.": r"\1word_embeddings.", r"\.self_attn\.(forget_gate\.)?": ".attention.",
    r"\.gate\.e_score_correction_bias$": ".gate.expert_bias"})


def _own_name(c: BailingHybridConfig, name: str) -> str:
    """Return the published name of a tensor that transformers has under another one in memory."""
    found = _IN_MEMORY(c, name)
    layer = re.fullmatch(r"(?:model\.)?layers\.(\d+)\.self_attn\.o_proj\.weight", name)
    of_attention = layer and c.layer_kinds[int(layer[1]):][:1] == ATTENTION
    return found.replace(".o_proj.", ".dense.") if of_attention else found


FAMILY = Family(
    BailingHybridConfig, bailing_hybrid, tensors=decoder_tensors.decoder(
        _layer, ("model.word_embeddings.weight", *decoder_tensors.MODEL[1:]), further_layers=True, own_name=_own_name),
    hf=(HFConfig("bailing_hybrid", "BailingHybridForCausalLM", COMMON | LATENT_KEYS | {
        key.replace("n_routed", "num_local"): ours for key, ours in EXPERT_KEYS.items()
        if key != "first_k_dense_replace"},
        fixed={"attention_bias": NO, "hidden_act": SILU, "tie_word_embeddings": (False,)}, read=_read, write=_write,
        classifier=None),))
