"""Falcon-H1: attention and Mamba-2 side by side in each layer, and a multiplier of every product (arXiv 2507.22448)."""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import choice
from jaxtrain.config.hybrids.state_space_config import StateSpaceConfig
from jaxtrain.hf import decoder_tensors, defaults, mamba2_format
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.models.bamba import WHOLE, renamed
from jaxtrain.models.llama import BIAS_KEYS, BiasedConfig

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder

# Published key -> ours, and those of lists.
MULTIPLIERS = {"embedding_multiplier": "embedding_multiplier", "lm_head_multiplier": "logit_multiplier",
               "key_multiplier": "key_multiplier", "attention_in_multiplier": "attention_in_multiplier",
               "attention_out_multiplier": "attention_out_multiplier", "ssm_in_multiplier": "state_in_multiplier",
               "ssm_out_multiplier": "state_out_multiplier"}
LISTS = {"mlp_multipliers": ("gate_multiplier", "down_multiplier"),
         "ssm_multipliers": tuple(f"state_{part}_multiplier" for part in ("gate", "x", "b", "c", "dt"))}


@dataclass(frozen=True)
class FalconH1Config(StateSpaceConfig, BiasedConfig):
    """Falcon-H1."""

    name: str = "falcon_h1"
    state_out_bias: bool = False  # whether what Mamba-2 returns has a bias
    # the norm of what a state space model returns, for each of state_groups: "after_gate", "before_gate" or "none"
    state_norm: str = choice("none", "none", "after_gate", "before_gate")
    embedding_multiplier: float = 1.0  # factor of token embeddings
    logit_multiplier: float = 1.0  # factor of logits
    key_multiplier: float = 1.0  # factor of keys
    attention_in_multiplier: float = 1.0  # factor of what attention is given
    attention_out_multiplier: float = 1.0  # factor of what attention returns
    state_in_multiplier: float = 1.0  # factor of what Mamba-2 is given
    state_out_multiplier: float = 1.0  # factor of what Mamba-2 returns
    gate_multiplier: float = 1.0  # factor of the MLP's gate
    down_multiplier: float = 1.0  # factor of what the MLP returns
    state_gate_multiplier: float = 1.0  # factor of Mamba-2's gate
    state_x_multiplier: float = 1.0  # factor of Mamba-2's inputs x
    state_b_multiplier: float = 1.0  # factor of Mamba-2's B
    state_c_multiplier: float = 1.0  # factor of Mamba-2's C
    state_dt_multiplier: float = 1.0  # factor of Mamba-2's steps dt, before their bias


def falcon_h1(c: FalconH1Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Falcon-H1 decoder."""
    from jaxtrain.models.attention.beside_states import beside
    from jaxtrain.models.layers import MultipliedEmbed
    from jaxtrain.models.mamba2 import mixer
    from jaxtrain.models.multiplied_swiglu import MultipliedSwiGLU
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    factors = (c.state_in_multiplier, c.state_gate_multiplier, c.state_x_multiplier, c.state_b_multiplier,
               c.state_c_multiplier, c.state_dt_multiplier)
    attention = grouped_query(c, compute, qkv_bias=c.attention_bias, out_bias=c.attention_bias,
                              score_factor=c.key_multiplier)
    both = beside(attention, mixer(c, compute, out_bias=c.state_out_bias, norm=c.state_norm, factors=factors),
                  given=c.attention_in_multiplier, attended=c.attention_out_multiplier, mixed=c.state_out_multiplier)
    mlp = partial(MultipliedSwiGLU, c.embed_dim, c.mlp_dim, gate_factor=c.gate_multiplier,
                  down_factor=c.down_multiplier, bias=c.mlp_bias)
    model = rotary_decoder(c, compute, both, mlp=mlp, embed=MultipliedEmbed(
        c.vocab_size, c.embed_dim, c.embedding_multiplier, rngs=rngs), rngs=rngs)
    model.logit_factor = c.logit_multiplier
    return model


def _read(known: Keys, refuse: Refuse) -> Keys:
    found = {}
    for key, ours in LISTS.items():
        given = known[key] or [1.0] * len(ours)
        if len(given) != len(ours) or any(defaults.misfit(one, ["float"]) for one in given):
            raise refuse(key, f"is not a list of {len(ours)} numbers")
        found |= dict(zip(ours, map(float, given), strict=True))
    width = {"mamba_d_ssm": known["mamba_d_ssm"] if known["mamba_d_ssm"] is not None else (
        known["mamba_expand"] * known["hidden_size"])}
    norm = "none" if not known["mamba_rms_norm"] else (
        "before_gate" if known["mamba_norm_before_gate"] else "after_gate")
    return found | {"state_norm": norm} | mamba2_format.steps(known, refuse) | mamba2_format.width_of(
        known | width, refuse, "mamba_d_ssm", width["mamba_d_ssm"]) | rotary("falcon_h1", known, refuse)


def _write(c: FalconH1Config) -> Keys:
    return published_rotary(c) | mamba2_format.published_steps(c) | {
        key: [getattr(c, name) for name in ours] for key, ours in LISTS.items()} | {
        "mamba_d_ssm": c.state_width, "mamba_d_head": c.state_head_dim, "mamba_rms_norm": c.state_norm != "none",
        "mamba_norm_before_gate": c.state_norm != "after_gate"}


def _layer(c: FalconH1Config, experts: bool) -> list[Entry]:
    states = [replace(entry, ours=entry.ours.replace("attention/", "attention/states/", 1)) for entry in
              mamba2_format.layer(c, "mamba", norm=c.state_norm != "none", out_bias=c.state_out_bias)]
    attention = [replace(entry, ours=f"attention/{entry.ours}") for entry in (
        *decoder_tensors.ATTENTION, *decoder_tensors.biases(c.attention_bias, c.attention_bias))]
    return [*attention, *states, *renamed([*decoder_tensors.NORMS, *decoder_tensors.swiglu(),
                                           *decoder_tensors.biases(mlp=c.mlp_bias)])]


FAMILY = Family(
    FalconH1Config, falcon_h1, tensors=decoder_tensors.decoder(_layer, WHOLE),
    hf=(HFConfig("falcon_h1", "FalconH1ForCausalLM", COMMON | BIAS_KEYS | MULTIPLIERS | mamba2_format.KEYS | {
        "projectors_bias": "state_out_bias"}, fixed={"hidden_act": SILU}, read=_read, write=_write,
        classifier=None),))
