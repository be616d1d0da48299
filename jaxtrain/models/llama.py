"""Llama 3: rotary positions, RMSNorm, grouped-query attention, SwiGLU (Llama Team, 2024; arXiv 2407.21783)."""

from collections.abc import Callable
from functools import partial

from flax import nnx

from jaxtrain.config.families import ExpertsConfig, LlamaConfig, RotaryConfig
from jaxtrain.models.attention.rotary import Rotary, scaled_frequencies
from jaxtrain.models.attention.self_attention import Attention
from jaxtrain.models.decoder import Block, Compute, Decoder
from jaxtrain.models.experts.moe import MoE
from jaxtrain.models.heads.multi_token_prediction import MTPHead
from jaxtrain.models.layer_groups import Group, NumberedBlock
from jaxtrain.models.layers import Embed, Head, RMSNorm, SwiGLU
from jaxtrain.models.rematerialization import wraps


def llama(c: LlamaConfig, compute: Compute, *, rngs: nnx.Rngs, qk_norm: bool = False,
          qkv_bias: bool = False) -> Decoder:
    """Build a Llama decoder, a Mixtral one if it has experts; with `qk_norm` a Qwen3 one, with `qkv_bias` a Qwen2 one.
    """
    kind = Attention
    if c.global_first:
        from jaxtrain.models.attention.late_window import LateWindowAttention

        kind = partial(LateWindowAttention, c.global_first)

    def attention(out_std: float, rngs: nnx.Rngs) -> Attention:
        return kind(c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim, out_std=out_std, window=c.window,
                    qk_norm=partial(RMSNorm, c.head_dim, c.norm_eps, axis="head_dim", rngs=rngs)
                    if qk_norm else None, qkv_bias=qkv_bias, backend=compute.attention,
                    context=compute.context, rngs=rngs)

    return rotary_decoder(c, compute, attention, c.head_dim, rngs=rngs)


def rotary_decoder(c: RotaryConfig, compute: Compute, attention: Callable[[float, nnx.Rngs], nnx.Module],
                   rotary_width: int, *, rngs: nnx.Rngs) -> Decoder:
    """Build the decoder that Llama and its descendants share, given `attention(std of its output weights, rngs)`."""
    out_std = 0.02 / (2 * c.num_layers) ** 0.5

    def block(rngs: nnx.Rngs, experts: bool) -> Block:
        return (NumberedBlock if c.global_first else Block)(
            RMSNorm(c.embed_dim, c.norm_eps, rngs=rngs),
            attention(out_std, rngs),
            RMSNorm(c.embed_dim, c.norm_eps, rngs=rngs),
            MoE(c, out_std=out_std, options=compute.experts, rngs=rngs)
            if experts and isinstance(c, ExpertsConfig)
            else SwiGLU(c.embed_dim, c.mlp_dim, out_std=out_std, rngs=rngs),
        )

    last, dense = partial(block, experts=c.num_experts > 0), partial(block, experts=False)
    keeps = wraps(compute.remat, c.stacked_layers, compute.unroll)
    group = partial(Group, [dense] * (c.experts_every - 1) + [last], keeps[-1][0])
    return Decoder(
        Embed(c.vocab_size, c.embed_dim, rngs=rngs), group if c.experts_every > 1 else last, c.stacked_layers,
        RMSNorm(c.embed_dim, c.norm_eps, rngs=rngs),
        rotary=Rotary(*scaled_frequencies(c, rotary_width)),
        head=None if c.tied_embeddings else Head(c.vocab_size, c.embed_dim, rngs=rngs),
        first=dense, num_first=c.dense_layers, grouped=c.experts_every > 1,
        numbered=c.global_first > 0,
        ahead=(partial(MTPHead, c.embed_dim, c.norm_eps, last, remat=wraps(compute.remat, c.stacked_layers, 0)[-1][0])
               if c.mtp_loss_weight else None),
        compute=compute, rngs=rngs,
    )
