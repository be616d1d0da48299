"""Local and global attention by turns: local layers have a sliding window and rotary positions of their own.

All layers of a stack have parameters of the same shapes: a layer learns from its number which kind it is.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.base.annotations import AnyArray
from jaxtrain.models.attention.by_layer.attention_by_layer import attend_by_layer
from jaxtrain.models.attention.kv_cache import Cache, attend_cached, kept
from jaxtrain.models.attention.rotary import Angles, Rotary
from jaxtrain.models.attention.self_attention import Attention


class BothRotaries:
    """The rotary positions of local and of global layers."""

    def __init__(self, local: Rotary, everywhere: Rotary):
        self.local, self.everywhere = local, everywhere

    def angles(self, positions_BT: jax.Array) -> tuple[Angles, Angles]:
        """Return the angles of local layers, and those of global ones."""
        return self.local.angles(positions_BT), self.everywhere.angles(positions_BT)


class LocalOrGlobalAttention(Attention):
    """Grouped-query self-attention; the number of the layer says whether it is local."""

    numbered = True

    def __init__(self, global_every: int, *args: Any, query_factor: float = 1.0, soft_cap: float = 0.0,
                 **how: Any):
        """Make every `global_every`-th layer global.

        Args:
            query_factor: of queries, after their rotation.
            soft_cap: of scores; 0: none.
        """
        super().__init__(*args, **how)
        self.global_every, self.query_factor, self.soft_cap = global_every, query_factor, soft_cap

    def everywhere(self, layer: AnyArray) -> AnyArray:
        """Return whether the layer with this number has no window."""
        return (layer + 1) % self.global_every == 0

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: tuple[Angles, Angles],
                 layer: AnyArray, cache: Cache | None = None) -> tuple[jax.Array, dict[str, Any]]:
        q, k, v = self.project(x_BTD)
        everywhere = self.everywhere(layer)
        turn = jax.tree.map(lambda near, far: jnp.where(everywhere, far, near), *angles)
        q, k = Rotary.rotate(q, turn), Rotary.rotate(k, turn)
        if self.query_factor != 1:
            q = (q * self.query_factor).astype(q.dtype)
        if cache is not None and cache.entries is not None:
            window = jnp.where(everywhere, 0, self.window)
            return attend_cached(partial(self.returned, x_BTD), q, k, v, cache, window, soft_cap=self.soft_cap)
        out = attend_by_layer(everywhere, q, k, v, segments_BT=segments_BT, window=self.window, soft_cap=self.soft_cap,
                              backend=self.backend, context=self.context)
        return self.returned(x_BTD, out), kept(cache, k, v)
