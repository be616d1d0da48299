"""Qwen3-Next: Gated DeltaNet in most layers, gated attention in the others, experts with a gated shared one.

One published matrix has queries, keys, values and gates of a key head one after the other (https://qwen.ai/blog?id=4074).
"""

from dataclasses import dataclass

from jaxtrain.config.family import Family
from jaxtrain.config.hybrids.layer_pattern import ATTENTION
from jaxtrain.hf import decoder_tensors, layer_patterns, multi_token_tensors
from jaxtrain.hf.hf_format import COMMON, NO, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.models.qwen3_5 import DELTA_KEYS, convolutions, delta_rest, mixer, qwen3_5, read, write
from jaxtrain.models.qwen3_5_moe import EXPERT_KEYS, Qwen35MoeConfig, gated_experts


@dataclass(frozen=True)
class Qwen3NextConfig(Qwen35MoeConfig):
    """Qwen3-Next."""

    name: str = "qwen3_next"


def _read(known: Keys, refuse: Refuse) -> Keys:
    first, every = layer_patterns.routed(known, refuse)
    return {"dense_layers": first, "experts_every": every} | read("qwen3_next", known, refuse)


def _write(c: Qwen3NextConfig) -> Keys:
    return write(c) | {"mlp_only_layers": list(range(c.dense_layers)), "decoder_sparse_step": c.experts_every}


def _delta(c: Qwen3NextConfig) -> list[Entry]:
    """Return the entries of Gated DeltaNet, of which a matrix has the rows of each key head together."""
    groups, each = c.state_key_heads, c.state_heads // c.state_key_heads
    key, value, at = c.state_key_dim, each * c.state_value_dim, "linear_attn"
    size = 2 * key + 2 * value
    found = [Entry(f"attention/{name}/kernel", f"{at}.in_proj_qkvz.weight", "(gk)d->dgk", rows=(n * key, size),
                   stretches=groups) for n, name in enumerate("qk")]
    found += [Entry(f"attention/{name}/kernel", f"{at}.in_proj_qkvz.weight", "(grk)d->dgrk", stretches=groups,
                    rows=(2 * key + n * value, size), cut=(c.embed_dim, groups, each, c.state_value_dim))
              for n, name in enumerate(("v", "gate"))]
    found += [Entry(f"attention/{name}/kernel", f"{at}.in_proj_ba.weight", "(gr)d->dgr", rows=(n * each, 2 * each),
                    stretches=groups, cut=(c.embed_dim, groups, each)) for n, name in enumerate(("beta", "step"))]
    return found


def _layer(c: Qwen3NextConfig, experts: bool, kind: str) -> list[Entry]:
    mixed = mixer(c, kind) if kind == ATTENTION else [*_delta(c), *convolutions(c, "linear_attn"),
                                                      *delta_rest("linear_attn")]
    return [*mixed, *decoder_tensors.NORMS, *(gated_experts(c) if experts else decoder_tensors.swiglu())]


FAMILY = Family(
    Qwen3NextConfig, qwen3_5, tensors=decoder_tensors.decoder(_layer, ahead=multi_token_tensors.mtp_tensors),
    hf=(HFConfig("qwen3_next", "Qwen3NextForCausalLM", COMMON | DELTA_KEYS | EXPERT_KEYS | {
        "norm_topk_prob": "normalize_router"}, fixed={"attention_bias": NO, "hidden_act": SILU}, read=_read,
        write=_write),))
