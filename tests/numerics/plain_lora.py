"""The effect of low-rank adapters, in plain operations: other matrices in the same model."""

import jax
import jax.numpy as jnp
import numpy as np


def merged(params, scale: float):
    """Nested parameters with every adapter added to its matrix, and left out."""
    if not isinstance(params, dict):
        return params
    found = {key: merged(inner, scale) for key, inner in params.items() if key != "adapter"}
    if "scales" in params:
        found["kernel"] = dequantized(found.pop("scales"), params["kernel"])
    if "adapter" in params and "kernel" not in params:  # of experts: one for each, by the name of the matrix
        for name, one in params["adapter"].items():
            found[name] = found[name] + scale * jnp.matmul(one["down"], one["up"], precision="highest")
    elif "adapter" in params:
        kernel, a, b = found["kernel"], params["adapter"]["down"], params["adapter"]["up"]
        stacked, rank = kernel.shape[:a.ndim + b.ndim - 2 - kernel.ndim], a.shape[-1]  # a layer that looks ahead is not
        product = jnp.matmul(a.reshape(*stacked, -1, rank), b.reshape(*stacked, rank, -1), precision="highest")
        if "start_down" in params["adapter"]:  # PiSSA
            a, b = (params["adapter"][name] for name in ("start_down", "start_up"))
            product -= jnp.matmul(a.reshape(*stacked, -1, rank), b.reshape(*stacked, rank, -1), precision="highest")
        found["kernel"] = kernel + scale * product.reshape(kernel.shape)
        if "magnitude" in params["adapter"]:  # DoRA, with norms that are constants (arXiv 2402.09353, section 4.3)
            m = params["adapter"]["magnitude"]
            inner = tuple(range(len(stacked), kernel.ndim - m.ndim + len(stacked)))
            before, after = (jnp.sqrt((jax.lax.stop_gradient(w) ** 2).sum(inner, keepdims=True))
                             for w in (kernel, found["kernel"]))
            found["kernel"] *= m.reshape(before.shape) * before / after
    return found


# QLoRA's 4-bit NormalFloat (arXiv 2305.14314, appendix E).
LEVELS = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
          -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
          0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]


def dequantized(scales, values):
    """A weight of a value and a scale for each element; two values of 4 bits share a byte, the lower bits first."""
    d = next(d for d in range(values.ndim) if values.shape[d] != scales.shape[d])
    values = jnp.moveaxis(values, d, 0)
    if values.dtype == jnp.uint8:
        numbers = jnp.stack([values % 16, values // 16], 1).reshape(2 * len(values), *values.shape[1:])
        values = jnp.asarray(LEVELS, jnp.float32)[numbers]
    scales = jnp.moveaxis(jnp.asarray(scales, jnp.float32), d, 0)
    return jnp.moveaxis(values.astype(jnp.float32) * jnp.repeat(scales, len(values) // len(scales), axis=0), 0, d)


def at_random(params, seed: int = 0):
    """The same parameters, with adapters of which neither matrix is zero, nor a value head."""
    rng = np.random.default_rng(seed)

    def one(path, leaf):
        name = jax.tree_util.keystr(path)
        mean, own = 1 if "magnitude" in name else 0, "adapter" in name or "value_head" in name
        return rng.normal(mean, 0.05, leaf.shape).astype(np.float32) if own else leaf

    return jax.tree_util.tree_map_with_path(one, params)
