"""Host memory, where the optimizer state may be kept between steps."""

import jax
import jax.numpy as jnp

from jaxtrain.base.annotations import PyTree

HOST = "pinned_host"  # the memory kind that devices access directly


def fetched(x: jax.Array) -> jax.Array:
    """Move an array to device memory if it is in host memory, in a compiled function."""
    return jax.device_put(x, jax.memory.Space.Device) if jax.typeof(x).memory_space == jax.memory.Space.Host else x


def copied(tree: PyTree) -> PyTree:
    """Return a copy of each array, where the array lies."""
    leaves, treedef = jax.tree.flatten(tree)
    here = iter(_on_devices([x for x in leaves if x.sharding.memory_kind != HOST]))
    return treedef.unflatten([_in_hosts(x) if x.sharding.memory_kind == HOST else next(here) for x in leaves])


@jax.jit
def _on_devices(leaves: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(x) for x in leaves]  # a jit that returned its arguments would return the same buffers


def _in_hosts(x: jax.Array) -> jax.Array:
    """Copy an array within host memory, without going through a device."""
    return jax.device_put(x, x.sharding, may_alias=False)
