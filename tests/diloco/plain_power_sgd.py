"""PowerSGD with error feedback as an island sends by it, in plain NumPy: one matrix after the other, in float64."""

import math

import jax
import numpy as np

from tests.parallel.compression.plain_codecs import orthonormal


class Sender:
    """An island that remembers, for each array, what it has not sent of it."""

    def __init__(self, rank, rounds=2):
        self.rank, self.rounds, self.unsent, self.count = rank, rounds, {}, 0

    def sent(self, tree, layers=lambda path: False):
        """Return what of a tree of arrays arrives. `layers`: of which paths each layer is a matrix by itself."""
        found = jax.tree_util.tree_map_with_path(lambda path, x: self._array(path, x, layers(path)), tree)
        self.count += 1
        return found

    def _array(self, path, x, layered):
        wanted = np.asarray(x, np.float64) + self.unsent.get(path, 0)
        stack = wanted if layered else wanted[None]
        sides = min(([math.prod(stack.shape[1:cut]), math.prod(stack.shape[cut:])]
                     for cut in range(1, stack.ndim + 1)), key=sum)
        arrived = wanted
        if self.rank * sum(sides) < math.prod(sides):
            key = jax.random.fold_in(jax.random.key(0), self.count)  # the random numbers are JAX's own
            start = np.float64(jax.random.normal(key, (len(stack), sides[1], self.rank)))
            arrived = np.stack([self._matrix(*pair) for pair in zip(stack.reshape(-1, *sides), start, strict=True)])
            arrived = arrived.reshape(wanted.shape)
        self.unsent[path] = wanted - arrived
        return arrived

    def _matrix(self, matrix, right):
        for _ in range(self.rounds):
            left = orthonormal(matrix @ right)
            right = matrix.T @ left
        return left @ right.T
