"""Faults that tests put into devices' memory."""

import jax
import numpy as np


def flipped(x: jax.Array, device: int, bits: int = 1, word: int = 0) -> jax.Array:
    """The same array, but that this device's copy or piece has bits flipped in one word."""
    shards = []
    for shard in x.addressable_shards:
        values = np.array(jax.device_get(shard.data))
        if shard.device.id == device:
            values.reshape(-1)[word:].view(f"uint{8 * x.dtype.itemsize}")[0] ^= bits
        shards.append(jax.device_put(values, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def flipped_somewhere(tree, device: int):
    """The largest leaf of the tree flipped."""
    leaves, treedef = jax.tree.flatten(tree)
    largest = max(range(len(leaves)), key=lambda i: leaves[i].size)
    leaves[largest] = flipped(leaves[largest], device)
    return treedef.unflatten(leaves)
