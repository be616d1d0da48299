"""Transfer a batch from the host to the mesh."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxtrain.data.loading.batch_source import BatchSource


def place_batch(batches: BatchSource, step: int, where: Callable[[int], NamedSharding],
                check: Callable[[Any], Any] = lambda batch: None) -> dict[str, jax.Array]:
    """Return the batch of a step on the mesh; each process reads only the rows that its own devices hold.

    Args:
        where: the sharding of an array of this many dimensions, of which only the first is split.
        check: refuses a batch, or some rows of one, that lacks arrays, or has others.
    """
    if jax.process_count() == 1:
        batch = batches[step]
        check(batch)
        return {key: jax.device_put(x, where(np.ndim(x))) for key, x in batch.items()}
    size = batches.shape(step)[0]
    rows = sorted({row for index in where(1).addressable_devices_indices_map((size,)).values() if index is not None
                   for row in range(*index[0].indices(size))})
    local = batches.rows(step, rows)
    check(local)
    at = {row: i for i, row in enumerate(rows)}

    def piece(x, index):
        first, last, _ = index[0].indices(size)
        return x[at[first]: at[last - 1] + 1]

    local = {key: np.asarray(x, jnp.result_type(x)) for key, x in local.items()}
    return {key: jax.make_array_from_callback((size, *x.shape[1:]), where(x.ndim), partial(piece, x))
            for key, x in local.items()}
