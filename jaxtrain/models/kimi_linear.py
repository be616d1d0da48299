"""Kimi Linear: Kimi delta attention in most layers, latent attention without positions in the others, and experts.

Both kinds of layers are those of arXiv 2510.26692; experts are DeepSeek-V3's.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from jaxtrain.config.family import Family
from jaxtrain.config.hybrids.layer_pattern import ATTENTION
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.decoder_tensors import HEADS, OUT
from jaxtrain.hf.hf_format import COMMON, NO, SILU, Entry, HFConfig, Keys, Refuse, renaming
from jaxtrain.hf.layer_patterns import FULL, LINEAR, pattern, published_pattern
from jaxtrain.models.deepseek_v3 import BIAS_RATE, LATENT_EPS, DeepseekV3Config, latent
from jaxtrain.models.qwen3_5 import DELTA, LETTERS, DeltaConfig

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class KimiLinearConfig(DeltaConfig, DeepseekV3Config):
    """Kimi Linear."""

    name: str = "kimi_linear"
    tied_embeddings: bool = False
    kinds: ClassVar = {DELTA: "Kimi delta attention", ATTENTION: "latent attention"}

    @property
    def rotary_width(self) -> int:
        """Nothing turns with its position."""
        return 0


def kimi_linear(c: KimiLinearConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Kimi Linear decoder."""
    from jaxtrain.models.recurrent.kimi_delta_net import KimiDeltaNet
    from jaxtrain.models.rotary_decoder import rotary_decoder

    delta = partial(KimiDeltaNet, c.embed_dim, c.state_heads, c.state_heads, c.state_key_dim, c.state_key_dim,
                    c.conv_width, c.norm_eps, kernel=compute.recurrent_kernel)
    parts = {DELTA: delta, ATTENTION: latent(c, compute)}
    return rotary_decoder(c, compute, [parts[kind] for kind in c.layer_kinds], rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    own = known.get("linear_attn_config") or {}
    widths = {ours: own.get(theirs, known[key]) for ours, theirs, key in (
        ("state_key_dim", "head_dim", "linear_head_dim"), ("state_heads", "num_heads", "linear_num_heads"),
        ("conv_width", "short_conv_kernel_size", "linear_conv_kernel_dim"))}
    if known["num_key_value_heads"] not in (None, known["num_attention_heads"]):
        raise refuse("num_key_value_heads", "cannot be expressed: only as many as num_attention_heads can")
    return pattern(known | {"layer_types": _kinds(known, own, refuse)}, refuse, LETTERS) | widths | {
        "dense_layers": _dense(known, refuse), "router": "sigmoid", "router_bias_rate": BIAS_RATE, "num_kv_heads": 0,
        "latent_norm_eps": 0.0 if known["rms_norm_eps"] == LATENT_EPS else LATENT_EPS,
        "state_key_heads": widths["state_heads"], "state_value_dim": widths["state_key_dim"]}


def _kinds(known: Keys, own: Keys, refuse: Refuse) -> list[str]:
    """Return the published kind of each layer."""
    count = known["num_hidden_layers"]
    if known["layer_types"] is not None:
        return known["layer_types"]
    if "full_attn_layers" not in own or "kda_layers" not in own:
        return [FULL if n and n % 4 == 0 else LINEAR for n in range(count)]
    full, delta = {*own["full_attn_layers"]}, {*own["kda_layers"]}  # counted from 1
    if full & delta or full | delta != {*range(1, count + 1)}:
        raise refuse("linear_attn_config", f"does not say of each of num_hidden_layers={count} layers what it is")
    return [FULL if n + 1 in full else LINEAR for n in range(count)]


def _dense(known: Keys, refuse: Refuse) -> int:
    """Return how many of the first layers have no experts."""
    kinds = known["mlp_layer_types"]
    if kinds is None:
        return min(known.get("first_k_dense_replace", 1), known["num_hidden_layers"])
    dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if kinds != ["dense"] * dense + ["sparse"] * (known["num_hidden_layers"] - dense):
        raise refuse("mlp_layer_types", "cannot be expressed: only the first layers can be without experts")
    return dense


def _write(c: KimiLinearConfig) -> Keys:
    return {"layer_types": published_pattern(c.layer_kinds, LETTERS), "linear_head_dim": c.state_key_dim,
            "linear_num_heads": c.state_heads, "linear_conv_kernel_dim": c.conv_width, "q_lora_rank": c.q_rank or None,
            "head_dim": c.rope_head_dim, "pad_token_id": None,
            "mlp_layer_types": ["dense"] * c.dense_layers + ["sparse"] * (c.num_layers - c.dense_layers)}


def _mixer(c: KimiLinearConfig, kind: str) -> list[Entry]:
    if kind == ATTENTION:
        return decoder_tensors.latent_attention(c)
    low = [(f"{ours}{end}", f"{name}_{letter}_proj", layout) for ours, name in (("step", "f"), ("gate", "g"))
           for end, letter, layout in (("_down", "a", "ld->dl"), ("", "b", "(hk)l->lhk"))]
    return [*(Entry(f"attention/{name}/kernel", f"self_attn.{name}_proj.weight", HEADS) for name in "qkv"),
            *(decoder_tensors.convolution(f"attention/{name}_conv", f"self_attn.{name}_conv1d") for name in "qkv"),
            *(Entry(f"attention/{ours}/kernel", f"self_attn.{name}.weight", layout) for ours, name, layout in low),
            Entry("attention/beta/kernel", "self_attn.b_proj.weight", "hd->dh"),
            Entry("attention/decay/rate", "self_attn.A_log", "pphp->h"),
            Entry("attention/decay/bias", "self_attn.dt_bias", "(hk)->hk"),
            Entry("attention/norm/scale", "self_attn.o_norm.weight"),
            Entry("attention/out/kernel", "self_attn.o_proj.weight", OUT)]


def _layer(c: KimiLinearConfig, experts: bool, kind: str) -> list[Entry]:
    return [*_mixer(c, kind), *decoder_tensors.NORMS, *(
        decoder_tensors.experts(c, "block_sparse_moe", ("w1", "w3", "w2")) if experts else decoder_tensors.swiglu())]


FAMILY = Family(
    KimiLinearConfig, kimi_linear, tensors=decoder_tensors.decoder(_layer, own_name=renaming({
        r"\.self_attn\.forget_gate\.": ".self_attn.", r"\.block_sparse_moe\.(\w+_proj\.)": r".mlp.\1",
        r"\.mlp\.(experts|gate|shared_experts)\.": r".block_sparse_moe.\1."})),
    hf=(HFConfig("kimi_linear", "KimiLinearForCausalLM", COMMON | {
        "num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token",
        "moe_intermediate_size": "expert_mlp_dim", "n_shared_experts": "shared_experts", "n_group": "expert_groups",
        "topk_group": "expert_groups_used", "routed_scaling_factor": "router_scale",
        "norm_topk_prob": "normalize_router", "q_lora_rank": "q_rank", "kv_lora_rank": "kv_rank",
        "qk_nope_head_dim": "head_dim", "qk_rope_head_dim": "rope_head_dim", "v_head_dim": "value_head_dim"},
        fixed={"attention_bias": NO, "hidden_act": SILU, "tie_word_embeddings": (False,)}, read=_read, write=_write),))
