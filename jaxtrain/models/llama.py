"""Llama 3: rotary positions, RMSNorm, grouped-query attention, SwiGLU (Llama Team, 2024; arXiv 2407.21783).

Mistral is the same with a sliding window.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import DecoderConfig, RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import at_most, number
from jaxtrain.errors import UserError
from jaxtrain.hf import decoder_tensors, layer_patterns
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import published_rotary, rotary

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class MultiTokenConfig(DecoderConfig):
    """Multi-token prediction."""

    # multi-token prediction (MTP): loss weight of extra layers that predict the tokens after the next one; 0: no such
    # layers
    mtp_loss_weight: float = number(0.0, least=0)
    # number of those layers, each of which predicts one token further (num_nextn_predict_layers)
    mtp_layers: int = at_most(1, 16, above=0)

    @property
    def multi_token_loss(self) -> float:
        """The weight of the loss for predicting tokens after the next."""
        return self.mtp_loss_weight

    @property
    def multi_token_layers(self) -> int:
        """The number of layers that do so, each one token further."""
        return self.mtp_layers if self.mtp_loss_weight else 0


@dataclass(frozen=True)
class DenseConfig(MultiTokenConfig, RotaryConfig):
    """Rotary positions, context extension, multi-token prediction, and a window that the first layers may lack."""

    # with model.window, as in Qwen2 and Qwen3: number of first layers that use full attention
    global_first: int = at_most(0, 10_000, least=0)
    late_window = True  # whether the first layers may be without the window

    def __post_init__(self):
        super().__post_init__()
        if self.global_first and (not self.window or self.global_first >= self.num_layers):
            raise UserError("model.global_first", f"{self.global_first} of {self.num_layers} layers leaves none with "
                            f"model.window={self.window}", "lower it, or leave it out")
        if self.global_first and (not self.late_window or self.mtp_loss_weight):
            raise UserError("model.global_first", f"{self.name}{' with mtp_loss_weight' * (self.mtp_loss_weight > 0)} "
                            "has the window in all layers", "leave it out")

    @property
    def global_layers(self) -> int:
        """The number of layers without a window where the others have one."""
        return self.global_first


@dataclass(frozen=True)
class BiasedConfig(RotaryConfig):
    """Biases that some models have."""

    attention_bias: bool = False  # whether queries, keys, values and what attention returns have biases
    mlp_bias: bool = False  # whether the matrices of the MLP have biases


@dataclass(frozen=True)
class LlamaConfig(BiasedConfig, DenseConfig):
    """Llama and Mistral."""

    name: str = "llama"


def dense(c: DenseConfig, compute: "Compute", *, rngs: "nnx.Rngs", qk_norm: bool = False, qkv_bias: bool = False,
          out_bias: bool = False, mlp_bias: bool = False) -> "Decoder":
    """Build a decoder of Llama's blocks; with `qk_norm` Qwen3's, with `qkv_bias` alone Qwen2's."""
    from jaxtrain.models.attention.self_attention import Attention
    from jaxtrain.models.layers import RMSNorm
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    kind = Attention
    if c.global_first:
        from jaxtrain.models.attention.by_layer.late_window import LateWindowAttention

        kind = partial(LateWindowAttention, c.global_first)
    norm = partial(RMSNorm, c.head_dim, c.norm_eps, axis="head_dim") if qk_norm else None
    attention = grouped_query(c, compute, kind, qk_norm=norm, qkv_bias=qkv_bias, out_bias=out_bias)
    return rotary_decoder(c, compute, attention, mlp_bias=mlp_bias, rngs=rngs)


def llama(c: LlamaConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Llama decoder."""
    return dense(c, compute, qkv_bias=c.attention_bias, out_bias=c.attention_bias, mlp_bias=c.mlp_bias, rngs=rngs)


def layer(c: DenseConfig, experts: bool) -> list[Entry]:
    """Return the entries of a layer without biases and experts."""
    return [*decoder_tensors.ATTENTION, *decoder_tensors.NORMS, *decoder_tensors.swiglu()]


def biased_layer(c: LlamaConfig, experts: bool) -> list[Entry]:
    """Return the entries of a layer with the biases that a config has."""
    return [*layer(c, experts), *decoder_tensors.biases(c.attention_bias, c.attention_bias, c.mlp_bias)]


def _read(kind: str, known: Keys, refuse: Refuse) -> Keys:
    window = layer_patterns.window_everywhere(known, refuse, known["sliding_window"] if kind == "mistral" else None)
    return {"window": window} | rotary(kind, known, refuse)


def written(c: RotaryConfig) -> Keys:
    """Return the keys of config.json of rotary positions and the window."""
    return published_rotary(c) | {"sliding_window": c.window or None}


BIAS_KEYS = {name: name for name in ("attention_bias", "mlp_bias")}
FAMILY = Family(
    LlamaConfig, llama, tensors=decoder_tensors.decoder(biased_layer),
    hf=(HFConfig("llama", "LlamaForCausalLM", COMMON | BIAS_KEYS, fixed={"hidden_act": SILU},
                 read=partial(_read, "llama"), write=written, describes=lambda c: not c.window),
        HFConfig("mistral", "MistralForCausalLM", COMMON, read=partial(_read, "mistral"), write=written,
                 nested="mistral3")))
