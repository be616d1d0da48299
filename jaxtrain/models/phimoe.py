"""Phi-3.5-MoE: LayerNorm, biases, two experts of a token that SparseMixer-v2 chooses (arXiv 2404.14219, 2409.12136).

LongRoPE is as in Phi-3, but for the factor of cosine and sine, which a file gives for short texts and for long ones.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import RoutedConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import number
from jaxtrain.config.model_config import Experts
from jaxtrain.errors import UserError
from jaxtrain.hf import decoder_tensors, defaults
from jaxtrain.hf.decoder_tensors import pair
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys, Refuse, renaming
from jaxtrain.hf.layer_patterns import window_everywhere
from jaxtrain.hf.rotary_keys import published_rotary, rotary

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class PhimoeConfig(RoutedConfig):
    """Phi-3.5-MoE."""

    name: str = "phimoe"
    tied_embeddings: bool = False
    attention_bias: bool = False  # whether queries, keys, values and what attention returns have biases
    # pyrefly: ignore[bad-override]
    head_bias: bool = False  # whether the output projection has a bias
    # which experts a token weighs against a chosen one: those whose logits are below by twice this part of the larger
    router_jitter: float = number(0.01, least=0)

    def __post_init__(self):
        super().__post_init__()
        if self.head_bias and self.tied_embeddings:
            raise UserError("model.head_bias", "the output projection is the embedding table, which has no bias",
                            "leave one of head_bias and tied_embeddings out")

    @property
    def experts(self) -> Experts:
        """The routed experts."""
        return replace(super().experts, score="sparse_mixer", normalized=False, jitter=self.router_jitter)


def phimoe(c: PhimoeConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Phi-3.5-MoE decoder."""
    from jaxtrain.models.layers import LayerNorm
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    attention = grouped_query(c, compute, qkv_bias=c.attention_bias, out_bias=c.attention_bias)
    return rotary_decoder(c, compute, attention, norm=LayerNorm, rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    window = window_everywhere(known, refuse, known["sliding_window"])
    where = "rope_scaling" if known.get("rope_scaling") else "rope_parameters"
    given = known.get(where) or {}
    way = given.get("rope_type", given.get("type", "default"))
    if way not in ("default", "longrope"):
        raise refuse(where, "cannot be expressed: its type is not default or longrope")
    if way == "longrope":
        known = known | _one_turn_factor(where, given, known, refuse)
    return {"window": window} | rotary("phimoe", known, refuse)


def _one_turn_factor(where: str, given: Keys, known: Keys, refuse: Refuse) -> Keys:
    """Return keys of LongRoPE as other types have them."""
    turn, turn_of_long = given.get("short_mscale"), given.get("long_mscale")
    if defaults.misfit(turn, ["float"]) or turn is None or turn <= 0:
        raise refuse(where, "cannot be read: its short_mscale is not a positive number")
    if turn != turn_of_long:
        raise refuse(where, "cannot be expressed: its long_mscale is not its short_mscale")
    key = "original_max_position_embeddings"
    mixed = known.get("rope_scaling") and known.get("rope_parameters")  # transformers takes it from either then
    length = given.get(key, None if mixed else known.get(key))
    if defaults.misfit(length, ["int"]) or length is None:
        raise refuse(where, f"cannot be read: its {key} is not the length of a text")
    return {where: given | {"attention_factor": turn}, key: length}


def _write(c: PhimoeConfig) -> Keys:
    found = published_rotary(c) | {"sliding_window": c.window or None, "intermediate_size": c.expert_mlp_dim}
    if c.rope_short_factor:
        turn = found["rope_scaling"].pop("attention_factor")
        found["rope_scaling"] |= {"short_mscale": turn, "long_mscale": turn}
    return found


def _layer(c: PhimoeConfig, experts: bool) -> list[Entry]:
    mlp = decoder_tensors.experts(c, "block_sparse_moe", ("w1", "w3", "w2")) if experts else decoder_tensors.swiglu()
    return [*decoder_tensors.ATTENTION, *decoder_tensors.biases(c.attention_bias, c.attention_bias), *mlp,
            *pair("attention_norm", "input_layernorm"), *pair("mlp_norm", "post_attention_layernorm")]


FAMILY = Family(
    PhimoeConfig, phimoe, tensors=decoder_tensors.decoder(_layer, norm=pair("norm", "model.norm"), own_name=renaming({
        r"\.mlp\.experts\.": ".block_sparse_moe.experts.", r"\.mlp\.router\.": ".block_sparse_moe.gate."})),
    hf=(HFConfig("phimoe", "PhimoeForCausalLM", COMMON | {
        "num_local_experts": "num_experts", "attention_bias": "attention_bias", "lm_head_bias": "head_bias",
        "router_jitter_noise": "router_jitter"},
        fixed={"hidden_act": SILU, "num_experts_per_tok": (2,)}, read=_read, write=_write,
        unpublished=("max_seq_len",)),))
