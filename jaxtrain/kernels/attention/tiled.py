"""Tiled attention by what computes the tiles of a backend: plain operations, cuDNN, or splash attention.

Splash attention computes all that it is given at once. As its masks are known before any number is, it computes a
device's own block, and what all queries see: without a window these are all that a ring has.
"""

from types import ModuleType

import jax
import jax.numpy as jnp

from jaxtrain.kernels.attention import cudnn_tiles, splash_attention, tiles
from jaxtrain.kernels.attention.tiles import Pull, Scoring, Tokens

F32 = jnp.float32


def forward(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, queries: Tokens, keys: Tokens, scoring: Scoring,
            own: bool = False) -> tuple[jax.Array, jax.Array]:
    """Return out [B, T, H, K] and lse [B, T, H], both float32.

    own: keys are those of the queries' tokens, in the order of their positions.
    """
    if scoring.kernel == "splash" and not scoring.window:
        out, lse = splash_attention.part(q_BTHK, k_BSGK, v_BSGK, queries.segments, keys.segments, own, scoring.soft_cap)
        return out.astype(F32), lse
    return _by(scoring, queries, keys, own).forward(q_BTHK, k_BSGK, v_BSGK, queries, keys, scoring, own)


def backward(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, pull: Pull, queries: Tokens, keys: Tokens,
             scoring: Scoring, own: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the contributions to dq, dk and dv in float32."""
    if scoring.kernel == "splash" and not scoring.window:
        found = splash_attention.part_gradients(q_BTHK, k_BSGK, v_BSGK, pull.pull, pull.out, pull.lse,
                                                queries.segments, keys.segments, own, scoring.soft_cap)
        return found[0].astype(F32), found[1].astype(F32), found[2].astype(F32)
    return _by(scoring, queries, keys, own).backward(q_BTHK, k_BSGK, v_BSGK, pull, queries, keys, scoring, own)


def _by(scoring: Scoring, queries: Tokens, keys: Tokens, own: bool) -> ModuleType:
    fits = cudnn_tiles.fits(len(queries.at), len(keys.at), own)
    return cudnn_tiles if scoring.kernel == "cudnn" and fits else tiles
