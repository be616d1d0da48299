"""GPT-2: learned positions, LayerNorm, GELU, biases everywhere, tied head (Radford et al., 2019)."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.decoder_config import DecoderConfig
from jaxtrain.config.family import Family
from jaxtrain.hf.decoder_tensors import head, in_stack, pair
from jaxtrain.hf.hf_format import NO, Entry, HFConfig, HFTensors

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Block, Compute, Decoder


@dataclass(frozen=True)
class Gpt2Config(DecoderConfig):
    """GPT-2, which has no further keys."""


def gpt2(c: Gpt2Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a GPT-2 decoder."""
    from jaxtrain.models.attention.self_attention import Attention
    from jaxtrain.models.decoder import Block, Decoder
    from jaxtrain.models.layers import Embed, GeluMLP, Head, LayerNorm, LearnedPositions

    out_std = 0.02 / (2 * c.num_layers) ** 0.5

    def block(rngs: "nnx.Rngs") -> "Block":
        return Block(
            partial(LayerNorm, c.embed_dim, c.norm_eps, rngs=rngs),
            partial(Attention, c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim, qkv_bias=True, out_bias=True,
                    out_std=out_std, window=c.window, backend=compute.attention, context=compute.context, rngs=rngs),
            partial(GeluMLP, c.embed_dim, c.mlp_dim, out_std=out_std, rngs=rngs),
        )

    return Decoder(
        Embed(c.vocab_size, c.embed_dim, rngs=rngs), block, c.num_layers,
        LayerNorm(c.embed_dim, c.norm_eps, rngs=rngs),
        positions=LearnedPositions(c.max_seq_len, c.embed_dim, rngs=rngs),
        head=None if c.tied_embeddings else Head(c.vocab_size, c.embed_dim, rngs=rngs),
        compute=compute, rngs=rngs,
    )


_LAYER = [
    *(Entry(f"attention/{name}/kernel", "attn.c_attn.weight", "d(phk)->dhk", (n, 3)) for n, name in enumerate("qkv")),
    *(Entry(f"attention/{name}/bias", "attn.c_attn.bias", "(phk)->hk", (n, 3)) for n, name in enumerate("qkv")),
    Entry("attention/out/kernel", "attn.c_proj.weight", "(hk)d->hkd"), Entry("attention/out/bias", "attn.c_proj.bias"),
    Entry("mlp/up/kernel", "mlp.c_fc.weight", "df->df"), Entry("mlp/up/bias", "mlp.c_fc.bias"),
    Entry("mlp/down/kernel", "mlp.c_proj.weight", "fd->fd"), Entry("mlp/down/bias", "mlp.c_proj.bias"),
    *pair("attention_norm", "ln_1"), *pair("mlp_norm", "ln_2")]


def _entries(c: Gpt2Config, reward_head: bool) -> list[Entry]:
    return [Entry("embed/table", "transformer.wte.weight", "vd->vd"), *pair("norm", "transformer.ln_f"),
            Entry("positions/table", "transformer.wpe.weight", "td->td"), *head(c, reward_head),
            *in_stack("blocks/layer", range(c.num_layers), "transformer.h", _LAYER)]


FAMILY = Family(
    Gpt2Config, gpt2,
    hf=(HFConfig(
        "gpt2", "GPT2LMHeadModel", classifier="GPT2ForSequenceClassification",
        keys={"vocab_size": "vocab_size", "n_layer": "num_layers", "n_embd": "embed_dim", "n_head": "num_heads",
              "n_inner": "mlp_dim", "n_positions": "max_seq_len", "layer_norm_epsilon": "norm_eps",
              "tie_word_embeddings": "tied_embeddings"},
        fixed={"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
               "scale_attn_by_inverse_layer_idx": NO, "add_cross_attention": NO}),),
    tensors=HFTensors(_entries, prefix="transformer.", turned=True))
