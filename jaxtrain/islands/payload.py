"""What an island sends: one vector as bytes, whole or compressed."""

from typing import Protocol

import ml_dtypes
import numpy as np

from jaxtrain.errors import UserError


class Payload(Protocol):
    """A way to write a vector of float32 as bytes."""

    def encode(self, vector: np.ndarray) -> bytes:
        """Return the bytes of a vector."""
        ...

    def decode(self, content: bytes, size: int) -> np.ndarray:
        """Return the vector of this size, in float32."""
        ...


class Plain:
    """The elements of a vector one after the other, in a dtype."""

    def __init__(self, dtype: type):
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def encode(self, vector: np.ndarray) -> bytes:
        """Return the elements."""
        return vector.astype(self._dtype).tobytes()

    def decode(self, content: bytes, size: int) -> np.ndarray:
        """Return them in float32."""
        if len(content) != size * self._dtype.itemsize:
            raise UserError("islands.meeting", "another island sent parameters of another model, or compressed otherwise",
                            "give all islands equal configs, but for islands.index")
        return np.frombuffer(content, self._dtype).astype(np.float32)


def make_payload(compression: str) -> Payload:
    """Return what writes vectors as `islands.compression` says."""
    return Plain({"none": np.float32, "bfloat16": ml_dtypes.bfloat16}[compression])
