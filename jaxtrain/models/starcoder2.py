"""StarCoder 2: LayerNorm, GELU without a gate, biases, rotary positions and a window (arXiv 2402.19173)."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.decoder_tensors import pair
from jaxtrain.hf.hf_format import WITHOUT_EPSILON, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.layer_patterns import window_everywhere
from jaxtrain.hf.rotary_keys import rotary
from jaxtrain.models.llama import written

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class Starcoder2Config(RotaryConfig):
    """StarCoder 2."""

    name: str = "starcoder2"
    use_bias: bool = True  # whether the matrices of attention and MLP have biases


def starcoder2(c: Starcoder2Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a StarCoder 2 decoder."""
    from jaxtrain.models.layers import GeluMLP, LayerNorm
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    attention = grouped_query(c, compute, qkv_bias=c.use_bias, out_bias=c.use_bias)
    mlp = partial(GeluMLP, c.embed_dim, c.mlp_dim, bias=c.use_bias)
    return rotary_decoder(c, compute, attention, mlp=mlp, norm=LayerNorm, rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    return {"window": window_everywhere(known, refuse, known["sliding_window"])} | rotary("starcoder2", known, refuse)


def _layer(c: Starcoder2Config, experts: bool) -> list[Entry]:
    mlp = [entry for ours, theirs, layout in (("up", "c_fc", "fd->df"), ("down", "c_proj", "df->fd"))
           for entry in pair(f"mlp/{ours}", f"mlp.{theirs}", layout, weight="kernel")[:1 + c.use_bias]]
    return [*decoder_tensors.ATTENTION, *decoder_tensors.biases(c.use_bias, c.use_bias), *mlp,
            *pair("attention_norm", "input_layernorm"), *pair("mlp_norm", "post_attention_layernorm")]


FAMILY = Family(
    Starcoder2Config, starcoder2, tensors=decoder_tensors.decoder(_layer, norm=pair("norm", "model.norm")),
    hf=(HFConfig("starcoder2", "Starcoder2ForCausalLM",
                 WITHOUT_EPSILON | {"norm_epsilon": "norm_eps", "use_bias": "use_bias"},
                 fixed={"hidden_act": ("gelu_pytorch_tanh",)}, read=_read, write=written),))
