"""Phi-3 and Phi-4: Llama's blocks; one published matrix holds queries, keys and values (arXiv 2404.14219)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import PartialRotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors, layer_patterns
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import partial_rotary, published_partial_rotary

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder

_LONG_ROPE = ("su", "yarn")  # are longrope to transformers


@dataclass(frozen=True)
class Phi3Config(PartialRotaryConfig):
    """Phi-3 and Phi-4."""

    name: str = "phi3"


def phi3(c: Phi3Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Phi-3 decoder."""
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    return rotary_decoder(c, compute, grouped_query(c, compute), rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    if known.get("head_dim") not in (None, known["hidden_size"] // known["num_attention_heads"]):
        raise refuse("head_dim", "cannot be expressed: the rotary width of transformers does not follow from it")
    window = layer_patterns.window_everywhere(known, refuse, known["sliding_window"])
    where = "rope_scaling" if known.get("rope_scaling") else "rope_parameters"
    given = known.get(where) or {}
    if given.get("rope_type", given.get("type")) in _LONG_ROPE:
        known = known | {where: given | {"rope_type": "longrope"}}
    return {"window": window} | partial_rotary("phi3", 1.0, known, refuse)


def _write(c: Phi3Config) -> Keys:
    length = c.rope_original_len if c.rope_short_factor else c.max_seq_len
    return published_partial_rotary(c) | {"sliding_window": c.window or None, "pad_token_id": None,
                                          "original_max_position_embeddings": length}


def _layer(c: Phi3Config, experts: bool) -> list[Entry]:
    return [*decoder_tensors.fused_qkv(c), *decoder_tensors.NORMS, *decoder_tensors.fused_swiglu()]


FAMILY = Family(
    Phi3Config, phi3, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("phi3", "Phi3ForCausalLM", COMMON, fixed={"hidden_act": SILU}, read=_read, write=_write),))
