"""Transfer a batch from the host to the mesh."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.loading.grain_datasets.prefetch import prefetch

Where = Callable[[int], NamedSharding]  # the sharding of an array of this many dimensions; only the first is split


def own_rows(size: int, where: Where) -> list[int]:
    """Return the rows of a batch of `size` rows that this process's devices hold."""
    return sorted({row for index in where(1).addressable_devices_indices_map((size,)).values() if index is not None
                   for row in range(*index[0].indices(size))})


def place_rows(local: dict[str, np.ndarray], size: int, where: Where,
               check: Callable[[dict[str, np.ndarray]], object] = lambda batch: None) -> dict[str, jax.Array]:
    """Return a batch of `size` rows on the mesh, of which this process gives `own_rows`.

    `check`: refuses rows that lack arrays, or have others.
    """
    check(local)
    if jax.process_count() == 1:
        return {key: jax.device_put(x, where(np.ndim(x))) for key, x in local.items()}
    at = {row: i for i, row in enumerate(own_rows(size, where))}

    def piece(x, index):
        first, last, _ = index[0].indices(size)
        return x[at[first]: at[last - 1] + 1]

    local = {key: np.asarray(x, jnp.result_type(x)) for key, x in local.items()}
    return {key: jax.make_array_from_callback((size, *x.shape[1:]), where(x.ndim), partial(piece, x))
            for key, x in local.items()}


def place_batch(batches: BatchSource, step: int, where: Where,
                check: Callable[[dict[str, np.ndarray]], object] = lambda batch: None) -> dict[str, jax.Array]:
    """Return the batch of a step on the mesh; each process reads only the rows that its own devices hold."""
    if jax.process_count() == 1:
        return place_rows(batches[step], 0, where, check)
    size = batches.shape(step)[0]
    return place_rows(batches.rows(step, own_rows(size, where)), size, where, check)


def placed_ahead(batches: BatchSource, start: int, stop: int, where: Where,
                 check: Callable[[dict[str, np.ndarray]], object], depth: int, workers: int = 0) -> prefetch:
    """Iterate over the batches of these steps on the mesh; each process reads only the rows that its devices hold."""
    several = jax.process_count() > 1
    rows = {size: own_rows(size, where) for size, _ in batches.shapes_of(start, stop)} if several else None

    def place(step: int, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        with jax.transfer_guard("allow"):  # the loop forbids those that nobody asked for, and places the first batch
            return place_rows(local, batches.shape(step)[0] if several else 0, where, check)

    return prefetch(batches, start, stop, place, depth, rows=rows, workers=workers)
