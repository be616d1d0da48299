"""ERNIE 4.5 dense: Llama's blocks; rotary pairs are neighbours in published weights."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import published_rotary, rotary

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class Ernie45Config(RotaryConfig):
    """ERNIE 4.5."""

    name: str = "ernie4_5"
    use_bias: bool = False  # whether all matrices of attention and MLP have biases


def ernie4_5(c: Ernie45Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build an ERNIE 4.5 decoder."""
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    attention = grouped_query(c, compute, qkv_bias=c.use_bias, out_bias=c.use_bias)
    return rotary_decoder(c, compute, attention, mlp_bias=c.use_bias, rngs=rngs)


def paired(entries: list[Entry], width: int) -> list[Entry]:
    """Return these entries, with the pairs of queries and keys as neighbours in the tensors."""
    turning = ("attention/q/", "attention/k/")
    return [replace(entry, paired=width) if entry.ours.startswith(turning) else entry for entry in entries]


def _read(known: Keys, refuse: Refuse) -> Keys:
    return {"use_bias": bool(known["use_bias"])} | rotary("ernie4_5", known, refuse)


def _write(c: Ernie45Config) -> Keys:
    return {"use_bias": c.use_bias} | published_rotary(c)


def _layer(c: Ernie45Config, experts: bool) -> list[Entry]:
    return paired([*decoder_tensors.ATTENTION, *decoder_tensors.NORMS, *decoder_tensors.swiglu(),
                   *decoder_tensors.biases(c.use_bias, c.use_bias, c.use_bias)], c.head_dim)


FAMILY = Family(
    Ernie45Config, ernie4_5, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("ernie4_5", "Ernie4_5ForCausalLM", COMMON, fixed={"hidden_act": SILU}, read=_read, write=_write,
                 classifier=None),))
