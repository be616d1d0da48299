"""OLMo 2: Llama's blocks with norms behind attention and MLP, and of all heads together (arXiv 2501.00656)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, NO, SILU, Entry, HFConfig, Keys
from jaxtrain.hf.rotary_keys import published_rotary, rotary

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class Olmo2Config(RotaryConfig):
    """OLMo 2."""

    name: str = "olmo2"


def olmo2(c: Olmo2Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build an OLMo 2 decoder."""
    from jaxtrain.models.attention.self_attention import Attention

    return post_norm(c, compute, Attention, rngs=rngs)


def post_norm(c: RotaryConfig, compute: "Compute", kind: Callable[..., "nnx.Module"], *, rngs: "nnx.Rngs",
              **how: Any) -> "Decoder":
    """Build a decoder with OLMo's norms, of attention of this kind; `how`: what else `rotary_decoder` is told."""
    from jaxtrain.models.post_norm_layers import AllHeadsRMSNorm, PostNormBlock
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    attention = grouped_query(
        c, compute, kind, qk_norm=partial(AllHeadsRMSNorm, c.num_heads, c.head_dim, c.norm_eps),
        k_norm=partial(AllHeadsRMSNorm, c.num_kv_heads, c.head_dim, c.norm_eps, axis="kv_heads"))
    return rotary_decoder(c, compute, attention, block=PostNormBlock, rngs=rngs, **how)


def _write(c: Olmo2Config) -> Keys:
    return published_rotary(c) | {"pad_token_id": None}


def layer(c: RotaryConfig, experts: bool) -> list[Entry]:
    """Return the entries of a layer."""
    return [*decoder_tensors.ATTENTION, *decoder_tensors.ALL_HEADS_QK_NORMS, *decoder_tensors.POST_NORMS,
            *decoder_tensors.swiglu()]


FAMILY = Family(
    Olmo2Config, olmo2, tensors=decoder_tensors.decoder(layer),
    hf=(HFConfig("olmo2", "Olmo2ForCausalLM", COMMON, fixed={"attention_bias": NO, "hidden_act": SILU},
                 read=partial(rotary, "olmo2"), write=_write),))
