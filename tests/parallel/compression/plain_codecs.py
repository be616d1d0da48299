"""The codecs, what each sends and what arrives, in plain NumPy, one block after the other."""

import math

import numpy as np


def arrived(codec, x, count=0, right=None):
    """The array that arrives when a codec sends this one, and the right factor that PowerSGD goes on from."""
    if codec.name == "power_sgd":
        return low_rank(codec, x, right)
    flat = x.reshape(-1).astype(np.float32)
    out = np.zeros_like(flat)
    if codec.name == "exact":
        out[:] = flat
    elif codec.name in ("int8", "int4"):
        most = {"int8": 127, "int4": 7}[codec.name]
        for at in range(0, len(flat), codec.block):
            part = flat[at:at + codec.block]
            scale = np.abs(part).max() / np.float32(most)
            out[at:at + codec.block] = np.round(part / (scale or 1)) * scale
    elif codec.name == "top_k":
        block = min(codec.block, len(flat))
        for at in range(0, len(flat), block):
            part = flat[at:at + block]
            kept = np.argsort(-np.abs(part), kind="stable")[:max(1, round(codec.ratio * block))]
            out[at + kept] = part[kept]
    else:
        for at in places(codec, len(flat), count):
            if at < len(flat):
                out[at] = flat[at]
    return out.reshape(x.shape), None


def places(codec, size, count):
    """Return the places that random-k picks: one in each group. The random numbers are JAX's own."""
    import jax

    group = min(int(1 / codec.ratio), size)
    many = math.ceil(size / group)
    key = jax.random.fold_in(jax.random.key(codec.seed), count)
    return np.arange(many) * group + np.asarray(jax.random.randint(key, (many,), 0, group))


def low_rank(codec, x, right):
    """Each matrix by itself; columns are made orthogonal one after the other, in float64."""
    matrices, out, factors = x.reshape(codec.matrices(x.shape)).astype(np.float64), [], []
    for matrix, old in zip(matrices, right, strict=True):
        left = orthonormal(matrix @ np.float64(old))
        factors.append(matrix.T @ left)
        out.append(left @ factors[-1].T)
    return np.stack(out).reshape(x.shape), np.stack(factors)


def orthonormal(columns):
    """Gram and Schmidt's, twice."""
    basis = np.zeros_like(columns)
    for i in range(columns.shape[1]):
        column = columns[:, i]
        for _ in range(2):
            column = column - basis[:, :i] @ (basis[:, :i].T @ column)
        basis[:, i] = column / np.linalg.norm(column)
    return basis
