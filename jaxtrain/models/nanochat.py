"""nanochat: norms without scales, behind the embeddings and the rotation too, and a soft cap of logits.

Its positions turn the other way round (https://github.com/karpathy/nanochat).
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import number
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.hf.soft_caps import LOGITS, published_soft_caps, soft_caps

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class NanochatConfig(RotaryConfig):
    """nanochat."""

    name: str = "nanochat"
    attention_bias: bool = False  # whether queries, keys, values and what attention returns have biases
    logit_cap: float = number(15.0, least=0)  # logits become cap x tanh(logit / cap); 0: they stay
    norm_eps: float = 1e-6


def nanochat(c: NanochatConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a nanochat decoder."""
    from jaxtrain.models.attention.norm_last import NormLastAttention
    from jaxtrain.models.attention.rotary import Rotary, scaled_frequencies
    from jaxtrain.models.layers import RMSNorm, SquaredReLU
    from jaxtrain.models.normed_embed import NormedEmbed
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    norm = partial(RMSNorm, scale=False)
    attention = grouped_query(c, compute, NormLastAttention, qkv_bias=c.attention_bias, out_bias=c.attention_bias,
                              qk_norm=partial(norm, c.head_dim, c.norm_eps, axis="head_dim"))
    turns, factor = scaled_frequencies(c, c.head_dim)
    model = rotary_decoder(
        c, compute, attention, mlp=partial(SquaredReLU, c.embed_dim, c.mlp_dim), norm=norm,
        embed=NormedEmbed(c.vocab_size, c.embed_dim, norm(c.embed_dim, c.norm_eps, rngs=rngs), rngs=rngs),
        rotary=Rotary(-turns, factor), rngs=rngs)
    model.logit_cap = c.logit_cap
    return model


def _read(known: Keys, refuse: Refuse) -> Keys:
    return rotary("nanochat", known, refuse) | soft_caps(known, refuse, LOGITS)


def _write(c: NanochatConfig) -> Keys:
    return published_rotary(c) | published_soft_caps(c, LOGITS) | {"pad_token_id": None}


def _layer(c: NanochatConfig, experts: bool) -> list[Entry]:
    return [*decoder_tensors.ATTENTION, *decoder_tensors.biases(c.attention_bias, c.attention_bias),
            Entry("mlp/up/kernel", "mlp.fc1.weight", "fd->df"), Entry("mlp/down/kernel", "mlp.fc2.weight", "df->fd")]


FAMILY = Family(
    NanochatConfig, nanochat, tensors=decoder_tensors.decoder(_layer, norm=[]),
    hf=(HFConfig("nanochat", "NanoChatForCausalLM", COMMON | {"attention_bias": "attention_bias"},
                 fixed={"hidden_act": ("relu2",)}, read=_read, write=_write, classifier=None),))
