"""Gemma 4: local layers, and global ones with heads of their own (https://ai.google.dev/gemma/docs/core).

Values are normalised as queries and keys are, and in global layers they may be the keys. Layers may have an input of
their own besides the activation, the last ones may read keys and values of earlier layers, and experts may stand beside
the MLP.
"""

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from jaxtrain.config.decoder_config import RoutedDecoderConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import at_most, derive, number
from jaxtrain.config.hybrids.layer_pattern import PatternConfig
from jaxtrain.config.model_config import Experts
from jaxtrain.errors import UserError
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.gemma4_keys import GLOBAL, LOCAL, read, write
from jaxtrain.hf.hf_format import COMMON, Entry, HFConfig, HFTensors

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.attention.rotary import Rotary
    from jaxtrain.models.decoder import Compute, Decoder
    from jaxtrain.models.rotary_decoder import Part


@dataclass(frozen=True)
class Gemma4Config(PatternConfig, RoutedDecoderConfig):
    """Gemma 4."""

    name: str = "gemma4"
    layer_pattern: str = LOCAL * 5 + GLOBAL  # kinds of layers in turn: L local, G global; the last layer is global
    window: int = number(512, above=0)  # sliding window of the local layers, in tokens
    global_head_dim: int = at_most(0, 2**16, least=0)  # width of one attention head in global layers; 0: head_dim
    global_kv_heads: int = at_most(0, 2**16, least=0)  # key and value heads in global layers; 0: num_kv_heads
    keys_are_values: bool = False  # whether values are the projected keys in global layers
    rope_theta: float = number(1_000_000.0, above=0)  # base frequency of the rotary positions in the global layers
    local_rope_theta: float = number(10_000.0, above=0)  # base frequency of the rotary positions in the local layers
    rotary_part: float = number(0.25, least=0)  # part of the pairs of a head that turn in global layers: the fastest
    rope_factor: float = number(1.0, above=0)  # divisor of positions in the global layers
    attention_bias: bool = False  # whether queries, keys, values and what attention returns have biases
    logit_cap: float = number(0.0, least=0)  # logits become cap x tanh(logit / cap); 0: they stay
    # number of layers, the last ones, that attend to the keys and values of the last layer of their kind before them
    shared_kv_layers: int = at_most(0, 10_000, least=0)
    double_wide_mlp: bool = False  # whether the MLP of those layers is twice as wide
    per_layer_dim: int = at_most(0, 2**20, least=0)  # width of the input that each layer has of its own; 0: none
    per_layer_vocab: int = at_most(0, 2**24, least=0)  # size of the embedding table of these inputs; 0: vocab_size
    norm_eps: float = 1e-6
    scaled_embeddings = True
    kinds: ClassVar = {LOCAL: "local attention", GLOBAL: "global attention"}

    def __post_init__(self):
        super().__post_init__()
        derive(self, "global_head_dim", self.head_dim)
        derive(self, "global_kv_heads", self.num_kv_heads)
        if self.per_layer_dim:
            derive(self, "per_layer_vocab", self.vocab_size)
        if self.num_heads % self.global_kv_heads:
            raise UserError("model.global_kv_heads", f"{self.global_kv_heads} does not divide model.num_heads="
                            f"{self.num_heads}", "choose a divisor of it")
        if self.global_head_dim % 2:
            raise UserError("model.global_head_dim", f"{self.global_head_dim} is odd", "rotary positions need an even "
                            "one")
        if self.rotary_part > 1:
            raise UserError("model.rotary_part", f"{self.rotary_part} is not a part of a head", "give 0 to 1")
        own = self.layer_kinds[:self.own_kv_layers]
        if {*own} != {*self.layer_kinds.upper()}:
            raise UserError("model.shared_kv_layers", f"{self.shared_kv_layers} of {self.num_layers} layers leave no "
                            "layer of each kind with keys of its own", "give fewer")
        if self.per_layer_dim and self.per_layer_vocab < self.vocab_size:
            raise UserError("model.per_layer_vocab", f"{self.per_layer_vocab} is less than model.vocab_size="
                            f"{self.vocab_size}", "give as many, or more")

    @property
    def own_kv_layers(self) -> int:
        """The number of layers with keys and values of their own: the first ones."""
        return max(self.num_layers - self.shared_kv_layers, 0)

    @property
    def layer_kinds(self) -> str:
        """The letter of each layer, a small one if it reads the keys and values of another."""
        kinds = super().layer_kinds[:-1] + GLOBAL
        return kinds[:self.own_kv_layers] + kinds[self.own_kv_layers:].lower()

    @property
    def period(self) -> int:
        """The number of layers after which kinds repeat; all, where each layer has an input of its own."""
        return self.num_layers if self.per_layer_dim else super().period

    @property
    def windows(self) -> dict[int, int]:
        """The number of layers for each attention window; 0: none."""
        kinds = self.layer_kinds.upper()
        return {width: many for width, many in ((self.window, kinds.count(LOCAL)), (0, kinds.count(GLOBAL))) if many}

    @property
    def attention_widths(self) -> dict[int, int]:  # pyrefly: ignore[bad-override]
        """The widths of a query and of a value in one head, together, of the layers with each window."""
        return {self.window: 2 * self.head_dim, 0: 2 * self.global_head_dim}

    def attentions(self, seq_len: int) -> list[tuple[int, int, int, bool]]:
        """Return what kernels compute in layers of each kind."""
        return [(seq_len, 0, width, True) for width in (self.head_dim, self.global_head_dim)]

    @property
    def experts(self) -> Experts:
        """The routed experts, of which the dense MLP is a shared one."""
        return replace(super().experts, shared_mlp_dim=self.mlp_dim) if self.num_experts else Experts()

    @property
    def fixed(self) -> tuple[str, ...]:  # pyrefly: ignore[bad-override]
        """The paths of the factors of layers, which come with published models."""
        layers = [""] if self.period == 1 else [f"layer_{n}/" for n in range(self.period)]
        return tuple(f"blocks/layer/{layer}factor" for layer in layers)

    @property
    def lookups(self) -> dict[str, str]:  # pyrefly: ignore[bad-override]
        """The keys with the rows of tables that no token is multiplied by, by path."""
        return {"inputs/embed/table": "per_layer_vocab"} if self.per_layer_dim else {}


def gemma4(c: Gemma4Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Gemma 4 decoder."""
    from jaxtrain.models.attention.normed_values import KindsOfRotary
    from jaxtrain.models.experts.normed_moe import NormedMoE
    from jaxtrain.models.per_layer_inputs import LayerInput, PerLayerDecoder, PerLayerInputs
    from jaxtrain.models.rotary_decoder import rotary_decoder
    from jaxtrain.models.sandwich_layers import GeGLU, scaled_embed
    from jaxtrain.models.scaled_layer import ScaledLayer

    experts = partial(NormedMoE, c, options=compute.experts) if c.num_experts else None
    widths = [c.mlp_dim * (2 if kind.islower() and c.double_wide_mlp else 1) for kind in c.layer_kinds]
    inputs = PerLayerInputs(c.per_layer_vocab, c.num_layers, c.per_layer_dim, c.embed_dim, c.norm_eps,
                            rngs=rngs) if c.per_layer_dim else None
    model = rotary_decoder(
        c, compute, [_attention(c, compute, n) for n in range(c.num_layers)], block=ScaledLayer,
        mlp=[partial(GeGLU, c.embed_dim, width) for width in widths], experts=experts,
        embed=scaled_embed(c.vocab_size, c.embed_dim, rngs=rngs), rotary=KindsOfRotary(rotaries(c)),
        decoder=partial(PerLayerDecoder, inputs=inputs),
        beside=[partial(LayerInput, n, c.embed_dim, c.per_layer_dim, c.norm_eps) for n in range(c.num_layers)]
        if c.per_layer_dim else [], rngs=rngs)
    model.logit_cap = c.logit_cap
    return model


def rotaries(c: Gemma4Config) -> "dict[str, Rotary]":
    """Return the rotary positions of each kind of layers; in global ones the slowest pairs do not turn at all."""
    import numpy as np

    from jaxtrain.models.attention.rotary import Rotary, frequencies

    far, turning = frequencies(c.global_head_dim, c.rope_theta), int(c.rotary_part * c.global_head_dim // 2)
    return {LOCAL: Rotary(frequencies(c.head_dim, c.local_rope_theta)),
            GLOBAL: Rotary(np.where(np.arange(len(far)) < turning, far, 0) / c.rope_factor)}


def _attention(c: Gemma4Config, compute: "Compute", layer: int) -> "Part":
    """Return what makes the attention of a layer."""
    from jaxtrain.models.attention.normed_values import NormedValueAttention

    kind, own = c.layer_kinds[layer], c.layer_kinds[:c.own_kv_layers]
    everywhere = kind.upper() == GLOBAL
    kv_heads, width = (c.global_kv_heads, c.global_head_dim) if everywhere else (c.num_kv_heads, c.head_dim)
    return partial(
        NormedValueAttention, kind.upper(), c.embed_dim, c.num_heads, kv_heads, width, c.norm_eps,
        window=0 if everywhere else c.window, bias=c.attention_bias, reads=kind.islower(),
        keys_are_values=c.keys_are_values and everywhere,
        passes_on=c.shared_kv_layers > 0 and own.rfind(kind) == layer, backend=compute.attention,
        context=compute.context)


def _layer(c: Gemma4Config, experts: bool, kind: str) -> list[Entry]:
    absent = "kv" if kind.islower() else "v" if c.keys_are_values and kind == GLOBAL else ""
    attention = [*decoder_tensors.ATTENTION, *decoder_tensors.QK_NORMS,
                 *decoder_tensors.biases(c.attention_bias, c.attention_bias)]
    names = tuple(f"attention/{name}" for name in absent)
    found = [*(entry for entry in attention if not entry.ours.startswith(names or ("none",))),
             *decoder_tensors.SANDWICH_NORMS, Entry("factor", "layer_scalar")]
    if c.per_layer_dim:
        found += [Entry("own_input/gate/kernel", "per_layer_input_gate.weight", "ld->dl"),
                  Entry("own_input/out/kernel", "per_layer_projection.weight", "dl->ld"),
                  Entry("own_input/norm/scale", "post_per_layer_input_norm.weight")]
    return found + (_EXPERTS if experts else decoder_tensors.swiglu())


_EXPERTS = [
    Entry("mlp/router/kernel", "router.proj.weight", "ed->de"), Entry("mlp/router_norm/scale", "router.scale"),
    Entry("mlp/router/expert_scale", "router.per_expert_scale"),
    *decoder_tensors.joined_experts("experts.gate_up_proj", "experts.down_proj"),
    *decoder_tensors.swiglu("mlp/shared", "mlp"),
    Entry("mlp/experts_norm/scale", "pre_feedforward_layernorm_2.weight"),
    Entry("mlp/experts_out_norm/scale", "post_feedforward_layernorm_2.weight"),
    Entry("mlp/shared_out_norm/scale", "post_feedforward_layernorm_1.weight")]
_INPUTS = [
    Entry("inputs/embed/table", "model.embed_tokens_per_layer.weight", "vd->vd"),
    Entry("inputs/project/kernel", "model.per_layer_model_projection.weight", "ld->dl"),
    Entry("inputs/norm/scale", "model.per_layer_projection_norm.weight")]
_DECODER = decoder_tensors.decoder(_layer)


def _unread(c: Gemma4Config, name: str) -> bool:
    """Return whether a tensor makes keys or values of a layer that reads those of another, as some files have it."""
    found = re.search(r"\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.", name)
    return bool(found and int(found[1]) >= c.own_kv_layers)


FAMILY = Family(
    Gemma4Config, gemma4,
    tensors=HFTensors(lambda c, headed: _DECODER.entries(c, headed) + _INPUTS * (c.per_layer_dim > 0), unread=_unread),
    hf=(HFConfig("gemma4_text", "Gemma4ForCausalLM", COMMON | {
        "sliding_window": "window", "attention_bias": "attention_bias", "attention_k_eq_v": "keys_are_values",
        "use_double_wide_mlp": "double_wide_mlp"},
        fixed={"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (None, "vision")},
        read=read, write=write, nested="gemma4", classifier=None),))
