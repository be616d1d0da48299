"""Ministral 3: Mistral with queries that grow with their position, and YaRN (arXiv 2601.08584)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import number
from jaxtrain.hf import decoder_tensors, defaults
from jaxtrain.hf.hf_format import COMMON, SILU, HFConfig, Keys, Refuse
from jaxtrain.hf.layer_patterns import window_everywhere
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.models.llama import layer

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder

_BETA, _LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"
_USUAL = {"type": "yarn", "rope_theta": 1e6, "factor": 16.0, _LENGTH: 16384, "beta_fast": 32.0, "beta_slow": 1.0,
          "mscale_all_dim": 1.0, "mscale": 1.0, _BETA: 0.1}


@dataclass(frozen=True)
class Ministral3Config(RotaryConfig):
    """Ministral 3."""

    name: str = "ministral3"
    query_beta: float = 0.1  # queries are multiplied by 1 + query_beta x ln(1 + position // query_len)
    query_len: int = number(16384, above=0)  # length in tokens after which the factor of queries grows, again and again


def ministral3(c: Ministral3Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Ministral 3 decoder."""
    from jaxtrain.models.attention.query_temperature import Tempered, TemperedAttention
    from jaxtrain.models.attention.rotary import Rotary, scaled_frequencies
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    turns = Tempered(Rotary(*scaled_frequencies(c, c.head_dim)), c.query_beta, c.query_len)
    return rotary_decoder(c, compute, grouped_query(c, compute, TemperedAttention), rotary=turns, rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    where = "rope_scaling" if known.get("rope_scaling") else "rope_parameters"
    given = known.get(where)
    given = _USUAL if given is None else given
    found = rotary("ministral3", known, refuse, _USUAL)
    scaled = given.get("rope_type", given.get("type")) in ("llama3", "yarn")  # whose length may be said elsewhere
    length = (known.get(_LENGTH) if scaled else None) or given.get(_LENGTH, found.get("rope_original_len"))
    for key, value, kind in ((_BETA, given.get(_BETA), "float"), (_LENGTH, length, "int")):
        if defaults.misfit(value, [kind]):
            raise refuse(where, f"cannot be read: its {key} is not a number, which the factor of queries is made of")
    return {"window": window_everywhere(known, refuse, known["sliding_window"]), "query_beta": float(given[_BETA]),
            "query_len": length} | found


def _write(c: Ministral3Config) -> Keys:
    turns = published_rotary(c)
    return {"sliding_window": c.window or None, "pad_token_id": None, "rope_parameters": {
        "rope_type": "default", "rope_theta": turns["rope_theta"], _LENGTH: c.query_len} | (
            turns["rope_scaling"] or {}) | {_BETA: c.query_beta}}


FAMILY = Family(
    Ministral3Config, ministral3, tensors=decoder_tensors.decoder(layer),
    hf=(HFConfig("ministral3", "Ministral3ForCausalLM", COMMON, fixed={"hidden_act": SILU}, read=_read, write=_write,
                 nested="mistral3"),))
