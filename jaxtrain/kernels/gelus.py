"""GELU as published models have it, each in float32: by the error function, or by a logistic function."""

import jax
import jax.numpy as jnp


def exact_gelu(x: jax.Array) -> jax.Array:
    """Return GELU by the error function."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


def quick_gelu(x: jax.Array) -> jax.Array:
    """Return x sigmoid(1.702 x), as in CLIP."""
    y = x.astype(jnp.float32)
    return (y * jax.nn.sigmoid(1.702 * y)).astype(x.dtype)
