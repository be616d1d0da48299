"""Whisper: an encoder of log-mel frames, and a decoder of tokens that attends to it (Radford et al., arXiv 2212.04356).

Shape suffixes: B batch, M frames of the input, C mels, S positions of the encoder (two frames each), T tokens,
D embedding, V vocabulary.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config.modality_families import SILENCE, WhisperConfig
from jaxtrain.errors import UserError
from jaxtrain.kernels.gelus import exact_gelu
from jaxtrain.models.attention.kv_cache import CACHE, Cache
from jaxtrain.models.attention.memory_attention import MemoryAttention
from jaxtrain.models.attention.self_attention import Attention
from jaxtrain.models.decoder import Compute
from jaxtrain.models.layers import INSIDE, RESIDUAL, Embed, GeluMLP, Head, LayerNorm, LearnedPositions, Linear, Stack
from jaxtrain.models.rematerialization import wraps
from jaxtrain.sharding import rules as sharding

WHOLE = ("batch", None, "act_embed")  # of frames, of which each device has all: convolutions read their neighbours


class Convolution(nnx.Module):
    """A convolution of width 3 over time, as one product of each three neighbours with the weights."""

    def __init__(self, given: int, dim: int, stride: int, *, rngs: nnx.Rngs):
        self.stride = stride
        self.linear = Linear("btwc,wcd->btd", (3, given, dim), (None, None, "embed"), WHOLE, bias=True, rngs=rngs)

    def __call__(self, x_BMC: jax.Array) -> jax.Array:
        """Return the convolution of the input with a frame of zeros on both sides."""
        return self.inside(jnp.pad(x_BMC, ((0, 0), (1, 1), (0, 0))))

    def inside(self, x_BMC: jax.Array) -> jax.Array:
        """Return the convolution of the input, which has its neighbours on both sides already."""
        positions = (x_BMC.shape[1] - 3) // self.stride + 1
        last = (positions - 1) * self.stride + 1
        neighbours = [x_BMC[:, n:n + last:self.stride] for n in range(3)]
        return self.linear(jnp.stack(neighbours, 2))


class EncoderBlock(nnx.Module):
    """A pre-norm residual block whose positions attend to each other, then an MLP."""

    def __init__(self, c: WhisperConfig, compute: Compute, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = _norm(c, rngs), _norm(c, rngs)
        self.attention = MemoryAttention(**_attention(c, c.encoder_layers), backend=compute.attention, rngs=rngs)
        self.mlp = GeluMLP(c.embed_dim, c.mlp_dim, out_std=_out_std(c.encoder_layers), rngs=rngs, kind=exact_gelu)

    def __call__(self, x_BSD: jax.Array, visible: jax.Array | None,
                 cache: Cache | None = None) -> tuple[jax.Array, dict[str, Any]]:
        """Return the activations; with a cache, also the keys and values that the next chunk attends to."""
        h, told = sharding.enter(self.attention_norm(x_BSD), INSIDE, shared_by=self.attention.shared_by), {}
        if cache is None:
            y_BSD, _ = self.attention(h, h, visible)
        else:
            assert visible is not None
            y_BSD, told[CACHE] = self.attention.carry_on(h, cache.entries, visible)
        return _with_mlp(self, x_BSD + y_BSD), told


class DecoderBlock(nnx.Module):
    """A pre-norm residual block: causal attention, attention to the encoder's memory, then an MLP."""

    def __init__(self, c: WhisperConfig, compute: Compute, rngs: nnx.Rngs):
        self.attention_norm, self.memory_norm, self.mlp_norm = (_norm(c, rngs) for _ in range(3))
        self.attention = Attention(**_attention(c, c.num_layers), backend=compute.attention, rngs=rngs)
        self.memory = MemoryAttention(**_attention(c, c.num_layers), backend=compute.attention, rngs=rngs)
        self.mlp = GeluMLP(c.embed_dim, c.mlp_dim, out_std=_out_std(c.num_layers), rngs=rngs, kind=exact_gelu)

    def __call__(self, x_BTD: jax.Array, memory_BSD: jax.Array | None, visible_BS: jax.Array | None,
                 cache: Cache | None = None) -> tuple[jax.Array, dict[str, Any]]:
        """Return the activations; with a cache, also its new entries under `own` and `memory`."""
        h = sharding.enter(self.attention_norm(x_BTD), INSIDE, shared_by=self.attention.shared_by)
        y_BTD, own = self.attention(h, None, None, cache and cache.of("own"))
        x_BTD += y_BTD
        h = sharding.enter(self.memory_norm(x_BTD), INSIDE, shared_by=("act_heads",))
        if memory_BSD is not None:
            memory_BSD = sharding.enter(memory_BSD, INSIDE, shared_by=("act_kv_heads",))
        y_BTD, seen = self.memory(h, memory_BSD, visible_BS, cache and cache.of("memory"))
        told = {} if cache is None else {CACHE: {"own": own[CACHE], "memory": seen[CACHE]}}
        return _with_mlp(self, x_BTD + y_BTD), told


class Whisper(nnx.Module):
    """Frames and tokens to logits; `encode`, `decode` and `head` are separate so that no loss holds all logits."""

    def __init__(self, c: WhisperConfig, compute: Compute, *, rngs: nnx.Rngs):
        self.masks = c.mask_padding
        self.chunk, self.chunks_back, self.heads = c.audio_chunk, c.audio_chunks_back, (c.num_heads, c.head_dim)
        self.first, self.second = (Convolution(given, c.embed_dim, stride, rngs=rngs)
                                   for given, stride in ((c.mels, 1), (c.embed_dim, 2)))
        self.audio_positions = nnx.Param(sinusoids(c.audio_positions, c.embed_dim), axes=("positions", "embed"),
                                         compute_dtype="", update="")
        stack = partial(Stack, unroll=compute.unroll, rngs=rngs)
        self.encoder_blocks = stack(lambda rngs: EncoderBlock(c, compute, rngs), c.encoder_layers,
                                    remat=wraps(compute.remat, c.encoder_layers, compute.unroll))
        self.encoder_norm = _norm(c, rngs)
        self.ctc = Head(c.vocab_size, c.embed_dim, rngs=rngs) if c.ctc_weight else None
        self.embed = Embed(c.vocab_size, c.embed_dim, rngs=rngs)
        self.positions = LearnedPositions(c.max_seq_len, c.embed_dim, rngs=rngs)
        self.blocks = stack(lambda rngs: DecoderBlock(c, compute, rngs), c.num_layers,
                            remat=wraps(compute.remat, c.num_layers, compute.unroll))
        self.norm = _norm(c, rngs)

    def encode(self, features_BMC: jax.Array, valid_BM: jax.Array | None = None) -> jax.Array:
        """Return the memory [B, ceil(M / 2), D] of log-mel frames, of which `valid_BM` are no padding.

        Padding has no influence on it, or is silence to a model that does not mask it.
        """
        x = sharding.constrain(features_BMC, "batch", None, None)
        kept_BM = None if valid_BM is None else sharding.constrain(valid_BM != 0, "batch", None)
        if kept_BM is not None and not self.masks:
            x, kept_BM = silent_after(x, kept_BM), None

        def masked(x_BMC):
            return x_BMC if kept_BM is None else x_BMC * kept_BM[..., None].astype(x_BMC.dtype)

        x = masked(x)
        x_BSD = exact_gelu(self.second(masked(exact_gelu(self.first(x)))))
        x_BSD = sharding.constrain(x_BSD + self.positions_at(0, x_BSD.shape[1]), *RESIDUAL)
        visible = None if kept_BM is None else kept_BM[:, ::2]
        if self.chunk:
            seen_1SS = self.visible(np.arange(x_BSD.shape[1]), np.arange(x_BSD.shape[1]))[None]
            visible = jnp.asarray(seen_1SS) if visible is None else visible[:, None] & seen_1SS
        x_BSD, _ = self.encoder_blocks(x_BSD, visible)
        return sharding.constrain(self.encoder_norm(x_BSD), *INSIDE)

    def begin_stream(self, first_B1C: jax.Array) -> dict[str, Any]:
        """Return the state of an encoder that attends by chunks, before the first chunk, given the very first frame.

        A convolution reads the frame after, so that what arrives is one frame ahead of what is encoded: 10 ms.
        """
        if not self.chunk:
            raise UserError("model.audio_chunk", "without it the encoder attends to what comes later, too",
                            "train with one such as 50: a second")
        stack, (positions, dim) = self.encoder_blocks, self.audio_positions[...].shape
        held = self.chunk * (self.chunks_back or -(-positions // self.chunk))  # of the past, of all layers
        rows = len(first_B1C)
        past = jnp.zeros((stack.num_layers, rows, held, *self.heads), first_B1C.dtype)
        return {"frames": jnp.concatenate([jnp.zeros_like(first_B1C), first_B1C], 1), "at": jnp.int32(0),
                "inner": jnp.zeros((rows, 1, dim), first_B1C.dtype), "past": {"keys": past, "values": past}}

    def encode_next(self, state: dict[str, Any], frames_BMC: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        """Return the memory of the next chunk, and the state after it.

        `frames_BMC` are the two frames of each of its positions, from the second on, and the first of the next chunk;
        zeros behind the end.
        """
        frames, at = jnp.concatenate([state["frames"], frames_BMC], 1), state["at"]
        inner = jnp.concatenate([state["inner"], exact_gelu(self.first.inside(frames))], 1)
        x_BSD = exact_gelu(self.second.inside(inner)) + self.positions_at(at, self.chunk)
        held = state["past"]["keys"].shape[2]
        to_S = jnp.arange(held + self.chunk) - held + at
        visible_BTS = (self.visible(at + jnp.arange(self.chunk), to_S) & (to_S >= 0))[None]
        x_BSD, told = self.encoder_blocks(x_BSD, visible_BTS, cache=Cache(state["past"]))
        return self.encoder_norm(x_BSD), {"frames": frames[:, -2:], "inner": inner[:, -1:], "at": at + self.chunk,
                                          "past": told[CACHE]}

    def visible(self, of_T: Any, to_S: Any) -> Any:
        """Return which positions of the encoder see which others [T, S], where they attend by chunks."""
        back_TS = (of_T // self.chunk)[:, None] - (to_S // self.chunk)[None]
        return (back_TS >= 0) & ((back_TS <= self.chunks_back) if self.chunks_back else True)

    def positions_at(self, first: Any, count: int) -> jax.Array:
        """Return the positions of the encoder from `first` on."""
        weights = self.audio_positions[...]
        if count > weights.shape[0]:
            raise UserError("model.audio_positions", f"{count} positions of audio are more than its "
                            f"{weights.shape[0]}", "cut the audio into chunks, such as of 30 seconds")
        table = sharding.gather(weights, "positions", "embed")
        return jax.lax.dynamic_slice_in_dim(table, first, count)[None]

    def decode(self, tokens_BT: jax.Array, memory_BSD: jax.Array | None, valid_BS: jax.Array | None = None,
               first: Any = 0, cache: Cache | None = None) -> tuple[jax.Array, Any]:
        """Return the final normalized activation of each token, and the cache's new entries where there is a cache.

        Args:
            tokens_BT: tokens whose positions are those from `first` on.
            memory_BSD: what `encode` returned; None: the cache has its keys and values.
            valid_BS: which of its positions are not padding; a model that does not mask padding reads them all.
        """
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]) + first, tokens_BT.shape)
        x_BTD = self.embed(tokens_BT) + self.positions(positions_BT)
        visible_BS = None
        if valid_BS is not None and self.masks:
            visible_BS = sharding.constrain(valid_BS != 0, "batch", None)
        x_BTD, told = self.blocks(x_BTD, memory_BSD, visible_BS, cache=cache)
        return sharding.constrain(self.norm(x_BTD), *INSIDE), told.get(CACHE)

    def head(self) -> jax.Array:
        """Return the output projection w_DV, laid out as at rest: the embedding table."""
        return self.embed.head()

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Return float32 logits of final activations."""
        head_DV = sharding.gather(self.head(), "embed", "vocab")
        return jnp.einsum("btd,dv->btv", x_BTD, head_DV, preferred_element_type=jnp.float32,
                          out_sharding=sharding.activation_spec("batch", "seq", "act_vocab"))

    def __call__(self, features_BMC: jax.Array, tokens_BT: jax.Array, valid_BM: jax.Array | None = None) -> jax.Array:
        """Return float32 logits for every token."""
        valid_BS = None if valid_BM is None else valid_BM[:, ::2]
        return self.logits(self.decode(tokens_BT, self.encode(features_BMC, valid_BM), valid_BS)[0])


def silent_after(x_BMC: jax.Array, kept_BM: jax.Array) -> jax.Array:
    """Return frames with silence for those that are not kept: at most 8 decades, 2 in a frame, below the loudest."""
    loudest_B = jnp.where(kept_BM[..., None], x_BMC, -jnp.inf).max((1, 2))
    silence_B = jnp.where(jnp.isfinite(loudest_B), jnp.maximum(loudest_B - 2, SILENCE), 0).astype(x_BMC.dtype)
    return jnp.where(kept_BM[..., None], x_BMC, silence_B[:, None, None])


def sinusoids(length: int, dim: int) -> jax.Array:
    """Return the fixed positions [length, dim]: sines, then cosines, of wavelengths from 2 pi to 10,000 times that."""
    angles = np.arange(length)[:, None] * np.exp(-np.log(10_000) * np.arange(dim // 2) / (dim // 2 - 1))
    return jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], 1), jnp.float32)


def whisper(c: WhisperConfig, compute: Compute, *, rngs: nnx.Rngs) -> Whisper:
    """Build a Whisper model."""
    return Whisper(c, compute, rngs=rngs)


def _norm(c: WhisperConfig, rngs: nnx.Rngs) -> LayerNorm:
    return LayerNorm(c.embed_dim, c.norm_eps, rngs=rngs)


def _attention(c: WhisperConfig, layers: int) -> dict[str, Any]:
    return {"dim": c.embed_dim, "heads": c.num_heads, "kv_heads": c.num_heads, "head_dim": c.head_dim,
            "qkv_bias": True, "k_bias": False, "out_bias": True, "out_std": _out_std(layers)}


def _out_std(layers: int) -> float:
    return 0.02 / (2 * layers) ** 0.5


def _with_mlp(block: Any, x_BTD: jax.Array) -> jax.Array:
    h = sharding.enter(block.mlp_norm(x_BTD), INSIDE, shared_by=("act_mlp",))
    return x_BTD + block.mlp(h)
