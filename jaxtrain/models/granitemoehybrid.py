"""Granite 4: Granite's multipliers around Mamba-2 or attention, and experts or a dense MLP."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import at_most
from jaxtrain.config.hybrids.layer_pattern import ATTENTION, PatternConfig
from jaxtrain.config.hybrids.state_space_config import MAMBA, StateSpaceConfig
from jaxtrain.config.model_config import Experts
from jaxtrain.errors import UserError
from jaxtrain.hf import decoder_tensors, mamba2_format
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.layer_patterns import FULL, LINEAR, pattern, published_pattern
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.models.granite import MULTIPLIERS, multiplied, multiplied_attention
from jaxtrain.models.granitemoe import EXPERTS, GraniteMoeConfig, own_name, shared

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder

LETTERS = {LINEAR: MAMBA, FULL: ATTENTION}


@dataclass(frozen=True)
class GraniteMoeHybridConfig(StateSpaceConfig, PatternConfig, GraniteMoeConfig):
    """Granite 4."""

    name: str = "granitemoehybrid"
    layer_pattern: str = MAMBA * 5 + ATTENTION + MAMBA * 4  # kinds of layers in turn: M Mamba-2, A attention
    # mixture of experts: number of routed experts in a layer; 0: a dense MLP of shared_mlp_dim
    num_experts: int = at_most(8, 2**16, above=None, least=0)
    shared_mlp_dim: int = at_most(1024, 2**22, above=0)  # width of the MLP of shared experts, or of the dense one
    turning: bool = False  # whether attention has rotary positions
    kinds: ClassVar = {MAMBA: "Mamba-2", ATTENTION: "attention"}

    @property
    def experts(self) -> Experts:
        """The routed experts."""
        return super().experts if self.num_experts else Experts()

    @property
    def rotary_width(self) -> int:
        """The width of the part of a head that turns with its position; 0: none does."""
        return self.head_dim if self.turning else 0

    def _check_scaling(self):
        if not self.turning and self.rope_scaling != 1:
            raise UserError("model.rope_scaling", "attention has no rotary positions", "set model.turning, or leave it "
                            "out")
        super()._check_scaling()


def granitemoehybrid(c: GraniteMoeHybridConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Granite 4 decoder."""
    from jaxtrain.models.layers import SwiGLU
    from jaxtrain.models.mamba2 import mixer

    def mlp(out_std: float, rngs: "nnx.Rngs") -> "nnx.Module":
        return SwiGLU(c.embed_dim, c.shared_mlp_dim, out_std=out_std, rngs=rngs)

    parts = {MAMBA: mixer(c, compute), ATTENTION: multiplied_attention(c, compute)}
    return multiplied(c, compute, [parts[kind] for kind in c.layer_kinds], mlp=mlp, rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    if known["layer_types"] is None:
        known = known | {"layer_types": [LINEAR] * known["num_hidden_layers"]}
    found = pattern(known, refuse, LETTERS) | mamba2_format.steps(known, refuse)
    found |= mamba2_format.expanded(known, refuse, "mamba_expand")
    found |= {"turning": True} | rotary("granitemoehybrid", known, refuse) if (
        known["position_embedding_type"] == "rope") else {"turning": False}
    return found | _experts_read(known, refuse)


def _experts_read(known: Keys, refuse: Refuse) -> Keys:
    """Return the keys of experts, of which files of dense models say that there are 0."""
    count, chosen = known["num_local_experts"], known["num_experts_per_tok"]
    if count is None or count < 0:
        raise refuse("num_local_experts", "is not a number of experts")
    if count and (chosen is None or chosen < 1):
        raise refuse("num_experts_per_tok", "is not a number of experts")
    return {"num_experts": count} | ({"experts_per_token": chosen} if count else {})


def _write(c: GraniteMoeHybridConfig) -> Keys:
    return published_rotary(c) | mamba2_format.published_steps(c) | {
        "layer_types": published_pattern(c.layer_kinds, LETTERS), "mamba_expand": mamba2_format.expansion(c),
        "mamba_d_head": c.state_head_dim, "position_embedding_type": "rope" if c.turning else None,
        "num_local_experts": c.num_experts, "num_experts_per_tok": c.experts_per_token}


def _layer(c: GraniteMoeHybridConfig, experts: bool, kind: str) -> list[Entry]:
    attention = [*decoder_tensors.ATTENTION, *decoder_tensors.biases(c.attention_bias, c.attention_bias)]
    return [*(attention if kind == ATTENTION else mamba2_format.layer(c, "mamba")), *decoder_tensors.NORMS,
            *([*EXPERTS, *shared()] if experts else shared("mlp"))]


FAMILY = Family(
    GraniteMoeHybridConfig, granitemoehybrid, tensors=decoder_tensors.decoder(
        _layer, own_name=own_name),
    hf=(HFConfig("granitemoehybrid", "GraniteMoeHybridForCausalLM",
                 COMMON | mamba2_format.KEYS | {key: key for key in ("attention_bias", *MULTIPLIERS)} | {
                     "intermediate_size": "expert_mlp_dim", "shared_intermediate_size": "shared_mlp_dim"},
                 fixed={"hidden_act": SILU}, read=_read, write=_write, classifier=None),))
