"""Transfer a batch from the host to the mesh."""

from functools import partial

import jax
from jax.sharding import NamedSharding

from jaxtrain.data.loading.batch_source import BatchSource


def place_batch(batches: BatchSource, step: int, where: NamedSharding) -> dict[str, jax.Array]:
    """Return the batch of a step on the mesh; each process reads only the rows that its own devices hold."""
    if jax.process_count() == 1:
        return jax.device_put(batches[step], where)
    size, _ = shape = batches.shape(step)
    held = {tuple(i.indices(n)[:2] for i, n in zip(index, shape, strict=True)): index
            for index in where.addressable_devices_indices_map(shape).values() if index is not None}
    rows = sorted({row for (first, last), _ in held for row in range(first, last)})
    local = batches.rows(step, rows)
    at = {row: i for i, row in enumerate(rows)}

    def piece(key, index):
        first, last, _ = index[0].indices(size)
        return local[key][at[first]: at[last - 1] + 1]

    return {key: jax.make_array_from_callback(shape, where, partial(piece, key)) for key in local}
