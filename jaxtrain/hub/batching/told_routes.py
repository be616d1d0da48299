"""Read the routes of texts' tokens from the entries of a cache, where layers with experts keep them.

Shape suffixes: N layers with experts, B rows, S slots, K experts of a token.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import PyTree
from jaxtrain.models.decoder import Decoder
from jaxtrain.models.experts.kept_routes import ROUTES


def taken(entries: PyTree, rows: jax.Array) -> jax.Array:
    """Return the routes in some rows of a batch, or in some pages, of all layers that have them [N, B, S, K]."""
    found = []
    for _, routes in _by_layer(entries):
        stacked = routes if routes.ndim > 3 else routes[None]  # a layer's own have no dimension of layers or of heads
        stacked = stacked[:, :, 0] if stacked.ndim > 4 else stacked
        everywhere = jax.reshard(stacked.astype(jnp.int16), P(*[None] * stacked.ndim))  # any device may have the row
        found.append(everywhere[:, rows])
    return jnp.concatenate(found)


def layers_of(entries: PyTree) -> list[int]:
    """Return the numbers of the layers that have routes, among all of the model."""
    return [number for numbers, _ in _by_layer(entries) for number in numbers]


def of_text(taken_NSK: np.ndarray, layers: Sequence[int], slots: int, many: int) -> np.ndarray:
    """Return the routes of a text's tokens by all of the model's layers; below 0: a layer has no experts."""
    found = np.full((slots, many, taken_NSK.shape[-1]), -1, np.int16)
    found[:, list(layers)] = taken_NSK[:, :slots].swapaxes(0, 1)
    return found


def _by_layer(entries: PyTree) -> list[tuple[range, jax.Array]]:
    """Return the routes of each layer, or of each place in groups of layers, with the layers' numbers."""
    found, first = [], 0
    for name in Decoder.STACKS:
        if not entries.get(name):
            continue
        parts = entries[name] if isinstance(entries[name], list) else [entries[name]]
        apart = isinstance(entries[name], list)
        each = max(1, sum(key.startswith("layer_") for key in parts[0]))
        count = len(parts) if apart else len(jax.tree.leaves(parts[0])[0])
        for number, part in enumerate(parts):
            for at in range(each):
                layer = part.get(f"layer_{at}", part) or {}
                if ROUTES in layer:
                    begin = first + at + number * each
                    found.append((range(begin, begin + 1) if apart else range(begin, begin + count * each, each),
                                  layer[ROUTES]))
        first += count * each
    return found
