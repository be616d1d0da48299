"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, routed experts, and a shared one with a gate (arXiv 2407.10671)."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import at_most
from jaxtrain.config.model_config import Experts
from jaxtrain.hf import decoder_tensors, layer_patterns
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import rotary
from jaxtrain.models.llama import dense, written
from jaxtrain.models.mixtral import ExpertsConfig

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class Qwen2MoeConfig(ExpertsConfig):
    """Qwen1.5-MoE and Qwen2-MoE."""

    name: str = "qwen2_moe"
    qkv_bias: bool = True  # whether queries, keys and values have biases
    # width of the shared expert, which each token multiplies by a gate; 0: that of model.shared_experts together
    shared_mlp_dim: int = at_most(0, 2**22, least=0)

    @property
    def experts(self) -> Experts:
        """The routed experts."""
        return replace(super().experts, shared_mlp_dim=self.shared_mlp_dim, shared_gated=True)


def qwen2_moe(c: Qwen2MoeConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Qwen2-MoE decoder."""
    return dense(c, compute, qkv_bias=c.qkv_bias, rngs=rngs)


def _window(known: Keys, refuse: Refuse) -> int:
    """Return the window of all layers; 0: none has one."""
    count, used = known["num_hidden_layers"], known["use_sliding_window"]
    if known["layer_types"] is None:
        local = {used and n % 2 == 0 and n < known["max_window_layers"] for n in range(count)}
    else:
        local = {kind == layer_patterns.SLIDING for kind in layer_patterns.listed(known, refuse)}
    if local == {False}:
        return 0
    if local != {True}:
        raise refuse("use_sliding_window" if known["layer_types"] is None else "layer_types",
                     "cannot be expressed: all layers have the window, or none, and not every second one")
    if not used or (known["sliding_window"] or 0) < 1:
        raise refuse("layer_types", "cannot be expressed: it has layers with a window, and there is no window")
    return known["sliding_window"]


def _read(known: Keys, refuse: Refuse) -> Keys:
    first, every = layer_patterns.routed(known, refuse)
    return {"window": _window(known, refuse), "dense_layers": first, "experts_every": every} | rotary(
        "qwen2_moe", known, refuse)


def _write(c: Qwen2MoeConfig) -> Keys:
    window = {"use_sliding_window": True, "layer_types": [layer_patterns.SLIDING] * c.num_layers} if c.window else {}
    return written(c) | window | {"mlp_only_layers": list(range(c.dense_layers)),
                                  "decoder_sparse_step": c.experts_every,
                                  "shared_expert_intermediate_size": c.experts.shared_width}


def _layer(c: Qwen2MoeConfig, experts: bool) -> list[Entry]:
    routed = [*decoder_tensors.experts(c, shared="shared_expert"),
              Entry("mlp/shared/token_gate", "mlp.shared_expert_gate.weight", "ed->de")]
    return [*decoder_tensors.ATTENTION, *decoder_tensors.biases(qkv=c.qkv_bias), *decoder_tensors.NORMS,
            *(routed if experts else decoder_tensors.swiglu())]


FAMILY = Family(
    Qwen2MoeConfig, qwen2_moe, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("qwen2_moe", "Qwen2MoeForCausalLM", COMMON | {
        "num_experts": "num_experts", "num_experts_per_tok": "experts_per_token", "qkv_bias": "qkv_bias",
        "moe_intermediate_size": "expert_mlp_dim", "norm_topk_prob": "normalize_router",
        "shared_expert_intermediate_size": "shared_mlp_dim"}, fixed={"hidden_act": SILU}, read=_read, write=_write),))
