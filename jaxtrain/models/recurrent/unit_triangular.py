"""Systems with a lower triangular matrix of ones on the diagonal, solved by products of matrices alone.

A triangular solve goes row by row. With the inverses A' and D' of two blocks, that of [[A, 0], [C, D]] is
[[A', 0], [-D' C A', D']], so blocks of 2, 4, ... rows need products alone, which accelerators are made for. On CPUs
they are quicker as well: the threads of LAPACK's solve get in the way of XLA's.
"""

import jax
import jax.numpy as jnp
import numpy as np

_BLOCK = 16  # rows; smaller blocks are inverted within these


@jax.custom_vjp
def solve(a: jax.Array, right: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Return x [..., C, V] for each b of `right`, with (1 + L) x = b, where L [..., C, C] is a below its diagonal.

    C is a power of 2.
    """
    return _forward(a, right)[0]


def _forward(a, right):
    inverse = _inverse(a)
    found = tuple(inverse @ b for b in right)
    return found, (inverse, found)


def _backward(saved, gradients):
    inverse, found = saved
    right = tuple(jnp.einsum("...ji,...jk->...ik", inverse, dx) for dx in gradients)
    products = [jnp.einsum("...ik,...jk->...ij", db, x) for db, x in zip(right, found, strict=True)]
    return -jnp.tril(sum(products), -1), right


solve.defvjp(_forward, _backward)


def _inverse(a):
    matrices, rows = a.reshape(-1, *a.shape[-2:]), a.shape[-1]
    size, block = 1, min(_BLOCK, rows)
    inverse, diagonal = jnp.eye(block), _blocks(matrices, block, block, 0)
    at = np.arange(block)
    while size < block:
        below = (at[:, None] // size == at // size + 1) & (at // size % 2 == 0)
        inverse, size = inverse - _product(inverse, jnp.where(below, diagonal, 0), inverse), 2 * size
    inverse = jnp.broadcast_to(inverse, diagonal.shape)
    while size < rows:
        first, second = inverse[:, 0::2], inverse[:, 1::2]
        new = -_product(second, _blocks(matrices, size, 2 * size, size), first)
        inverse, size = jnp.block([[first, jnp.zeros_like(new)], [new, second]]), 2 * size
    return inverse.reshape(a.shape)


def _product(*matrices):
    """Return the product of matrices in full float32: errors of an inverse would grow from block to block."""
    first, *others = matrices
    for other in others:
        first = jnp.matmul(first, other, precision="highest")
    return first


def _blocks(matrices, size, step, below):
    """Return the blocks [..., blocks, size, size] that begin at each `step`-th column, so many rows `below` it."""
    return jnp.stack([matrices[:, i + below:i + below + size, i:i + size]
                      for i in range(0, matrices.shape[-1], step)], 1)
