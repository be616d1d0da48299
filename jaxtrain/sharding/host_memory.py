"""Host memory, where the optimizer state may be kept between steps."""


import jax

HOST = "pinned_host"  # the memory kind that devices access directly


def fetched(x: jax.Array) -> jax.Array:
    """Move an array to device memory if it is in host memory, in a compiled function."""
    return jax.device_put(x, jax.memory.Space.Device) if jax.typeof(x).memory_space == jax.memory.Space.Host else x
