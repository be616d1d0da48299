"""Whisper: an encoder of log-mel frames, and a decoder of tokens that attends to it (Radford et al., arXiv 2212.04356).

Both convolutions read neighbours: a position of the encoder three results of the first one, and so five frames. Each
position has a copy of its five, so that a mesh may split positions as it splits tokens, with nothing to exchange.

Shape suffixes: B batch, M frames of the input, C mels, S positions of the encoder (two frames each), T tokens,
D embedding, V vocabulary.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.base.annotations import PyTree
from jaxtrain.config.modality_families import SILENCE, WhisperConfig
from jaxtrain.config.remat_policies import policies
from jaxtrain.errors import UserError
from jaxtrain.kernels.gelus import exact_gelu
from jaxtrain.models.attention.kv_cache import CACHE, Aux, Cache
from jaxtrain.models.attention.memory_attention import MemoryAttention
from jaxtrain.models.attention.self_attention import Attention
from jaxtrain.models.decoder import Compute
from jaxtrain.models.layers import (
    INSIDE,
    RESIDUAL,
    Embed,
    GeluMLP,
    Head,
    LayerNorm,
    LearnedPositions,
    Linear,
    Stack,
    positioned,
)
from jaxtrain.sharding import activations

if TYPE_CHECKING:
    from jaxtrain.parallel.pipeline.stage_placement import Slots

WIDTH, READ = 3, 5  # of a convolution; frames that a position of the encoder reads


class Convolution(nnx.Module):
    """A convolution over time, as one product of each three neighbours with the weights, and GELU."""

    def __init__(self, given: int, dim: int, *, rngs: nnx.Rngs):
        axes = (None, None, "embed")
        self.linear = Linear("btwc,wcd->btd", (WIDTH, given, dim), axes, RESIDUAL, bias=True, rngs=rngs)

    def __call__(self, x_BS3C: jax.Array) -> jax.Array:
        return exact_gelu(self.linear(x_BS3C))


class EncoderBlock(nnx.Module):
    """A pre-norm residual block whose positions attend to each other, then an MLP."""

    def __init__(self, c: WhisperConfig, compute: Compute, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = _norm(c, rngs), _norm(c, rngs)
        self.attention = MemoryAttention(**_attention(c, c.encoder_layers), backend=compute.attention, rngs=rngs)
        self.mlp = GeluMLP(c.embed_dim, c.mlp_dim, out_std=_out_std(c.encoder_layers), rngs=rngs, kind=exact_gelu)

    def __call__(self, x_BSD: jax.Array, visible: jax.Array | None,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        """Return the activations; with a cache, also the keys and values that the next chunk attends to."""
        h, told = activations.enter(self.attention_norm(x_BSD), INSIDE, shared_by=self.attention.shared_by), {}
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
        self.attention = Attention(**_attention(c, c.num_layers), backend=compute.attention, context=compute.context,
                                   rngs=rngs)
        self.memory = MemoryAttention(**_attention(c, c.num_layers), backend=compute.attention, rngs=rngs)
        self.mlp = GeluMLP(c.embed_dim, c.mlp_dim, out_std=_out_std(c.num_layers), rngs=rngs, kind=exact_gelu)

    def __call__(self, x_BTD: jax.Array, memory_BSD: jax.Array | None, visible_BS: jax.Array | None,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        """Return the activations; with a cache, also its new entries under `own` and `memory`."""
        h = activations.enter(self.attention_norm(x_BTD), INSIDE, shared_by=self.attention.shared_by)
        y_BTD, own = self.attention(h, None, None, cache and cache.of("own"))
        x_BTD += y_BTD
        h = activations.enter(self.memory_norm(x_BTD), INSIDE, shared_by=("act_heads",))
        if memory_BSD is not None:
            memory_BSD = activations.enter(memory_BSD, INSIDE, shared_by=("act_kv_heads",))
        y_BTD, seen = self.memory(h, memory_BSD, visible_BS, cache and cache.of("memory"))
        told = {} if cache is None else {CACHE: {"own": own[CACHE], "memory": seen[CACHE]}}
        return _with_mlp(self, x_BTD + y_BTD), told


class Whisper(nnx.Module):
    """Frames and tokens to logits; `encode`, `decode` and `head` are separate so that no loss holds all logits."""

    logit_cap = 0.0  # logits have no soft cap
    STACKS = ("encoder_blocks", "blocks")  # parameters that can be split over pipeline stages, in order

    def __init__(self, c: WhisperConfig, compute: Compute, *, rngs: nnx.Rngs):
        self.masks, self.again = c.mask_padding, compute.remat != "none"
        self.chunk, self.chunks_back, self.heads = c.audio_chunk, c.audio_chunks_back, (c.num_heads, c.head_dim)
        self.first, self.second = (Convolution(given, c.embed_dim, rngs=rngs) for given in (c.mels, c.embed_dim))
        self.audio_positions = nnx.Param(sinusoids(c.audio_positions, c.embed_dim), axes=("positions", "embed"),
                                         compute_dtype="", update="")
        stack = partial(Stack, unroll=compute.unroll, rngs=rngs)
        self.encoder_blocks = stack(lambda rngs: EncoderBlock(c, compute, rngs), c.encoder_layers,
                                    remat=policies(compute.remat, c.encoder_layers))
        self.encoder_norm = _norm(c, rngs)
        self.ctc = Head(c.vocab_size, c.embed_dim, rngs=rngs) if c.ctc_weight else None
        self.embed = Embed(c.vocab_size, c.embed_dim, rngs=rngs)
        self.positions = LearnedPositions(c.max_seq_len, c.embed_dim, rngs=rngs)
        self.blocks = stack(lambda rngs: DecoderBlock(c, compute, rngs), c.num_layers,
                            remat=policies(compute.remat, c.num_layers))
        self.norm = _norm(c, rngs)

    def encode(self, features_BMC: jax.Array, valid_BM: jax.Array | None = None) -> jax.Array:
        """Return the memory [B, ceil(M / 2), D] of log-mel frames, of which `valid_BM` are not padding.

        Padding has no influence on it, or is silence to a model that does not mask it.
        """
        audio = self.windows(features_BMC, valid_BM)
        return self.memory(self.encoder_blocks(self.begin(audio), self.seen(audio))[0])

    # The parts of `encode`; a pipeline runs them on different stages.
    def windows(self, features_BMC: jax.Array, valid_BM: jax.Array | None = None) -> dict[str, jax.Array]:
        """Return what each position of the encoder reads.

        Returns:
            its five `frames` [B, S, 5, C], which of these are `there`, its number `audio_at`, and, whole on the devices
            that share a row, which positions are `heard`, being no padding.
        """
        rows, length = features_BMC.shape[:2]
        count = -(-length // 2)
        if count > (most := self.audio_positions[...].shape[0]):
            raise UserError("model.audio_positions", f"{count} positions of audio are more than its {most}",
                            "cut the audio into chunks, such as of 30 seconds")
        x_BMC = activations.constrain(features_BMC, "batch", None, None)
        all_BM = activations.constrain(jnp.ones((rows, length), bool), "batch", None)
        kept_BM = heard_BM = all_BM if valid_BM is None else activations.constrain(valid_BM != 0, "batch", None)
        if not self.masks:
            x_BMC, kept_BM = silent_after(x_BMC, kept_BM), all_BM

        def five(x):
            around = [(0, 0), (2, 2 * count + 1 - length), *[(0, 0)] * (x.ndim - 2)]
            x = jnp.pad(x, around)
            x = jnp.stack([x[:, n:n + 2 * count - 1:2] for n in range(READ)], 2)
            return activations.constrain(x, "batch", "seq", *(None,) * (x.ndim - 2))

        at_BS = jnp.broadcast_to(jnp.arange(count), (rows, count))
        return {"frames": five(x_BMC * kept_BM[..., None].astype(x_BMC.dtype)), "there": five(kept_BM),
                "audio_at": activations.constrain(at_BS, "batch", "seq"), "heard": heard_BM[:, ::2]}

    def begin(self, audio: Mapping[str, jax.Array]) -> jax.Array:
        """Return the encoder's first activations of what `windows` returned."""
        x_BS5C = activations.constrain(audio["frames"], "batch", "block_seq", None, None)
        there_BS5 = activations.constrain(audio["there"], "batch", "block_seq", None).astype(x_BS5C.dtype)

        def inner(x_BS5C: jax.Array) -> jax.Array:
            return jnp.stack([self.first(x_BS5C[:, :, n:n + WIDTH]) * there_BS5[:, :, n + 1, None]
                              for n in range(WIDTH)], 2)

        # Three results a position, each from few frames: large, and computed again in little time.
        inner_BS3D = (jax.checkpoint(inner) if self.again else inner)(x_BS5C)
        return self.second(inner_BS3D) + positioned(self.audio_positions[...], audio["audio_at"])

    def seen(self, audio: Mapping[str, jax.Array]) -> jax.Array | None:
        """Return which positions of the encoder all of its positions attend to [B, S], or each [B, S, S]; None: all."""
        heard_BS = audio["heard"]
        if not self.chunk:
            return heard_BS if self.masks else None
        seen_BSS = self.visible(audio["audio_at"], jnp.arange(heard_BS.shape[1]))
        return seen_BSS & heard_BS[:, None] if self.masks else seen_BSS

    def memory(self, x_BSD: jax.Array) -> jax.Array:
        """Return what the decoder attends to, of the encoder's last activations."""
        return activations.constrain(self.encoder_norm(x_BSD), *INSIDE)

    def begin_stream(self, first_B1C: jax.Array) -> dict[str, PyTree]:
        """Return the state of an encoder that attends by chunks, before the first chunk, given the very first frame.

        A convolution reads the frame after, so that what arrives is one frame ahead of what is encoded: 10 ms.
        """
        if not self.chunk:
            raise UserError("model.audio_chunk", "without it the encoder attends to what comes later, too",
                            "train with one such as 50: a second")
        stack, positions = self.encoder_blocks, self.audio_positions[...].shape[0]
        held = self.chunk * (self.chunks_back or -(-positions // self.chunk))  # of the past, of all layers
        past = jnp.zeros((stack.num_layers, len(first_B1C), held, *self.heads), first_B1C.dtype)
        return {"frames": jnp.pad(first_B1C, ((0, 0), (2, 0), (0, 0))), "at": jnp.int32(0),
                "there": jnp.broadcast_to(np.arange(3) == 2, (len(first_B1C), 3)),
                "past": {"keys": past, "values": past}}

    def encode_next(self, state: dict[str, PyTree], frames_BMC: jax.Array,
                    valid_BM: jax.Array | None = None) -> tuple[jax.Array, Aux]:
        """Return the memory of the next chunk, and the state after it.

        `frames_BMC` are the two frames of each of its positions, from the second on, and the first of the next chunk;
        zeros behind the end. `valid_BM`: which of them are not padding, where audio ends within the chunk.
        """
        valid_BM = jnp.ones(frames_BMC.shape[:2], bool) if valid_BM is None else valid_BM != 0
        frames, there, at = *(jnp.concatenate([state[name], new], 1) for name, new in (
            ("frames", frames_BMC * valid_BM[..., None].astype(frames_BMC.dtype)), ("there", valid_BM))), state["at"]
        read_S5 = 2 * np.arange(self.chunk)[:, None] + np.arange(READ)
        at_1S = at + jnp.arange(self.chunk)[None]
        x_BSD = self.begin({"frames": frames[:, read_S5], "there": there[:, read_S5], "audio_at": at_1S})
        held = state["past"]["keys"].shape[2]
        to_S = jnp.arange(held + self.chunk) - held + at
        heard_BS = jnp.pad(there[:, 2:-1:2], ((0, 0), (held, 0)), constant_values=True)
        seen_BSS = self.visible(at_1S, to_S) & (to_S >= 0) & heard_BS[:, None]
        x_BSD, told = self.encoder_blocks(x_BSD, seen_BSS, cache=Cache(state["past"]))
        return self.memory(x_BSD), {"frames": frames[:, -3:], "there": there[:, -3:], "at": at + self.chunk,
                                    "past": told[CACHE]}

    def visible(self, of_BT: jax.Array, to_S: jax.Array) -> jax.Array:
        """Return which positions of the encoder see which others [B, T, S], where they attend by chunks."""
        back_BTS = (of_BT // self.chunk)[..., None] - to_S // self.chunk
        return (back_BTS >= 0) & ((back_BTS <= self.chunks_back) if self.chunks_back else True)

    def decode(self, tokens_BT: jax.Array, memory_BSD: jax.Array | None, valid_BS: jax.Array | None = None,
               first: jax.Array | int = 0, cache: Cache | None = None) -> tuple[jax.Array, PyTree]:
        """Return the final normalized activation of each token, and the cache's new entries where there is a cache.

        Args:
            tokens_BT: tokens whose positions are those from `first` on.
            memory_BSD: what `encode` returned; None: the cache has its keys and values.
            valid_BS: which of its positions are not padding; a model that does not mask padding reads them all.
        """
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]) + first, tokens_BT.shape)
        visible_BS = valid_BS != 0 if valid_BS is not None and self.masks else None
        x_BTD, told = self.blocks(self.read(tokens_BT, positions_BT), memory_BSD, visible_BS, cache=cache)
        return self.finish(x_BTD), told.get(CACHE)

    # The parts of `decode`.
    def read(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Return the embeddings of tokens."""
        return self.embed(tokens_BT) + self.positions(positions_BT)

    def through(self, x: tuple[jax.Array, jax.Array], audio: Mapping[str, jax.Array],
                slots: "Mapping[str, Slots] | None" = None) -> tuple[jax.Array, jax.Array]:
        """Apply all layers, or those in the `slots` of a stage, to the activations of the encoder and of the decoder.

        Those of the encoder stay as they are where all of its layers come before: so they reach every layer of the
        decoder.
        """
        (x_BSD, x_BTD), slots = x, slots or {}
        x_BSD, _ = self.encoder_blocks(x_BSD, self.seen(audio), slots=slots.get("encoder_blocks"))
        visible_BS = audio["heard"] if self.masks else None
        x_BTD, _ = self.blocks(x_BTD, self.memory(x_BSD), visible_BS, slots=slots.get("blocks"))
        return x_BSD, x_BTD

    def finish(self, x_BTD: jax.Array) -> jax.Array:
        """Apply the last norm."""
        return activations.constrain(self.norm(x_BTD), *INSIDE)

    def head(self) -> jax.Array:
        """Return the output projection w_DV, laid out as at rest: the embedding table."""
        return self.embed.head()

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Return float32 logits of final activations."""
        head_DV = activations.gather(self.head(), "embed", "vocab")
        return jnp.einsum("btd,dv->btv", x_BTD, head_DV, preferred_element_type=jnp.float32,
                          out_sharding=activations.activation_spec("batch", "seq", "act_vocab"))

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
    h = activations.enter(block.mlp_norm(x_BTD), INSIDE, shared_by=("act_mlp",))
    return x_BTD + block.mlp(h)
