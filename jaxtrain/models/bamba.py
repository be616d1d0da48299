"""Bamba: Mamba-2 in most layers, attention with rotary positions of a part of each head in the others."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from jaxtrain.config.decoder_config import PartialRotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.config.hybrids.layer_pattern import ATTENTION, PatternConfig, repeated
from jaxtrain.config.hybrids.state_space_config import MAMBA, StateSpaceConfig
from jaxtrain.hf import decoder_tensors, mamba2_format
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import partial_rotary, published_rotary
from jaxtrain.models.llama import BIAS_KEYS, BiasedConfig

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder

_PART = 0.5  # of a head that turns, whatever a file says outside of rope_parameters
WHOLE = "model.embed_tokens.weight", "model.final_layernorm.weight", "model.layers"
_NAMES = {"mlp.": "feed_forward.", "post_attention_layernorm": "pre_ff_layernorm"}


@dataclass(frozen=True)
class BambaConfig(StateSpaceConfig, PatternConfig, PartialRotaryConfig, BiasedConfig):
    """Bamba."""

    name: str = "bamba"
    layer_pattern: str = MAMBA * 9 + ATTENTION  # kinds of layers in turn: M Mamba-2, A attention
    rotary_part: float = _PART
    kinds: ClassVar = {MAMBA: "Mamba-2", ATTENTION: "attention"}


def bamba(c: BambaConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Bamba decoder."""
    from jaxtrain.models.mamba2 import mixer
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    attention = grouped_query(c, compute, qkv_bias=c.attention_bias, out_bias=c.attention_bias)
    parts = {MAMBA: mixer(c, compute), ATTENTION: attention}
    return rotary_decoder(c, compute, [parts[kind] for kind in c.layer_kinds], mlp_bias=c.mlp_bias, rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    attending = {*(known["attn_layer_indices"] or ())}
    kinds = "".join(ATTENTION if n in attending else MAMBA for n in range(known["num_hidden_layers"]))
    return {"layer_pattern": repeated(kinds)} | mamba2_format.steps(known, refuse) | mamba2_format.expanded(
        known, refuse, "mamba_expand") | partial_rotary(
        "bamba", _PART, known | {"partial_rotary_factor": _PART}, refuse)


def _write(c: BambaConfig) -> Keys:
    positions = published_rotary(c)
    scaling = (positions["rope_scaling"] or {"rope_type": "default"}) | {"partial_rotary_factor": c.rotary_part}
    return positions | {"rope_scaling": scaling} | mamba2_format.published_steps(c) | {
        "attn_layer_indices": [n for n, kind in enumerate(c.layer_kinds) if kind == ATTENTION],
        "mamba_expand": mamba2_format.expansion(c), "mamba_d_head": c.state_head_dim}


def renamed(found: list[Entry]) -> list[Entry]:
    """Return entries with the names that MLPs and their norms have here."""
    for theirs, here in _NAMES.items():
        found = [replace(entry, theirs=entry.theirs.replace(theirs, here)) for entry in found]
    return found


def _layer(c: BambaConfig, experts: bool, kind: str) -> list[Entry]:
    rest = renamed([*decoder_tensors.NORMS, *decoder_tensors.swiglu(), *decoder_tensors.biases(mlp=c.mlp_bias)])
    if kind == MAMBA:
        return [*mamba2_format.layer(c, "mamba"), *rest]
    return [*decoder_tensors.ATTENTION, *decoder_tensors.biases(c.attention_bias, c.attention_bias), *rest]


FAMILY = Family(
    BambaConfig, bamba, tensors=decoder_tensors.decoder(_layer, WHOLE),
    hf=(HFConfig("bamba", "BambaForCausalLM", COMMON | BIAS_KEYS | mamba2_format.KEYS, fixed={"hidden_act": SILU},
                 read=_read, write=_write, classifier=None),))
