"""The decoder that Llama and its descendants share."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flax import nnx

from jaxtrain.config.decoder_config import DecoderConfig, RotaryConfig
from jaxtrain.config.remat_policies import policies
from jaxtrain.models.attention.rotary import Rotary, scaled_frequencies
from jaxtrain.models.attention.self_attention import Attention
from jaxtrain.models.decoder import Block, Compute, Decoder
from jaxtrain.models.experts.moe import MoE
from jaxtrain.models.heads.biased_head import BiasedHead
from jaxtrain.models.heads.multi_token_prediction import MTPHead
from jaxtrain.models.layer_groups import Group
from jaxtrain.models.layers import Embed, Head, RMSNorm, SwiGLU
from jaxtrain.models.rematerialization import wrap

# (deviation of the weights of its output, random keys) -> a module; called with `out_std=` and `rngs=`
Part = Callable[..., nnx.Module]


def grouped_query(c: DecoderConfig, compute: Compute, kind: Callable[..., nnx.Module] = Attention, *,
                  qk_norm: Callable[..., nnx.Module] | None = None,
                  k_norm: Callable[..., nnx.Module] | None = None, **how: Any) -> Part:
    """Return what makes the attention of a layer: one of this kind, with these options of `Attention`.

    `qk_norm`: makes the norm of queries, and that of keys; `k_norm`: that of keys where it differs.
    """
    def attention(out_std: float, rngs: nnx.Rngs) -> nnx.Module:
        return kind(c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim, out_std=out_std,
                    qk_norm=partial(qk_norm, rngs=rngs) if qk_norm else None,
                    k_norm=partial(k_norm, rngs=rngs) if k_norm else None, backend=compute.attention,
                    context=compute.context, rngs=rngs, **{"window": c.window, **how})

    return attention


def routed(c: DecoderConfig, compute: Compute, **how: Any) -> Part:
    """Return what makes the experts of a layer, with these options of `MoE`."""
    return lambda out_std, rngs: MoE(c, out_std=out_std, options=compute.experts, rngs=rngs, **how)


def rotary_decoder(c: DecoderConfig, compute: Compute, attention: Part | Sequence[Part], *,
                   mlp: Part | Sequence[Part] | None = None,
                   experts: Part | Sequence[Part] | None = None,
                   block: Callable[..., nnx.Module] | Sequence[Callable[..., nnx.Module]] = Block,
                   norm: Callable[..., nnx.Module] = RMSNorm, embed: Embed | None = None, rotary: Any = None,
                   mlp_bias: bool = False, ahead: Part | None = None, beside: Sequence[Part] = (),
                   decoder: Callable[..., Decoder] = Decoder, rngs: nnx.Rngs) -> Decoder:
    """Build the decoder that Llama and its descendants share.

    Args:
        attention: makes the attention of a layer, or what has its place; a sequence: of each layer.
        mlp: in place of `SwiGLU`; a sequence: of each layer.
        experts: in place of `MoE` without options; a sequence: of each layer.
        block: makes a layer of what makes a norm, attention, and an MLP or experts; a sequence: for each layer.
        norm: makes the norms of layers and the last one, of a width and an epsilon.
        embed: in place of plain embeddings.
        rotary: in place of `Rotary`: what makes of positions the angles that attention is given.
        mlp_bias: whether `SwiGLU` has biases.
        ahead: makes the attention of layers that predict further tokens; none: that of the last layer.
        beside: of each layer, makes a fourth part of its block.
        decoder: in place of `Decoder`.
    """
    out_std = 0.02 / (2 * c.num_layers) ** 0.5
    mlp = mlp or (lambda out_std, rngs: SwiGLU(c.embed_dim, c.mlp_dim, out_std=out_std, bias=mlp_bias, rngs=rngs))
    experts, norm = experts or routed(c, compute), partial(norm, c.embed_dim, c.norm_eps)

    def layer(number: int, feed_forward: Part | Sequence[Part],
              own: Part | None = None) -> Callable[[nnx.Rngs], nnx.Module]:
        attend, fed, together = (each[number] if isinstance(each, Sequence) else each
                                 for each in (own or attention, feed_forward, block))
        parts = attend, fed, *beside[number:number + 1]
        return lambda rngs: together(partial(norm, rngs=rngs), *(partial(part, out_std=out_std, rngs=rngs)
                                                                 for part in parts))

    if rotary is None and isinstance(c, RotaryConfig) and c.rotary_width:
        rotary = Rotary(*scaled_frequencies(c, c.rotary_width))
    first = c.experts.dense_layers
    period = [layer(first + n, experts if c.experts.num and (n + 1) % c.experts.every == 0 else mlp)
              for n in range(c.period)]
    # One iteration has the layers of a period: a layer must not be computed again before its gradients are due.
    keeps = wrap(policies(compute.remat, c.stacked_layers)[-1][0])
    further = layer(c.num_layers - 1, experts if c.experts.num else mlp, ahead) if ahead else period[-1]
    made = decoder(
        embed or Embed(c.vocab_size, c.embed_dim, rngs=rngs),
        partial(Group, period, keeps) if c.period > 1 else period[0], c.stacked_layers, norm(rngs=rngs),
        rotary=rotary,
        head=None if c.tied_embeddings else (BiasedHead if c.head_bias else Head)(c.vocab_size, c.embed_dim, rngs=rngs),
        first=layer(0, mlp), num_first=first, grouped=c.period > 1,
        ahead=(partial(MTPHead, c.embed_dim, norm, further, depth=c.multi_token_layers,
                       remat=keeps) if c.multi_token_loss else None),
        compute=compute, rngs=rngs,
    )
    made.mtp_after_norm = c.mtp_after_norm
    return made
