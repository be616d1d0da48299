"""Mistral 4: DeepSeek's latent attention with queries that grow over long contexts, experts by softmax scores."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import number
from jaxtrain.hf import decoder_tensors, defaults
from jaxtrain.hf.hf_format import BIASES, COMMON, Entry, HFConfig, Keys, Refuse
from jaxtrain.models.deepseek_v3 import (
    EXPERT_KEYS,
    LATENT_KEYS,
    DeepseekV3Config,
    latent_decoder,
    latent_layer,
    latents,
    written_latents,
)

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class Mistral4Config(DeepseekV3Config):
    """Mistral 4."""

    name: str = "mistral4"
    # queries are multiplied by 1 + query_temperature x log(1 + floor(position / model.rope_original_len))
    query_temperature: float = number(0.1, least=0)


def mistral4(c: Mistral4Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Mistral 4 decoder."""
    from jaxtrain.models.attention.query_temperature import Tempered
    from jaxtrain.models.attention.rotary import Rotary, scaled_frequencies

    rotary = Rotary(*scaled_frequencies(c, c.rotary_width))
    return latent_decoder(c, compute, rotary=Tempered(rotary, c.query_temperature, c.rope_original_len), rngs=rngs)


_BETA, _LENGTH, _PART = "llama_4_scaling_beta", "original_max_position_embeddings", "partial_rotary_factor"
# Where a file has no rope_parameters.
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 128.0, _LENGTH: 8192, "beta_fast": 32.0,
         "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, _BETA: 0.1}


def _read(known: Keys, refuse: Refuse) -> Keys:
    if known.get("rope_scaling"):
        raise refuse("rope_scaling", "cannot be expressed: this type has rope_parameters in its place")
    given: Keys = _YARN if known["rope_parameters"] is None else known["rope_parameters"]
    turning, width = known["qk_rope_head_dim"], known["qk_rope_head_dim"] + known["qk_nope_head_dim"]
    for key in (_BETA, _LENGTH):
        value = given.get(key)
        if value is None or defaults.misfit(value, ["float"]) or value < 0:
            raise refuse("rope_parameters", f"cannot be read: its {key} is not a number from 0 up")
    if given.get("rope_type", given.get("type")) != "yarn":
        raise refuse("rope_parameters", "cannot be expressed: its type is not yarn")
    part = given.get(_PART, turning / width)
    if defaults.misfit(part, ["float"]) or int(width * part) != turning or known.get("head_dim", width) != width:
        raise refuse("qk_rope_head_dim", "cannot be expressed: it is not the part of a head that turns")
    scaling = {key: value for key, value in given.items() if key != _PART}
    return latents("mistral4", known | {"rope_parameters": scaling}, refuse) | {
        "query_temperature": float(given[_BETA]), "rope_original_len": given[_LENGTH]}


def _write(c: Mistral4Config) -> Keys:
    found = written_latents(c) | {"head_dim": c.head_dim + c.rope_head_dim}
    scaling = found.pop("rope_scaling") or {"rope_type": "yarn", "factor": 1.0}
    return found | {"pad_token_id": None, "rope_parameters": {"rope_theta": found.pop("rope_theta")} | scaling | {
        _BETA: c.query_temperature, _LENGTH: c.rope_original_len}}


def _layer(c: Mistral4Config, experts: bool) -> list[Entry]:
    joined = decoder_tensors.joined_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    return [one for one in latent_layer(c, experts) if not one.experts] + joined * experts


FAMILY = Family(
    Mistral4Config, mistral4, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("mistral4", "Mistral4ForCausalLM", COMMON | EXPERT_KEYS | LATENT_KEYS,
                 fixed=BIASES | {"rope_interleave": (True,)}, read=_read, write=_write),))
