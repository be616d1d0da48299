"""Qwen3.5 with experts: Qwen3.5's layers, routed experts, and a shared one with a gate."""

from dataclasses import dataclass, replace
from functools import partial

from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import at_most
from jaxtrain.config.model_config import Experts
from jaxtrain.hf import decoder_tensors, multi_token_tensors
from jaxtrain.hf.hf_format import COMMON, NO, SILU, Entry, HFConfig
from jaxtrain.models.mixtral import ExpertsConfig
from jaxtrain.models.qwen3_5 import DELTA_KEYS, Qwen35Config, mixer, qwen3_5, read, write


@dataclass(frozen=True)
class Qwen35MoeConfig(Qwen35Config, ExpertsConfig):
    """Qwen3.5 with experts."""

    name: str = "qwen3_5_moe"
    # width of the shared expert, which each token multiplies by a gate; 0: that of model.shared_experts together
    shared_mlp_dim: int = at_most(0, 2**22, least=0)

    @property
    def experts(self) -> Experts:
        """The routed experts."""
        return replace(super().experts, shared_mlp_dim=self.shared_mlp_dim, shared_gated=True)


EXPERT_KEYS = {"num_experts": "num_experts", "num_experts_per_tok": "experts_per_token",
               "moe_intermediate_size": "expert_mlp_dim", "shared_expert_intermediate_size": "shared_mlp_dim"}


def gated_experts(c: Qwen35MoeConfig) -> list[Entry]:
    """Return the entries of experts, and of the shared one with its gate."""
    return [*decoder_tensors.experts(c, shared="shared_expert"),
            Entry("mlp/shared/token_gate", "mlp.shared_expert_gate.weight", "ed->de")]


def _layer(c: Qwen35MoeConfig, experts: bool, kind: str) -> list[Entry]:
    return [*mixer(c, kind), *decoder_tensors.NORMS, *gated_experts(c)]


FAMILY = Family(
    Qwen35MoeConfig, qwen3_5, tensors=decoder_tensors.decoder(_layer, ahead=multi_token_tensors.mtp_tensors),
    hf=(HFConfig("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", {
        key: ours for key, ours in COMMON.items() if key != "intermediate_size"} | DELTA_KEYS | EXPERT_KEYS,
        fixed={"attention_bias": NO, "hidden_act": SILU}, read=partial(read, "qwen3_5_moe_text"), write=write,
        nested="qwen3_5_moe"),))
