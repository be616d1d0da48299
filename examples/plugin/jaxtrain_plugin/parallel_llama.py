"""A family of another package: Llama's layers, with the MLP beside attention and not behind it."""

from dataclasses import dataclass
from functools import partial

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.family import Family
from jaxtrain.config.field_checks import number


@dataclass(frozen=True)
class ParallelConfig(RotaryConfig):
    """Llama's layers, with the MLP beside attention."""

    name: str = "parallel_llama"
    branch_scale: float = number(1.0, above=0)  # what both branches are multiplied by


def parallel_llama(c, compute, *, rngs):
    """Build the decoder; JAX is imported here, so that a mistake in a config is told before."""
    import jaxtrain.models.layers as layers
    from jaxtrain.models.attention.rotary import Rotary, scaled_frequencies
    from jaxtrain.models.attention.self_attention import Attention
    from jaxtrain.models.decoder import Block, Decoder
    from jaxtrain.sharding import rules as sharding

    class ParallelBlock(Block):
        """Attention and the MLP read the same normalized activations, and both are added."""

        def __call__(self, x, segments, angles, cache=None):
            h = sharding.enter(self.attention_norm(x), layers.INSIDE, shared_by=self.attention.shared_by)
            y, aux = self.attention(h, segments, angles, cache)
            return x + c.branch_scale * (y + self.mlp(h)), aux

    norm = partial(layers.RMSNorm, c.embed_dim, c.norm_eps)

    def block(rngs):
        attention = Attention(c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim, out_std=0.02, window=c.window,
                              backend=compute.attention, context=compute.context, rngs=rngs)
        return ParallelBlock(norm(rngs=rngs), attention, norm(rngs=rngs),
                             layers.SwiGLU(c.embed_dim, c.mlp_dim, out_std=0.02, rngs=rngs))

    head = None if c.tied_embeddings else layers.Head(c.vocab_size, c.embed_dim, rngs=rngs)
    return Decoder(layers.Embed(c.vocab_size, c.embed_dim, rngs=rngs), block, c.num_layers, norm(rngs=rngs),
                   rotary=Rotary(*scaled_frequencies(c, c.head_dim)), head=head, compute=compute, rngs=rngs)


FAMILY = Family(ParallelConfig, parallel_llama)
