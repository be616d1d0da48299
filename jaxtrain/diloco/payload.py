"""The encoding of an island's vector: whole, rounded, or by a lossy codec whose losses are kept and sent later."""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from jaxtrain.config.sections.diloco_keys import LOSSY, DilocoConfig
from jaxtrain.errors import UserError
from jaxtrain.parallel.compression import codecs, payload_bytes
from jaxtrain.parallel.compression.codecs import Codec, Payload, PowerSGD, Shape
from jaxtrain.sharding.axis_rules import Names

ROUNDS = 2  # of power iteration for an offer


class Plain:
    """The elements of a vector one after the other, in a dtype."""

    from_first = False

    def __init__(self, dtype: DTypeLike, size: int):
        self._dtype, self._size = np.dtype(dtype).newbyteorder("<"), size

    def encode(self, vector: np.ndarray, unsent: np.ndarray | None = None,
               count: int = 0) -> tuple[bytes, np.ndarray | None]:
        """Return the bytes of a vector, and what they lack of it: nothing that is remembered."""
        return vector.astype(self._dtype).tobytes(), unsent

    def decode(self, content: bytes) -> np.ndarray:
        """Return the vector, in float32."""
        if len(content) != self._size * self._dtype.itemsize:
            raise _other()
        return np.frombuffer(content, self._dtype).astype(np.float32)


class Coded:
    """A vector as one of the codecs of compression writes it; computed on the host, the same bits everywhere."""

    from_first = False

    def __init__(self, method: str, size: int):
        self._codec, self._size = codecs.make(method), size

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

    def decode(self, content: bytes) -> np.ndarray:
        """Return the vector, in float32."""
        codec, payload, shape = _read(content).get("", (None, {}, ()))
        if codec != self._codec or shape != (self._size,):
            raise _other()
        with _on_host():
            return np.array(jax.device_get(self._codec.decode(payload, shape)))


class LowRank:
    """A vector of several arrays: matrices as their factors by PowerSGD, whatever that would not make smaller whole.

    Nobody waits for a round of power iteration here, and no link carries it. So every offer begins with random factors
    and makes several, instead of one that goes on from the factors of the offer before: there is nothing to keep.
    """

    from_first = True  # LAPACK may round otherwise on another host, so all processes take what the first one made

    def __init__(self, parts: Sequence[tuple[Codec, Shape]]):
        """Write vectors of these arrays, one after the other, each by its codec."""
        self._parts = {str(i): part for i, part in enumerate(parts)}

    def encode(self, vector: np.ndarray, unsent: np.ndarray | None = None,
               count: int = 0) -> tuple[bytes, np.ndarray | None]:
        """Return the bytes of a vector and what was unsent before, and what is unsent now.

        The iteration begins with other random factors at each count.
        """
        wanted = vector if unsent is None else vector + unsent
        ends = np.cumsum([math.prod(shape) for _, shape in self._parts.values()])
        message: payload_bytes.Message = {}
        with _on_host():
            for (name, (codec, shape)), x in zip(self._parts.items(), np.split(wanted, ends[:-1]), strict=True):
                message[name] = codec, jax.device_get(_compressed(codec, x.reshape(shape), count)), shape
            return payload_bytes.to_bytes(message), wanted - _joined(message)

    def decode(self, content: bytes) -> np.ndarray:
        """Return the vector, in float32."""
        message = _read(content)
        if {name: (codec, shape) for name, (codec, _, shape) in message.items()} != self._parts:
            raise _other()
        with _on_host():
            return _joined(message)


def _compressed(codec: Codec, x: np.ndarray, count: int) -> Payload:
    if not isinstance(codec, PowerSGD):
        return codec.compress(x, {})[0]
    key = jax.random.fold_in(jax.random.key(0), count)
    payload = {"right": jax.random.normal(key, codec.abstract(x.shape)["right"].shape)}
    for _ in range(ROUNDS):
        payload, _ = codec.compress(x, payload)
    return payload


def _joined(message: payload_bytes.Message) -> np.ndarray:
    return np.concatenate([(_product(payload["left"], payload["right"]) if isinstance(codec, PowerSGD) else
                            payload["values"]).ravel() for codec, payload, _ in message.values()])


def _product(left_SMR: np.ndarray, right_SNR: np.ndarray) -> np.ndarray:
    """Return the product of factors, by programs of one operation each: so all hosts get the same bits.

    A library's product of matrices, or a compiled sum of products, is rounded otherwise on another processor.
    """
    terms = (jnp.multiply(left_SMR[:, :, None, rank], right_SNR[:, None, :, rank])
             for rank in range(left_SMR.shape[-1]))
    return np.asarray(jax.device_get(functools.reduce(jnp.add, terms)))


def make_payload(config: DilocoConfig, parts: Sequence[tuple[Names | None, Shape]]) -> Plain | Coded | LowRank:
    """Return what writes vectors as `diloco.compression` says.

    Args:
        parts: logical names and shape of the arrays that such a vector has, one after the other.
    """
    method, size = config.compression, sum(math.prod(shape) for _, shape in parts)
    if method == PowerSGD.name:
        return LowRank([(codecs.for_parameter(method, {"rank": config.rank}, names, shape), shape)
                        for names, shape in parts])
    if method in LOSSY:
        return Coded(method, size)
    return Plain({"none": np.float32, "bfloat16": ml_dtypes.bfloat16}[method], size)


def _read(content: bytes) -> payload_bytes.Message:
    try:
        return payload_bytes.from_bytes(content)
    except UserError as error:  # what another way of compression writes
        raise _other() from error


@contextlib.contextmanager
def _on_host() -> Iterator[None]:
    with jax.default_device(jax.local_devices(backend="cpu")[0]), jax.transfer_guard("allow"):
        yield


def _other() -> UserError:
    return UserError("diloco.meeting", "another island sent parameters of another model, or compressed otherwise",
                     "give all islands equal configs, except for diloco.index; begin anew with a new log and new "
                     "workdirs, since this log has it for good")
