"""Hunyuan (dense): Llama's blocks with norms of queries and keys behind their rotation.

The base of its rotary positions is stretched by a fixed `alpha`, which its files call "dynamic".
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors, defaults
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import published_rotary, rotary

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class HunyuanConfig(RotaryConfig):
    """Hunyuan."""

    name: str = "hunyuan_v1_dense"
    attention_bias: bool = False  # whether queries, keys, values and what attention returns have biases


def hunyuan(c: HunyuanConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Hunyuan decoder."""
    from jaxtrain.models.attention.norm_last import NormLastAttention
    from jaxtrain.models.layers import RMSNorm
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    attention = grouped_query(c, compute, NormLastAttention, qkv_bias=c.attention_bias, out_bias=c.attention_bias,
                              qk_norm=partial(RMSNorm, c.head_dim, c.norm_eps, axis="head_dim"))
    return rotary_decoder(c, compute, attention, rngs=rngs)


def read_rotary(kind: str, known: Keys, refuse: Refuse) -> Keys:
    """Return our keys of rotary positions, of a file that may have an `alpha`."""
    where = "rope_scaling" if known.get("rope_scaling") else "rope_parameters"
    given = known.get(where) or {}
    alpha = given.get("alpha")
    if not alpha or given.get("rope_type", given.get("type")) != "dynamic":
        return rotary(kind, known, refuse)
    if defaults.misfit(alpha, ["float"]) or alpha < 1:
        raise refuse(where, "cannot be expressed: its alpha is not a number of 1 or more")
    plain = {"rope_theta": given["rope_theta"]} if given.get("rope_theta") is not None else {}
    found = rotary(kind, known | {"rope_scaling": None, "rope_parameters": plain}, refuse)
    return found | ({"rope_type": "ntk", "rope_scaling": float(alpha)} if alpha > 1 else {})


def written_rotary(c: RotaryConfig) -> Keys:
    """Return the keys of rotary positions in a config.json, with an `alpha` where there is one."""
    if c.rope_type != "ntk":
        return published_rotary(c)
    return {"rope_theta": c.rope_theta, "rope_scaling": {"rope_type": "dynamic", "alpha": c.rope_scaling,
                                                         "factor": 1.0}}


def _write(c: HunyuanConfig) -> Keys:
    return written_rotary(c) | {"pad_token_id": None}


def _layer(c: HunyuanConfig, experts: bool) -> list[Entry]:
    norms = [Entry(f"attention/{name[0]}_norm/scale", f"self_attn.{name}_layernorm.weight")
             for name in ("query", "key")]
    return [*decoder_tensors.ATTENTION, *decoder_tensors.biases(c.attention_bias, c.attention_bias), *norms,
            *decoder_tensors.NORMS, *decoder_tensors.swiglu()]


FAMILY = Family(
    HunyuanConfig, hunyuan, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", COMMON | {"attention_bias": "attention_bias"},
                 fixed={"hidden_act": SILU}, read=partial(read_rotary, "hunyuan_v1_dense"), write=_write),))
