"""Attention within chunks of a text, by turns with attention to all of it, as in Llama 4.

Layers that attend within chunks have rotary positions, and their queries and keys may be normalised after they turned;
the others have none, and a factor of queries that grows with the position.

Shape suffixes: B batch, T sequence, H heads, K head width.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.models.attention.kv_cache import Aux, Cache, attend_cached, kept
from jaxtrain.models.attention.query_temperature import Tempered
from jaxtrain.models.attention.rotary import Angles, Rotary
from jaxtrain.models.attention.self_attention import Attention, attend


class ChunkPositions(Tempered):
    """The angles, the factors of queries, and the positions themselves, which say where a chunk ends."""

    def angles(self, positions_BT: jax.Array) -> tuple[Angles, jax.Array, jax.Array]:  # pyrefly: ignore[bad-override]
        """Return all three."""
        return *super().angles(positions_BT), positions_BT


class ChunkedAttention(Attention):
    """Grouped-query self-attention within chunks of `window` tokens, or to everything without rotary positions."""

    def __init__(self, *sizes: int, turns: bool, norm_eps: float = 0.0, **how: Any):
        """Make the projections.

        Args:
            turns: whether there are rotary positions, and chunks where there is a window.
            norm_eps: epsilon of the norm of turned queries and keys, which has no scale; 0: there is none.
        """
        super().__init__(*sizes, **how)
        self.turns, self.norm_eps = turns, norm_eps

    @property
    def unclippable(self) -> str:
        """Return why its logits do not shrink with the weights of queries and keys; "" if they do."""
        return "queries and keys are normalised" if self.turns and self.norm_eps else super().unclippable

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None,
                 angles: tuple[Angles, jax.Array, jax.Array], cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        (turn, factor_BT11, positions_BT), (q, k, v) = angles, self.project(x_BTD)
        if self.turns:
            q, k = Rotary.rotate(q, turn), Rotary.rotate(k, turn)
            q, k = (_normalised(x, self.norm_eps) for x in (q, k)) if self.norm_eps else (q, k)
        else:
            q = (q * factor_BT11).astype(q.dtype)
        chunk = self.window if self.turns else 0
        if cache is not None and cache.entries is not None:
            near = positions_BT % chunk + 1 if chunk else 0
            return attend_cached(partial(self.returned, x_BTD), q, k, v, cache, near)
        if chunk and chunk < x_BTD.shape[1]:
            segments_BT = in_chunks(segments_BT, positions_BT, chunk)
        y_BTHK = attend(q, k, v, segments_BT=segments_BT, backend=self.backend, context=self.context)
        return self.returned(x_BTD, y_BTHK), kept(cache, k, v)


def in_chunks(segments_BT: jax.Array | None, positions_BT: jax.Array, chunk: int) -> jax.Array:
    """Return segments of which each is one chunk of a document; those of padding stay 0."""
    segments_BT = jnp.ones_like(positions_BT) if segments_BT is None else segments_BT.astype(positions_BT.dtype)
    most = -(-positions_BT.shape[1] // chunk)  # chunks of a document
    return jnp.where(segments_BT > 0, segments_BT * most + positions_BT // chunk, 0)


def _normalised(x_BTHK: jax.Array, eps: float) -> jax.Array:
    """Return heads divided by the root of the mean of their squares, in float32."""
    x = x_BTHK.astype(jnp.float32)
    return (x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)).astype(x_BTHK.dtype)
