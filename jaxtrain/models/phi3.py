"""Phi-3 and Phi-4: Llama's blocks; one published matrix holds queries, keys and values (arXiv 2404.14219).

Models for long texts have LongRoPE (arXiv 2402.13753): each pair's frequency has a divisor for texts up to the original
length, and another for longer ones. `model.max_seq_len` says which count, and is the original length where a published
file is read: up to it all texts have the positions that transformers gives them.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import PartialRotaryConfig, RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import number
from jaxtrain.errors import UserError
from jaxtrain.hf import decoder_tensors, defaults, layer_patterns
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import partial_rotary, published_partial_rotary

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.attention.rotary import Rotary
    from jaxtrain.models.decoder import Compute, Decoder

_LONG_ROPE = ("longrope", "su", "yarn")  # all are the first one to transformers


@dataclass(frozen=True)
class LongRopeConfig(RotaryConfig):
    """Rotary positions that may be those of LongRoPE."""

    # LongRoPE: divisor of each pair's frequency where model.max_seq_len is at most rope_original_len; []: no LongRoPE
    rope_short_factor: list[float] = field(default_factory=list, hash=False)
    rope_long_factor: list[float] = field(default_factory=list, hash=False)  # LongRoPE: that where it is more
    rope_turn_factor: float = number(1.0, above=0)  # LongRoPE: factor of cosine and sine

    def __post_init__(self):
        super().__post_init__()
        for key in ("rope_short_factor", "rope_long_factor"):
            factors = getattr(self, key)
            if (factors or self.rope_short_factor) and (
                    len(factors) != self.rotary_width // 2 or not all(one > 0 for one in factors)):
                raise UserError(f"model.{key}", f"it does not have a positive number for each of the "
                                f"{self.rotary_width // 2} pairs that turn", "give as many, or neither of both lists")
        if self.rope_short_factor and self.rope_scaling != 1:
            raise UserError("model.rope_scaling", "LongRoPE already scales positions", "leave it out")


@dataclass(frozen=True)
class Phi3Config(LongRopeConfig, PartialRotaryConfig):
    """Phi-3 and Phi-4."""

    name: str = "phi3"


def phi3(c: Phi3Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Phi-3 decoder."""
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    return rotary_decoder(c, compute, grouped_query(c, compute), rotary=long_rope(c), rngs=rngs)


def long_rope(c: LongRopeConfig) -> "Rotary | None":
    """Return LongRoPE's positions; None: there are plain ones."""
    import numpy as np

    from jaxtrain.models.attention.rotary import Rotary, frequencies

    factors = c.rope_long_factor if c.max_seq_len > c.rope_original_len else c.rope_short_factor
    return Rotary(frequencies(c.rotary_width, c.rope_theta) / np.asarray(factors),
                  c.rope_turn_factor) if factors else None


def _read(known: Keys, refuse: Refuse) -> Keys:
    if known.get("head_dim") not in (None, known["hidden_size"] // known["num_attention_heads"]):
        raise refuse("head_dim", "cannot be expressed: the rotary width of transformers does not follow from it")
    window = layer_patterns.window_everywhere(known, refuse, known["sliding_window"])
    where = "rope_scaling" if known.get("rope_scaling") else "rope_parameters"
    given = known.get(where) or {}
    if given.get("rope_type", given.get("type")) not in _LONG_ROPE:
        return {"window": window} | partial_rotary("phi3", 1.0, known, refuse)
    plain = {key: given[key] for key in ("rope_theta", "partial_rotary_factor") if given.get(key) is not None}
    return {"window": window} | _long_rope_keys(where, given, known, refuse) | partial_rotary(
        "phi3", 1.0, known | {"rope_scaling": None, "rope_parameters": plain}, refuse)


def _long_rope_keys(where: str, given: Keys, known: Keys, refuse: Refuse) -> Keys:
    """Return our keys of LongRoPE."""
    lists = factor_lists(where, given, refuse)
    for key in ("factor", "attention_factor"):
        if given.get(key) is not None and (defaults.misfit(given[key], ["float"]) or given[key] <= 0):
            raise refuse(where, f"cannot be read: its {key} is not a positive number")
    length, longest = known["original_max_position_embeddings"], known["max_position_embeddings"]
    if length < 2:
        raise refuse("original_max_position_embeddings", "is not the length of a text")
    factor = longest / length if given.get("factor") is None else given["factor"]
    turn = given.get("attention_factor") or (math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0)
    return lists | {"rope_turn_factor": float(turn), "rope_original_len": length, "max_seq_len": min(longest, length)}


def factor_lists(where: str, given: Keys, refuse: Refuse) -> Keys:
    """Return our keys of the divisors of frequencies, which are at this key."""
    for key in ("short_factor", "long_factor"):
        if type(given.get(key)) is not list or not given[key] or any(
                defaults.misfit(one, ["float"]) for one in given[key]):
            raise refuse(where, f"cannot be read: its {key} is not a list of numbers")
    return {f"rope_{key}": [*map(float, given[key])] for key in ("short_factor", "long_factor")}


def _write(c: Phi3Config) -> Keys:
    found = published_partial_rotary(c) | {
        "sliding_window": c.window or None, "original_max_position_embeddings": c.max_seq_len, "pad_token_id": None}
    if not c.rope_short_factor:
        return found
    return found | {"original_max_position_embeddings": c.rope_original_len, "rope_scaling": {
        "rope_type": "longrope", "short_factor": c.rope_short_factor, "long_factor": c.rope_long_factor,
        "attention_factor": c.rope_turn_factor}}


def _layer(c: Phi3Config, experts: bool) -> list[Entry]:
    return [*decoder_tensors.fused_qkv(c), *decoder_tensors.NORMS, *decoder_tensors.fused_swiglu()]


FAMILY = Family(
    Phi3Config, phi3, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("phi3", "Phi3ForCausalLM", COMMON, fixed={"hidden_act": SILU}, read=_read, write=_write,
                 unpublished=("max_seq_len",)),))
