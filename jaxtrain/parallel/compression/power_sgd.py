"""PowerSGD (arXiv 1905.13727): a matrix as the product of two thin ones, by one step of a power iteration.

The iteration goes on from array to array: the right factor of one is where that of the next begins.

Shape suffixes: S stacked matrices, M rows, N columns, R rank.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.parallel.compression.codecs import F32, Codec, Payload, Shape, State


@dataclass(frozen=True)
class PowerSGD(Codec):
    """Matrices of low rank. An array of more dimensions is cut where its two sides are most alike."""

    name: ClassVar[str] = "power_sgd"
    rank: int = 4
    stacked: int = 0  # leading dimensions that count matrices, such as a stack's layers

    def __post_init__(self):
        if self.rank < 1:
            raise UserError("rank", f"{self.rank} is below 1", "try 4")

    def begin(self, shape: Shape) -> State:
        """Return no error, and a right factor of random numbers, which are the same for all senders."""
        S, M, N = self.matrices(shape)
        factor_SNR = jax.random.normal(jax.random.key(0), (S, N, min(self.rank, M, N)), F32)
        return {"error": jnp.zeros(shape, F32), "right": factor_SNR}

    def compress(self, wanted: Any, state: State) -> tuple[Payload, State]:
        """Return the left factor, whose columns are orthonormal, and the right one."""
        x_SMN = wanted.reshape(self.matrices(wanted.shape))
        left_SMR = self.left(x_SMN, state["right"])
        right_SNR = self.right(x_SMN, left_SMR)
        return {"left": left_SMR, "right": right_SNR}, {"right": right_SNR}

    def decode(self, payload: Payload, shape: Shape) -> Any:
        """Return the product of the factors."""
        return jnp.einsum("smr,snr->smn", payload["left"], payload["right"], precision="highest").reshape(shape)

    def left(self, x_SMN: Any, right_SNR: Any) -> Any:
        """Return an orthonormal basis of what the matrices make of the right factor."""
        return orthonormal(self.projected(x_SMN, right_SNR))

    def projected(self, x_SMN: Any, right_SNR: Any) -> Any:
        """Return the matrices times the right factor."""
        return jnp.einsum("smn,snr->smr", x_SMN, right_SNR, precision="highest")

    def right(self, x_SMN: Any, left_SMR: Any) -> Any:
        """Return the right factor that fits best to this left one."""
        return jnp.einsum("smn,smr->snr", x_SMN, left_SMR, precision="highest")

    def matrices(self, shape: Shape) -> tuple[int, int, int]:
        """Return an array's shape as [S, M, N], M + N as small as can be."""
        front, rest = shape[:self.stacked], shape[self.stacked:]
        cuts = [(math.prod(rest[:cut]), math.prod(rest[cut:])) for cut in range(len(rest) + 1)]
        return (math.prod(front), *min(cuts, key=sum))


def orthonormal(x_SMR: Any) -> Any:
    """Return an orthonormal basis of the columns; for columns that depend on others, any that completes it."""
    return jnp.linalg.qr(x_SMR)[0]
