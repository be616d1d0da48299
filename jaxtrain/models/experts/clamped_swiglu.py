"""The activation of gpt-oss's experts."""

import jax
import jax.numpy as jnp


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float, alpha: float) -> jax.Array:
    """Return gate sigmoid(alpha gate) (up + 1), with up clamped to the limit and the gate so from above."""
    g, u = jnp.minimum(gate.astype(jnp.float32), limit), jnp.clip(up.astype(jnp.float32), -limit, limit)
    return (g * jax.nn.sigmoid(alpha * g) * (u + 1)).astype(up.dtype)
