"""GPT-2: learned positions, LayerNorm, GELU, biases everywhere, tied head (Radford et al., 2019)."""

from flax import nnx

from jaxtrain.config.families import Gpt2Config
from jaxtrain.models.attention.self_attention import Attention
from jaxtrain.models.decoder import Block, Compute, Decoder
from jaxtrain.models.layers import Embed, GeluMLP, Head, LayerNorm, LearnedPositions


def gpt2(c: Gpt2Config, compute: Compute, *, rngs: nnx.Rngs) -> Decoder:
    """Build a GPT-2 decoder."""
    out_std = 0.02 / (2 * c.num_layers) ** 0.5

    def block(rngs: nnx.Rngs) -> Block:
        return Block(
            LayerNorm(c.embed_dim, c.norm_eps, rngs=rngs),
            Attention(c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim, qkv_bias=True, out_bias=True,
                      out_std=out_std, window=c.window, backend=compute.attention, context=compute.context, rngs=rngs),
            LayerNorm(c.embed_dim, c.norm_eps, rngs=rngs),
            GeluMLP(c.embed_dim, c.mlp_dim, out_std=out_std, rngs=rngs),
        )

    return Decoder(
        Embed(c.vocab_size, c.embed_dim, rngs=rngs), block, c.num_layers,
        LayerNorm(c.embed_dim, c.norm_eps, rngs=rngs),
        positions=LearnedPositions(c.max_seq_len, c.embed_dim, rngs=rngs),
        head=None if c.tied_embeddings else Head(c.vocab_size, c.embed_dim, rngs=rngs),
        compute=compute, rngs=rngs,
    )
