"""DeepSeek-V3: latent attention, some dense layers, then experts chosen by biased sigmoid scores (arXiv 2412.19437)."""

from flax import nnx

from jaxtrain.config.families import DeepseekV3Config
from jaxtrain.models.attention.mla import LatentAttention
from jaxtrain.models.attention.rotary import score_factor
from jaxtrain.models.decoder import Compute, Decoder
from jaxtrain.models.llama import rotary_decoder


def deepseek_v3(c: DeepseekV3Config, compute: Compute, *, rngs: nnx.Rngs) -> Decoder:
    """Build a DeepSeek-V3 decoder."""
    def attention(out_std: float, rngs: nnx.Rngs) -> LatentAttention:
        return LatentAttention(c.embed_dim, c.num_heads, c.head_dim, c.rope_head_dim, c.value_head_dim, c.q_rank,
                               c.kv_rank, c.norm_eps, out_std=out_std, window=c.window, backend=compute.attention,
                               context=compute.context, score_factor=score_factor(c), rngs=rngs)

    return rotary_decoder(c, compute, attention, c.rope_head_dim, rngs=rngs)
