"""LFM2-MoE: LFM2's layers, some dense ones, then experts chosen by biased sigmoid scores."""

from dataclasses import dataclass, replace

from jaxtrain.config.decoder_config import RoutedConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import at_most, number
from jaxtrain.config.model_config import Experts
from jaxtrain.errors import UserError
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import Entry, HFConfig, Keys, Refuse
from jaxtrain.models import lfm2
from jaxtrain.models.deepseek_v3 import BIAS_RATE


@dataclass(frozen=True)
class Lfm2MoeConfig(lfm2.ConvolutionConfig, RoutedConfig):
    """LFM2-MoE."""

    name: str = "lfm2_moe"
    num_experts: int = at_most(32, 2**16, above=0)  # mixture of experts: number of routed experts in a layer
    experts_per_token: int = at_most(4, 2**16)  # number of experts that process each token (top-k)
    # number of first layers that have a dense MLP of width mlp_dim instead of experts
    dense_layers: int = at_most(2, 10_000, least=0)
    normalize_router: bool = True  # whether the weights of the experts chosen for a token are normalized to sum to 1
    router_scale: float = number(1.0, above=0)  # factor by which the weights of the chosen experts are multiplied
    # update size of the router bias that balances the load without a loss (DeepSeek-V3); 0: no bias
    router_bias_rate: float = number(BIAS_RATE, least=0)

    @property
    def experts(self) -> Experts:
        """The routed experts."""
        return replace(super().experts, dense_layers=self.dense_layers, score="sigmoid", sum_eps=1e-6,
                       normalized=self.normalize_router, scale=self.router_scale, bias_rate=self.router_bias_rate)

    def _check_experts(self):
        if self.dense_layers >= self.num_layers:
            raise UserError("model.dense_layers", f"{self.dense_layers} of {self.num_layers} layers leaves no layer "
                            "for the experts", "lower it")
        super()._check_experts()


def _read(known: Keys, refuse: Refuse) -> Keys:
    if known["layer_types"] is None:
        raise refuse("layer_types", "does not say which layers have attention")
    dense = known["num_dense_layers"]
    if dense < 0 or dense >= known["num_hidden_layers"]:
        raise refuse("num_dense_layers", "cannot be expressed: it leaves no layer for the experts")
    if known.get("block_ff_dim") is not None:
        raise refuse("block_ff_dim", "cannot be expressed")
    return lfm2.read("lfm2_moe", known, refuse) | {
        "dense_layers": dense, "router_bias_rate": BIAS_RATE if known["use_expert_bias"] else 0.0}


def _write(c: Lfm2MoeConfig) -> Keys:
    return lfm2.write(c) | {"num_dense_layers": c.dense_layers, "use_expert_bias": c.router_bias_rate > 0}


def _layer(c: Lfm2MoeConfig, experts: bool, kind: str) -> list[Entry]:
    if not experts:
        return [*lfm2.mixer(c, kind), *lfm2.swiglu()]
    bias = [Entry("mlp/router/bias", "feed_forward.expert_bias", float32=True)] if c.router_bias_rate else []
    return [*lfm2.mixer(c, kind), Entry("mlp/router/kernel", "feed_forward.gate.weight", "ed->de"), *bias,
            *lfm2.swiglu(at="feed_forward.experts.{expert}", end="", experts=c.num_experts)]


FAMILY = Family(
    Lfm2MoeConfig, lfm2.lfm2, tensors=decoder_tensors.decoder(_layer, lfm2.WHOLE),
    hf=(HFConfig("lfm2_moe", "Lfm2MoeForCausalLM", lfm2.KEYS | {
        "num_experts": "num_experts", "num_experts_per_tok": "experts_per_token",
        "moe_intermediate_size": "expert_mlp_dim", "norm_topk_prob": "normalize_router",
        "routed_scaling_factor": "router_scale"}, fixed={}, read=_read, write=_write, classifier=None),))
