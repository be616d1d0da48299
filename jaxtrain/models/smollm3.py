"""SmolLM3: Llama's blocks, of which every few one has no positions (https://huggingface.co/blog/smollm3)."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import at_most
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, NO, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.layer_patterns import SLIDING, listed
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.models.llama import BIAS_KEYS, BiasedConfig

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class SmolLM3Config(BiasedConfig):
    """SmolLM3."""

    name: str = "smollm3"
    # every N-th layer has no rotary positions; 0: all layers have them
    no_rope_every: int = at_most(4, 10_000, least=0)


def smollm3(c: SmolLM3Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a SmolLM3 decoder."""
    from jaxtrain.models.attention.by_layer.layers_without_rope import AttentionWithoutRope
    from jaxtrain.models.attention.self_attention import Attention
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    kind = partial(AttentionWithoutRope, c.no_rope_every) if c.no_rope_every else Attention
    attention = grouped_query(c, compute, kind, qkv_bias=c.attention_bias, out_bias=c.attention_bias)
    return rotary_decoder(c, compute, attention, mlp_bias=c.mlp_bias, rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    if known["layer_types"] is not None and SLIDING in listed(known, refuse):
        raise refuse("layer_types", "cannot be expressed: no layer has a window")  # use_sliding_window changes nothing
    return {"no_rope_every": _every(known, refuse)} | rotary("smollm3", known, refuse)


def _every(known: Keys, refuse: Refuse) -> int:
    """Return every how many layers one has no positions."""
    count, listed = known["num_hidden_layers"], known["no_rope_layers"]
    if listed is None:
        every = known["no_rope_layer_interval"]
        if every < 1:
            raise refuse("no_rope_layer_interval", "is not positive")
        return every
    if len(listed) < count:
        raise refuse("no_rope_layers", f"does not have one for each of num_hidden_layers={count}")
    turn = [bool(one) for one in listed[:count]]
    every = turn.index(False) + 1 if False in turn else 0
    if turn != [not every or (n + 1) % every != 0 for n in range(count)]:
        raise refuse("no_rope_layers", "cannot be expressed: only every N-th layer can be without positions")
    return every


def _write(c: SmolLM3Config) -> Keys:
    return published_rotary(c) | {
        "no_rope_layers": [int(not c.no_rope_every or (n + 1) % c.no_rope_every != 0) for n in range(c.num_layers)],
        "layer_types": ["full_attention"] * c.num_layers, "pad_token_id": None}


def _layer(c: SmolLM3Config, experts: bool) -> list[Entry]:
    return [*decoder_tensors.ATTENTION, *decoder_tensors.NORMS, *decoder_tensors.swiglu(),
            *decoder_tensors.biases(c.attention_bias, c.attention_bias, c.mlp_bias)]


FAMILY = Family(
    SmolLM3Config, smollm3, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("smollm3", "SmolLM3ForCausalLM", COMMON | BIAS_KEYS,
                 fixed={"hidden_act": SILU, "use_sliding_window": NO}, read=_read, write=_write),))
