"""Layers that differ, in a stack that is scanned: groups of them, and blocks that are told their number."""

from collections.abc import Callable, Sequence

import jax
from flax import nnx

from jaxtrain.models.attention.kv_cache import CACHE, Aux, Cache
from jaxtrain.models.decoder import Block


class Group(nnx.Module):
    """Layers that differ, applied in turn: what is stacked where only every n-th layer has experts."""

    def __init__(self, layers: Sequence[Callable[[nnx.Rngs], nnx.Module]], remat: Callable[[Callable], Callable],
                 rngs: nnx.Rngs):
        self.names, self.remat = tuple(f"layer_{number}" for number in range(len(layers))), remat
        for name, layer in zip(self.names, layers, strict=True):
            setattr(self, name, layer(rngs))

    def __call__(self, x_BTD: jax.Array, segments_BT, angles,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        aux, entries = {}, {}
        for name in self.names:
            graphdef, weights = nnx.split(getattr(self, name))

            @self.remat
            def apply(x, weights, graphdef=graphdef, name=name):
                return nnx.merge(graphdef, weights)(x, segments_BT, angles, cache and cache.of(name))

            x_BTD, aux = apply(x_BTD, weights)  # the last layer has experts, which report something
            entries[name] = aux.pop(CACHE, None)
        return x_BTD, aux if cache is None else aux | {CACHE: entries}


class NumberedBlock(Block):
    """A block whose attention reads the number of the layer."""

    def __call__(self, x_BTD: jax.Array, segments_BT, angles, layer,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        return super().__call__(x_BTD, segments_BT, (*angles, layer), cache)
