"""Mixtral: Llama's blocks with routed experts in place of the MLP (arXiv 2401.04088)."""

from dataclasses import dataclass, replace

from jaxtrain.config.decoder_config import RoutedConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import at_most, choice, number
from jaxtrain.config.model_config import Experts
from jaxtrain.errors import UserError
from jaxtrain.hf import decoder_tensors, layer_patterns
from jaxtrain.hf.hf_format import COMMON, Entry, HFConfig, Keys, Refuse, renaming
from jaxtrain.hf.rotary_keys import rotary
from jaxtrain.models.llama import DenseConfig, dense, written


@dataclass(frozen=True)
class SparseConfig(RoutedConfig):
    """Layers with and without experts, shared ones, and how tokens choose."""

    # number of shared experts, which process every token; they form one MLP of their summed width
    shared_experts: int = at_most(0, 2**10, least=0)
    # number of first layers that have a dense MLP of width mlp_dim instead of experts
    dense_layers: int = at_most(0, 10_000, least=0)
    # after dense_layers, every N-th layer has experts; the others have a dense MLP
    experts_every: int = at_most(1, 10_000, above=0)
    # function that turns router logits into scores: "softmax" or "sigmoid"
    router: str = choice("softmax", "softmax", "sigmoid")
    normalize_router: bool = True  # whether the weights of the experts chosen for a token are normalized to sum to 1
    router_scale: float = number(1.0, above=0)  # factor by which the weights of the chosen experts are multiplied
    expert_groups: int = at_most(1, 2**16, above=0)  # number of groups into which the experts are divided
    # number of groups that a token may choose experts from: those with the highest sum of their two best scores
    expert_groups_used: int = at_most(1, 2**16, above=0)
    # update size of the router bias that balances the load without a loss (DeepSeek-V3); 0: no bias
    router_bias_rate: float = number(0.0, least=0)

    @property
    def experts(self) -> Experts:
        """The routed experts."""
        return replace(
            super().experts, dense_layers=self.dense_layers, every=self.experts_every, shared=self.shared_experts,
            score=self.router, normalized=self.normalize_router, scale=self.router_scale, groups=self.expert_groups,
            groups_used=self.expert_groups_used, bias_rate=self.router_bias_rate)

    def _check_experts(self):
        if not self.num_experts:
            for key, none in (("shared_experts", 0), ("dense_layers", 0), ("router_bias_rate", 0), ("balance_loss", 0),
                              ("router_z_loss", 0), ("capacity_factor", 0), ("expert_groups", 1), ("experts_every", 1)):
                if getattr(self, key) != none:
                    raise UserError(f"model.{key}", "the model has no experts", f"set {key}={none}")
            return
        if self.dense_layers >= self.num_layers:
            raise UserError("model.dense_layers", f"{self.dense_layers} of {self.num_layers} layers leaves no layer "
                            "for the experts", "lower it or set model.num_experts=0")
        if (layers := self.num_layers - self.dense_layers) % self.experts_every:
            raise UserError("model.experts_every", f"{self.experts_every} does not divide the {layers} layers "
                            f"after model.dense_layers={self.dense_layers}", "choose a divisor of it")
        if self.num_experts % self.expert_groups:
            raise UserError("model.expert_groups", f"{self.expert_groups} does not divide "
                            f"model.num_experts={self.num_experts}", "choose a divisor of it")
        if self.expert_groups_used > self.expert_groups:
            raise UserError("model.expert_groups_used", f"{self.expert_groups_used} exceeds "
                            f"model.expert_groups={self.expert_groups}", f"use {self.expert_groups} or fewer")
        super()._check_experts()


@dataclass(frozen=True)
class ExpertsConfig(SparseConfig, DenseConfig):
    """Mixtral and Qwen3-MoE: mixtures of experts."""

    name: str = "mixtral"
    late_window = False


def _read(known: Keys, refuse: Refuse) -> Keys:
    window = layer_patterns.window_everywhere(known, refuse, known["sliding_window"])
    return {"window": window} | rotary("mixtral", known, refuse)


def _write(c: ExpertsConfig) -> Keys:
    return written(c) | {"intermediate_size": c.expert_mlp_dim}


def _layer(c: ExpertsConfig, experts: bool) -> list[Entry]:
    mlp = decoder_tensors.experts(c, "block_sparse_moe", ("w1", "w3", "w2")) if experts else decoder_tensors.swiglu()
    return [*decoder_tensors.ATTENTION, *decoder_tensors.NORMS, *mlp]


FAMILY = Family(
    ExpertsConfig, dense,
    tensors=decoder_tensors.decoder(_layer, own_name=renaming({r"\.mlp\.(experts|gate)\.": r".block_sparse_moe.\1."})),
    hf=(HFConfig("mixtral", "MixtralForCausalLM", COMMON | {
        "num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token"}, read=_read, write=_write),))
