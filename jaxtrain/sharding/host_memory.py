"""The hosts' memory, where the optimizer's state may lie between steps."""

from typing import Any

import jax

HOST = "pinned_host"  # the kind of it that devices copy from and to by themselves


def fetched(x: Any) -> Any:
    """In a compiled function: an array on the devices, wherever it was."""
    return jax.device_put(x, jax.memory.Space.Device) if jax.typeof(x).memory_space == jax.memory.Space.Host else x
