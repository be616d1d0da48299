"""The tiles in which rows that are sorted by group are multiplied: each holds rows of one group."""

import jax
import jax.numpy as jnp


def row_tiles(sizes_G: jax.Array, rows: int, tile: int) -> jax.Array:
    """Return the group, the first row and the row behind the last of each tile [3, S]; what follows them is empty.

    A tile lies in one block of `tile` rows. Rows behind the last group form a further group.
    """
    sizes = jnp.append(sizes_G, rows - sizes_G.sum()).astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    counts = jnp.where(sizes > 0, -(-ends // tile) - starts // tile, 0)
    behind = jnp.cumsum(counts)
    number = jnp.arange(-(-rows // tile) + sizes_G.size, dtype=jnp.int32)
    group = (behind <= number[:, None]).sum(1, dtype=jnp.int32)
    here = jnp.minimum(group, sizes_G.size)
    block = starts[here] // tile + number - (behind - counts)[here]
    begin, end = jnp.maximum(starts[here], block * tile), jnp.minimum(ends[here], (block + 1) * tile)
    empty = group > sizes_G.size
    return jnp.stack([here, jnp.where(empty, 0, begin), jnp.where(empty, 0, end)])
