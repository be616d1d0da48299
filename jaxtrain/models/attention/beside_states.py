"""Attention and a mixer with a state side by side: both read the same, and what they return is added."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
from flax import nnx

from jaxtrain.base.annotations import PyTree
from jaxtrain.models.attention.kv_cache import CACHE, STATE, Aux, Cache

Part = Callable[..., nnx.Module]  # as in rotary_decoder.py


def beside(attention: Part, states: Part, **factors: float) -> Part:
    """Return what makes both of a layer, of what makes each."""
    return partial(AttentionBesideStates, attention, states, **factors)


class AttentionBesideStates(nnx.Module):
    """Attention beside a mixer with a state."""

    shared_by = ("act_heads", "act_kv_heads")  # output dimensions of the first matmuls of both

    def __init__(self, attention: Part, states: Part, *, given: float = 1.0, attended: float = 1.0, mixed: float = 1.0,
                 out_std: float, rngs: nnx.Rngs):
        """Make both.

        Args:
            attention: makes attention.
            states: makes the mixer.
            given: factor of what attention is given.
            attended: factor of what attention returns.
            mixed: factor of what the mixer returns.
        """
        self.given, self.attended, self.mixed = given, attended, mixed
        self.attention = attention(out_std=out_std, rngs=rngs)
        self.states = states(out_std=out_std, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: PyTree,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        slots = cache
        if cache is not None and cache.entries is not None:
            slots = replace(cache, entries={key: held for key, held in cache.entries.items() if key != STATE})
        y_BTD, kept = self.attention(_times(x_BTD, self.given), segments_BT, angles, cache=slots)
        z_BTD, state = self.states(x_BTD, segments_BT, angles, cache=cache)
        out = _times(y_BTD, self.attended) + _times(z_BTD, self.mixed)
        return out, {} if cache is None else {CACHE: kept[CACHE] | state[CACHE]}


def _times(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else (x * factor).astype(x.dtype)
