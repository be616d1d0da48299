"""Llama 4: attention within chunks by turns with attention without positions, and experts of weighted inputs.

https://github.com/meta-llama/llama-models/tree/main/models/llama4
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import RoutedConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import at_most, number
from jaxtrain.config.model_config import Experts
from jaxtrain.errors import UserError
from jaxtrain.hf import decoder_tensors, layer_patterns
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.models.ernie4_5 import paired

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class Llama4Config(RoutedConfig):
    """Llama 4: a mixture of experts with a shared one of the same width."""

    name: str = "llama4"
    # chunk of the text within which tokens attend in layers with rotary positions; 0: they attend to all of it
    window: int = number(8192, least=0)
    no_rope_every: int = at_most(4, 10_000, least=0)  # every N-th layer has no positions and no chunks; 0: none
    use_qk_norm: bool = True  # whether queries and keys are normalised where they turn
    # in layers without positions, queries are multiplied by
    # 1 + query_temperature x log(1 + floor((position + 1) / query_temperature_len))
    query_temperature: float = number(0.1, least=0)
    query_temperature_len: int = number(8192, above=0)  # tokens after which that factor of queries grows
    rope_theta: float = number(500_000.0, above=0)  # base frequency of the rotary position embedding (RoPE)
    num_experts: int = at_most(16, 2**16, above=0)  # mixture of experts: number of routed experts in a layer
    experts_per_token: int = at_most(1, 2**16, above=0)  # number of experts that process each token (top-k)
    experts_every: int = at_most(1, 10_000, above=0)  # every N-th layer has experts; the others have a dense MLP
    attention_bias: bool = False  # whether queries, keys, values and what attention returns have biases
    chunked = True

    def __post_init__(self):
        super().__post_init__()
        if self.num_layers % self.experts_every:
            raise UserError("model.experts_every", f"{self.experts_every} does not divide model.num_layers="
                            f"{self.num_layers}", "choose a divisor of it")

    @property
    def experts(self) -> Experts:
        """The routed experts."""
        return replace(super().experts, every=self.experts_every, shared=1, score="sigmoid", normalized=False,
                       weighted_inputs=True)

    @property
    def period(self) -> int:
        """The number of layers after which kinds of layers repeat; all, where the last ones would be too few."""
        found = math.lcm(self.experts_every, self.no_rope_every or 1)
        return found if self.num_layers % found == 0 else self.num_layers

    @property
    def global_layers(self) -> int:
        """The number of layers without chunks where the others have them."""
        return self.num_layers // self.no_rope_every if self.window and self.no_rope_every else 0


def llama4(c: Llama4Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Llama 4 decoder."""
    from jaxtrain.models.attention.by_layer.chunked_attention import ChunkedAttention, ChunkPositions
    from jaxtrain.models.attention.rotary import Rotary, scaled_frequencies
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    turning, still = (grouped_query(c, compute, partial(ChunkedAttention, turns=turns), qkv_bias=c.attention_bias,
                                    out_bias=c.attention_bias, norm_eps=c.norm_eps if c.use_qk_norm else 0.0)
                      for turns in (True, False))
    rotary = ChunkPositions(Rotary(*scaled_frequencies(c, c.head_dim)), c.query_temperature,
                            c.query_temperature_len, ahead=1)
    attention = [turning if turns else still for turns in _turning(c.no_rope_every, c.num_layers)]
    return rotary_decoder(c, compute, attention, rotary=rotary, rngs=rngs)


def _turning(no_rope_every: int, layers: int) -> list[int]:
    """Return for each layer 1 if it has rotary positions, and else 0."""
    return [int(no_rope_every == 0 or (n + 1) % no_rope_every != 0) for n in range(layers)]


def _kinds(turning: list[int], chunk: int | None) -> list[str]:
    return ["chunked_attention" if turns and chunk else layer_patterns.FULL for turns in turning]


def _read(known: Keys, refuse: Refuse) -> Keys:
    count, chunk, step = known["num_hidden_layers"], known["attention_chunk_size"], known["interleave_moe_layer_step"]
    if chunk is not None and chunk < 1:
        raise refuse("attention_chunk_size", "is not a size that a chunk has")
    every = known["no_rope_layer_interval"]
    if (turning := known["no_rope_layers"] or []) == []:
        if every < 1:
            raise refuse("no_rope_layer_interval", "is not positive")
    else:
        every = turning.index(0) + 1 if 0 in turning else 0
        if turning != _turning(every, count):
            raise refuse("no_rope_layers", "cannot be expressed: only every N-th layer can be without positions")
    if known["layer_types"] not in (None, _kinds(_turning(every, count), chunk)):
        raise refuse("layer_types", "cannot be expressed: layers with rotary positions have chunks, and no others")
    if step < 1:
        raise refuse("interleave_moe_layer_step", "is not positive")
    there = {*(range(step - 1, count, step) if known["moe_layers"] is None else known["moe_layers"])}
    key = "interleave_moe_layer_step" if known["moe_layers"] is None else "moe_layers"
    first, step = layer_patterns.sparse_layers([n in there for n in range(count)], key, refuse, step)
    if first:
        raise refuse(key, "cannot be expressed: every N-th layer has experts, from the first ones on")
    tuned = known["attn_scale"] if known["attn_temperature_tuning"] else 0.0
    return {"window": chunk or 0, "no_rope_every": every, "experts_every": step,
            "query_temperature": float(tuned)} | rotary("llama4_text", known, refuse)


def _write(c: Llama4Config) -> Keys:
    turning = _turning(c.no_rope_every, c.num_layers)
    return published_rotary(c) | {
        "attention_chunk_size": c.window or None, "no_rope_layers": turning,
        "layer_types": _kinds(turning, c.window), "interleave_moe_layer_step": c.experts_every,
        "attn_scale": c.query_temperature, "attn_temperature_tuning": c.query_temperature > 0}


def _layer(c: Llama4Config, experts: bool) -> list[Entry]:
    routed = [Entry("mlp/router/kernel", "feed_forward.router.weight", "ed->de"), *decoder_tensors.joined_experts(
        "feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj", ("ed(pf)->edf", "efd->efd")),
        *decoder_tensors.swiglu("mlp/shared", "feed_forward.shared_expert")]
    return paired([*decoder_tensors.ATTENTION, *decoder_tensors.biases(c.attention_bias, c.attention_bias),
                   *decoder_tensors.NORMS, *(routed if experts else decoder_tensors.swiglu("mlp", "feed_forward"))],
                  c.head_dim)


FAMILY = Family(
    Llama4Config, llama4, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("llama4_text", "Llama4ForCausalLM", COMMON | {
        "intermediate_size": "expert_mlp_dim", "intermediate_size_mlp": "mlp_dim", "num_local_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token", "use_qk_norm": "use_qk_norm", "attention_bias": "attention_bias",
        "floor_scale": "query_temperature_len"},
        fixed={"hidden_act": SILU}, read=_read, write=_write, nested="llama4", classifier=None),))
