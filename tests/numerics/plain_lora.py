"""What adapters of low rank amount to, in plain operations: other matrices in the same model."""

import jax
import jax.numpy as jnp
import numpy as np


def merged(params, scale: float):
    """Nested parameters with every adapter added to its matrix, and left out."""
    if not isinstance(params, dict):
        return params
    found = {key: merged(inner, scale) for key, inner in params.items() if key != "adapter"}
    if "adapter" in params:
        kernel, a, b = params["kernel"], params["adapter"]["down"], params["adapter"]["up"]
        stacked, rank = kernel.shape[:a.ndim + b.ndim - 2 - kernel.ndim], a.shape[-1]  # a layer that looks ahead is not
        product = jnp.matmul(a.reshape(*stacked, -1, rank), b.reshape(*stacked, rank, -1), precision="highest")
        found["kernel"] = kernel + scale * product.reshape(kernel.shape)
    return found


def at_random(params, seed: int = 0):
    """The same parameters, with adapters of which neither matrix is zero."""
    rng = np.random.default_rng(seed)

    def one(path, leaf):
        is_adapter = "adapter" in jax.tree_util.keystr(path)
        return rng.normal(size=leaf.shape, scale=0.05).astype(np.float32) if is_adapter else leaf

    return jax.tree_util.tree_map_with_path(one, params)
