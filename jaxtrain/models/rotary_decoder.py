"""The decoder that Llama and its descendants share."""

from collections.abc import Callable
from functools import partial

from flax import nnx

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.models.attention.rotary import Rotary, scaled_frequencies
from jaxtrain.models.decoder import Block, Compute, Decoder
from jaxtrain.models.experts.moe import MoE
from jaxtrain.models.heads.multi_token_prediction import MTPHead
from jaxtrain.models.layer_groups import Group, NumberedBlock
from jaxtrain.models.layers import Embed, Head, RMSNorm, SwiGLU
from jaxtrain.models.rematerialization import wraps


def rotary_decoder(c: RotaryConfig, compute: Compute, attention: Callable[[float, nnx.Rngs], nnx.Module], *,
                   numbered: bool = False, kind: type[Block] = Block, rngs: nnx.Rngs) -> Decoder:
    """Build the decoder that Llama and its descendants share, given `attention(std of its output weights, rngs)`.

    `numbered`: attention reads the number of the layer. `kind`: the class of layers that are not, for another order of
    their parts.
    """
    out_std = 0.02 / (2 * c.num_layers) ** 0.5

    def block(rngs: nnx.Rngs, experts: bool) -> Block:
        return (NumberedBlock if numbered else kind)(
            RMSNorm(c.embed_dim, c.norm_eps, rngs=rngs),
            attention(out_std, rngs),
            RMSNorm(c.embed_dim, c.norm_eps, rngs=rngs),
            MoE(c, out_std=out_std, options=compute.experts, rngs=rngs) if experts else
            SwiGLU(c.embed_dim, c.mlp_dim, out_std=out_std, rngs=rngs))

    last, dense = partial(block, experts=c.experts.num > 0), partial(block, experts=False)
    keeps = wraps(compute.remat, c.stacked_layers, compute.unroll)
    group = partial(Group, [dense] * (c.experts.every - 1) + [last], keeps[-1][0])
    return Decoder(
        Embed(c.vocab_size, c.embed_dim, rngs=rngs), group if c.experts.every > 1 else last, c.stacked_layers,
        RMSNorm(c.embed_dim, c.norm_eps, rngs=rngs),
        rotary=Rotary(*scaled_frequencies(c, c.rotary_width)),
        head=None if c.tied_embeddings else Head(c.vocab_size, c.embed_dim, rngs=rngs),
        first=dense, num_first=c.experts.dense_layers, grouped=c.experts.every > 1,
        numbered=numbered,
        ahead=(partial(MTPHead, c.embed_dim, c.norm_eps, last, remat=wraps(compute.remat, c.stacked_layers, 0)[-1][0])
               if c.multi_token_loss else None),
        compute=compute, rngs=rngs,
    )
