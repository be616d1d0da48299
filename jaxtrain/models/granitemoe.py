"""Granite's mixtures of experts: its multipliers, experts in every layer, and shared ones in some models."""

from dataclasses import dataclass, replace
from functools import partial

from jaxtrain.config.decoder_config import RoutedConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import at_most
from jaxtrain.config.model_config import Experts
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, renaming
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.models.granite import MULTIPLIERS, MultipliedConfig, multiplied


@dataclass(frozen=True)
class GraniteMoeConfig(RoutedConfig, MultipliedConfig):
    """Granite's mixtures of experts."""

    name: str = "granitemoe"
    num_experts: int = at_most(8, 2**16, above=0)  # number of routed experts in a layer
    shared_mlp_dim: int = at_most(0, 2**22, least=0)  # width of the MLP of shared experts; 0: there are none

    @property
    def experts(self) -> Experts:
        """The routed experts."""
        return replace(super().experts, shared_mlp_dim=self.shared_mlp_dim)


# The tensors have all experts; the gates are before the matrices beside them.
EXPERTS = [Entry("mlp/router/kernel", "block_sparse_moe.router.layer.weight", "ed->de"),
           *decoder_tensors.joined_experts("block_sparse_moe.input_linear.weight",
                                           "block_sparse_moe.output_linear.weight")]


own_name = renaming({r"block_sparse_moe\.experts\.gate_up_proj$": "block_sparse_moe.input_linear.weight",
                     r"block_sparse_moe\.experts\.down_proj$": "block_sparse_moe.output_linear.weight",
                     r"block_sparse_moe\.router\.weight$": "block_sparse_moe.router.layer.weight"})


def shared(ours: str = "mlp/shared") -> list[Entry]:
    """Return the entries of the MLP of shared experts."""
    return [*(Entry(f"{ours}/{name}/kernel", "shared_mlp.input_linear.weight", "(pf)d->df", (n, 2))
              for n, name in enumerate(("gate", "up"))),
            Entry(f"{ours}/down/kernel", "shared_mlp.output_linear.weight", "df->fd")]


def _layer(c: GraniteMoeConfig, experts: bool) -> list[Entry]:
    return [*decoder_tensors.ATTENTION, *decoder_tensors.biases(c.attention_bias, c.attention_bias),
            *decoder_tensors.NORMS, *EXPERTS, *(shared() if c.shared_mlp_dim else [])]


_KEYS = COMMON | {key: key for key in ("attention_bias", *MULTIPLIERS)} | {
    "num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token",
    "intermediate_size": "expert_mlp_dim"}
FAMILY = Family(
    GraniteMoeConfig, multiplied, tensors=decoder_tensors.decoder(_layer, own_name=own_name),
    hf=(HFConfig("granitemoe", "GraniteMoeForCausalLM", _KEYS, fixed={"hidden_act": SILU},
                 read=partial(rotary, "granitemoe"), write=published_rotary, classifier=None,
                 describes=lambda c: not c.shared_mlp_dim),
        HFConfig("granitemoeshared", "GraniteMoeSharedForCausalLM",
                 _KEYS | {"shared_intermediate_size": "shared_mlp_dim"}, fixed={"hidden_act": SILU},
                 read=partial(rotary, "granitemoeshared"), write=published_rotary, classifier=None)))
