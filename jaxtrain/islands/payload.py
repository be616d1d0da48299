"""The encoding of an island's vector: whole, rounded, or by a lossy codec whose losses are kept and sent later."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxtrain.config.sections.island_keys import LOSSY
from jaxtrain.errors import UserError
from jaxtrain.parallel.compression import codecs, payload_bytes


class Plain:
    """The elements of a vector one after the other, in a dtype."""

    def __init__(self, dtype: Any):
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def encode(self, vector: np.ndarray, unsent: np.ndarray | None = None,
               count: int = 0) -> tuple[bytes, np.ndarray | None]:
        """Return the bytes of a vector, and what they lack of it: nothing that is remembered."""
        return vector.astype(self._dtype).tobytes(), unsent

    def decode(self, content: bytes, size: int) -> np.ndarray:
        """Return the vector of this size, in float32."""
        if len(content) != size * self._dtype.itemsize:
            raise _other()
        return np.frombuffer(content, self._dtype).astype(np.float32)


class Coded:
    """A vector as one of the codecs of compression writes it; computed on the host, the same bits everywhere."""

    def __init__(self, method: str):
        self._codec = codecs.make(method)

    def encode(self, vector: np.ndarray, unsent: np.ndarray | None = None,
               count: int = 0) -> tuple[bytes, np.ndarray | None]:
        """Return the bytes of a vector and what was unsent before, and what is unsent now.

        `random_k` chooses other places at each count; all that send at one count send those of the same places.
        """
        lacking = np.zeros_like(vector) if unsent is None else unsent
        with _on_host():
            payload, state = self._codec.encode(vector, {"error": lacking, "count": np.array(count, np.int32)})
            content = payload_bytes.to_bytes({"": (self._codec, jax.device_get(payload), vector.shape)})
            return content, np.asarray(jax.device_get(state["error"]))

    def decode(self, content: bytes, size: int) -> np.ndarray:
        """Return the vector of this size, in float32."""
        try:
            codec, payload, shape = payload_bytes.from_bytes(content).get("", (None, {}, ()))
        except UserError as error:  # what another way of compression writes
            raise _other() from error
        if codec != self._codec or shape != (size,):
            raise _other()
        with _on_host():
            return np.array(jax.device_get(self._codec.decode(payload, shape)))


def make_payload(compression: str) -> Plain | Coded:
    """Return what writes vectors as `islands.compression` says."""
    if compression in LOSSY:
        return Coded(compression)
    return Plain({"none": np.float32, "bfloat16": ml_dtypes.bfloat16}[compression])


@contextlib.contextmanager
def _on_host() -> Iterator[None]:
    with jax.default_device(jax.local_devices(backend="cpu")[0]), jax.transfer_guard("allow"):
        yield


def _other() -> UserError:
    return UserError("islands.meeting", "another island sent parameters of another model, or compressed otherwise",
                     "give all islands equal configs, but for islands.index; begin anew with a new log and new "
                     "workdirs, since this log has it for good")
