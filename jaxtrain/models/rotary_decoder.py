"""The decoder that Llama and its descendants share."""

from collections.abc import Callable
from functools import partial
from typing import Any

from flax import nnx

from jaxtrain.config.decoder_config import DecoderConfig, RotaryConfig
from jaxtrain.models.attention.rotary import Rotary, scaled_frequencies
from jaxtrain.models.attention.self_attention import Attention
from jaxtrain.models.decoder import Block, Compute, Decoder
from jaxtrain.models.experts.moe import MoE
from jaxtrain.models.heads.multi_token_prediction import MTPHead
from jaxtrain.models.layer_groups import Group, NumberedBlock
from jaxtrain.models.layers import Embed, Head, RMSNorm, SwiGLU
from jaxtrain.models.rematerialization import wraps

Part = Callable[[float, nnx.Rngs], nnx.Module]  # (deviation of the weights of its output, random keys) -> a module


def grouped_query(c: DecoderConfig, compute: Compute, kind: Callable[..., nnx.Module] = Attention, *,
                  qk_norm: Callable[..., nnx.Module] | None = None,
                  k_norm: Callable[..., nnx.Module] | None = None, **how: Any) -> Part:
    """Return what makes the attention of a layer: one of this kind, with these options of `Attention`.

    `qk_norm`: makes the norm of queries, and that of keys; `k_norm`: that of keys where it differs.
    """
    def attention(out_std: float, rngs: nnx.Rngs) -> nnx.Module:
        return kind(c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim, out_std=out_std, window=c.window,
                    qk_norm=partial(qk_norm, rngs=rngs) if qk_norm else None,
                    k_norm=partial(k_norm, rngs=rngs) if k_norm else None, backend=compute.attention,
                    context=compute.context, rngs=rngs, **how)

    return attention


def rotary_decoder(c: RotaryConfig, compute: Compute, attention: Part, *, mlp: Part | None = None,
                   kind: Callable[..., nnx.Module] | None = None,
                   block_of: Callable[..., nnx.Module] | None = None, embed: Embed | None = None, rotary: Any = None,
                   mlp_bias: bool = False, numbered: bool = False, rngs: nnx.Rngs) -> Decoder:
    """Build the decoder that Llama and its descendants share, from `attention`.

    Args:
        mlp: in place of `SwiGLU`.
        kind: in place of `Block` or, if numbered, `NumberedBlock`: makes a layer of a norm, attention, a norm, and an
            MLP or experts.
        block_of: makes a layer of what makes a norm, attention, and an MLP or experts, for one with other norms.
        embed: in place of plain embeddings.
        rotary: in place of `Rotary`: what makes of positions the angles that attention is given.
        mlp_bias: whether `SwiGLU` has biases.
        numbered: attention reads the number of the layer.
    """
    out_std = 0.02 / (2 * c.num_layers) ** 0.5

    def block(rngs: nnx.Rngs, experts: bool) -> nnx.Module:
        norm, attend = partial(RMSNorm, c.embed_dim, c.norm_eps, rngs=rngs), partial(attention, out_std, rngs)

        def feed_forward() -> nnx.Module:
            if experts:
                return MoE(c, out_std=out_std, options=compute.experts, rngs=rngs)
            return mlp(out_std, rngs) if mlp else SwiGLU(
                c.embed_dim, c.mlp_dim, out_std=out_std, bias=mlp_bias, rngs=rngs)

        if block_of is not None:
            return block_of(norm, attend, feed_forward)
        return (kind or (NumberedBlock if numbered else Block))(norm(), attend(), norm(), feed_forward())

    last, dense = partial(block, experts=c.experts.num > 0), partial(block, experts=False)
    keeps = wraps(compute.remat, c.stacked_layers, compute.unroll)
    group = partial(Group, [dense] * (c.experts.every - 1) + [last], keeps[-1][0])
    return Decoder(
        embed or Embed(c.vocab_size, c.embed_dim, rngs=rngs), group if c.experts.every > 1 else last, c.stacked_layers,
        RMSNorm(c.embed_dim, c.norm_eps, rngs=rngs),
        rotary=rotary or Rotary(*scaled_frequencies(c, c.rotary_width)),
        head=None if c.tied_embeddings else Head(c.vocab_size, c.embed_dim, rngs=rngs),
        first=dense, num_first=c.experts.dense_layers, grouped=c.experts.every > 1,
        numbered=numbered,
        ahead=(partial(MTPHead, c.embed_dim, c.norm_eps, last, remat=wraps(compute.remat, c.stacked_layers, 0)[-1][0])
               if c.multi_token_loss else None),
        compute=compute, rngs=rngs,
    )
