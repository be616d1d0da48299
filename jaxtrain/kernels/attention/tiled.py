"""Tiled attention by what computes the tiles of a backend: plain operations, or cuDNN."""

from types import ModuleType

import jax

from jaxtrain.kernels.attention import cudnn_tiles, tiles
from jaxtrain.kernels.attention.tiles import Pull, Scoring, Tokens


def forward(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, queries: Tokens, keys: Tokens, scoring: Scoring,
            own: bool = False) -> tuple[jax.Array, jax.Array]:
    """Return out [B, T, H, K] and lse [B, T, H], both float32.

    own: keys are those of the queries' tokens, in the order of their positions.
    """
    return _by(scoring, queries, keys, own).forward(q_BTHK, k_BSGK, v_BSGK, queries, keys, scoring, own)


def backward(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, pull: Pull, queries: Tokens, keys: Tokens,
             scoring: Scoring, own: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the contributions to dq, dk and dv in float32."""
    return _by(scoring, queries, keys, own).backward(q_BTHK, k_BSGK, v_BSGK, pull, queries, keys, scoring, own)


def _by(scoring: Scoring, queries: Tokens, keys: Tokens, own: bool) -> ModuleType:
    fits = cudnn_tiles.fits(len(queries.at), len(keys.at), own)
    return cudnn_tiles if scoring.kernel == "cudnn" and fits else tiles
