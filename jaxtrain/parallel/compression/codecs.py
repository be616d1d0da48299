"""Lossy codecs with error feedback: what an array loses is remembered, and added to the next one before it is encoded.

So the sum of what was decoded stays within one remembered error of the sum of what was given (arXiv 1901.09847).

    codec = make("int8")
    state = codec.begin(x.shape)
    payload, state = codec.encode(x, state)   # a dict of arrays to send, and what it lost
    codec.decode(payload, x.shape)            # float32

All functions are pure and can be traced. Arrays are taken as float32, flat, in blocks, the last one filled with zeros.
Letters: N blocks, B values in a block, K values kept of each; PowerSGD has its own.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.base.annotations import AnyArray
from jaxtrain.errors import UserError

Payload = dict[str, AnyArray]  # the arrays that are sent
State = dict[str, AnyArray]  # what a sender keeps
Shape = tuple[int, ...]
F32 = jnp.float32
LAYERS = frozenset(("layers", "every_layer"))  # logical names of the dimension that counts a stack's layers


@dataclass(frozen=True)
class Codec:
    """A codec that turns an array into a payload and back; this one is exact."""

    name: ClassVar[str] = "exact"

    def begin(self, shape: Shape) -> State:
        """Return the state of a sender that has sent nothing: no error."""
        return {"error": jnp.zeros(shape, F32)} if type(self) is not Codec else {}

    def encode(self, x: AnyArray, state: State) -> tuple[Payload, State]:
        """Return the payload of an array and what was lost before, and the sender's next state."""
        wanted = x.astype(F32) + state["error"] if "error" in state else x.astype(F32)
        payload, rest = self.compress(wanted, state)
        return payload, rest | ({"error": wanted - self.decode(payload, x.shape)} if "error" in state else {})

    def compress(self, wanted: AnyArray, state: State) -> tuple[Payload, State]:
        """Return the payload of an array alone, and the sender's next state except for the error."""
        return {"values": wanted}, {}

    def decode(self, payload: Payload, shape: Shape) -> AnyArray:
        """Return the array that a payload stands for, in float32."""
        return payload["values"]

    def abstract(self, shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of the payload of an array of this shape."""
        return dict(_traced(self, shape))

    def size(self, shape: Shape) -> int:
        """Return the bytes of such a payload."""
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in self.abstract(shape).values())

    def settings(self) -> dict[str, int | float]:
        """Return the fields of this codec, as `make` takes them."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Quantized(Codec):
    """Integers at equal distances, with one float32 scale for each block: its largest magnitude has the last level."""

    block: int = 256
    levels: ClassVar[int] = 127

    def __post_init__(self):
        if self.block < 2 or self.block % 2:
            raise UserError("block", f"{self.block} is not an even number of values above 0", "try 256")

    def compress(self, wanted: AnyArray, state: State) -> tuple[Payload, State]:
        """Return integers and scales."""
        return self.narrow(in_blocks(wanted, self.block)), {}

    def decode(self, payload: Payload, shape: Shape) -> AnyArray:
        """Return integers times scales."""
        return from_blocks(self.wide(payload), shape)

    def narrow(self, x_NB: AnyArray) -> Payload:
        """Return the integers and scales of blocks; of a block that is not finite, neither is the scale."""
        scale_N = jnp.abs(x_NB).max(1) / self.levels
        levels_NB = jnp.round(x_NB / jnp.where(scale_N == 0, 1, scale_N)[:, None])
        return {"values": self._packed(levels_NB.astype(jnp.int8)), "scales": scale_N}

    def wide(self, payload: Payload) -> AnyArray:
        """Return the blocks, with whatever dimensions precede them."""
        return self._unpacked(payload["values"]).astype(F32) * payload["scales"][..., None]

    def _packed(self, levels_NB: AnyArray) -> AnyArray:
        return levels_NB

    def _unpacked(self, values: AnyArray) -> AnyArray:
        return values


@dataclass(frozen=True)
class Int8(Quantized):
    """8 bits a value: levels from -127 to 127."""

    name: ClassVar[str] = "int8"


@dataclass(frozen=True)
class Int4(Quantized):
    """4 bits a value: levels from -7 to 7; a byte holds one of the first and one of the second half of a block."""

    name: ClassVar[str] = "int4"
    block: int = 64
    levels: ClassVar[int] = 7

    def _packed(self, levels_NB: AnyArray) -> AnyArray:
        first, second = jnp.split((levels_NB + 8).astype(jnp.uint8), 2, axis=1)
        return first | (second << 4)

    def _unpacked(self, values: AnyArray) -> AnyArray:
        return jnp.concatenate([values & 15, values >> 4], -1).astype(jnp.int8) - 8


@dataclass(frozen=True)
class TopK(Codec):
    """The values of largest magnitude of each block, and where they are in it."""

    name: ClassVar[str] = "top_k"
    ratio: float = 0.01  # of the values that are kept; of each block at least one
    block: int = 4096

    def __post_init__(self):
        _check_ratio(self.ratio)
        if not 1 <= self.block <= 2**16:
            raise UserError("block", f"16 bits cannot number {self.block} values", "use 1 to 65536")

    def compress(self, wanted: AnyArray, state: State) -> tuple[Payload, State]:
        """Return values and positions."""
        x_NB = in_blocks(wanted, self._block(wanted.shape))
        _, where_NK = jax.lax.top_k(jnp.abs(x_NB), self.kept(wanted.shape))
        return {"values": jnp.take_along_axis(x_NB, where_NK, 1), "positions": where_NK.astype(jnp.uint16)}, {}

    def decode(self, payload: Payload, shape: Shape) -> AnyArray:
        """Return zeros but where values were kept."""
        many = payload["values"].shape[0]
        zeros_NB = jnp.zeros((many, self._block(shape)), F32)
        found = zeros_NB.at[jnp.arange(many)[:, None], payload["positions"].astype(jnp.int32)].set(
            payload["values"], unique_indices=True)
        return from_blocks(found, shape)

    def kept(self, shape: Shape) -> int:
        """Return how many values of a block are kept."""
        return max(1, round(self.ratio * self._block(shape)))

    def _block(self, shape: Shape) -> int:
        return min(self.block, math.prod(shape))


@dataclass(frozen=True)
class RandomK(Codec):
    """One value of each group, at a random place that follows from the seed and a counter and so is not sent.

    All that send at the same count keep the same places: their payloads can be added.
    """

    name: ClassVar[str] = "random_k"
    ratio: float = 0.01  # of the values that are kept: a group has 1 / ratio of them
    seed: int = 0

    def __post_init__(self):
        _check_ratio(self.ratio)

    def begin(self, shape: Shape) -> State:
        """Return no error, and the count 0."""
        return {"error": jnp.zeros(shape, F32), "count": jnp.zeros((), jnp.int32)}

    def compress(self, wanted: AnyArray, state: State) -> tuple[Payload, State]:
        """Return the values at the places of this count."""
        x_NB = in_blocks(wanted, self.group(wanted.shape))
        where_N = self._places(len(x_NB), x_NB.shape[1], state["count"])
        values_N = jnp.take_along_axis(x_NB, where_N[:, None], 1)[:, 0]
        return {"values": values_N, "count": state["count"]}, {"count": state["count"] + 1}

    def decode(self, payload: Payload, shape: Shape) -> AnyArray:
        """Return zeros but at the places of the payload's count."""
        group = self.group(shape)
        where_N = self._places(len(payload["values"]), group, payload["count"])
        here_NB = where_N[:, None] == jnp.arange(group)
        return from_blocks(jnp.where(here_NB, payload["values"][:, None], 0), shape)

    def group(self, shape: Shape) -> int:
        """Return how many values share one that is sent."""
        return min(int(1 / max(self.ratio, 1e-9)), math.prod(shape))

    def _places(self, many: int, group: int, count: AnyArray) -> AnyArray:
        key = jax.random.fold_in(jax.random.key(self.seed), count)
        return jax.random.randint(key, (many,), 0, group)


@dataclass(frozen=True)
class PowerSGD(Codec):
    """PowerSGD (arXiv 1905.13727): a matrix as the product of two thin ones, by one step of a power iteration.

    The iteration goes on from array to array: the right factor of one is where that of the next begins. An array of
    more dimensions is cut where its two sides are most alike. S stacked matrices, M rows, N columns, R rank.
    """

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

    def compress(self, wanted: AnyArray, state: State) -> tuple[Payload, State]:
        """Return the left factor, whose columns are orthonormal, and the right one."""
        x_SMN = wanted.reshape(self.matrices(wanted.shape))
        left_SMR = self.left(x_SMN, state["right"])
        right_SNR = self.right(x_SMN, left_SMR)
        return {"left": left_SMR, "right": right_SNR}, {"right": right_SNR}

    def decode(self, payload: Payload, shape: Shape) -> AnyArray:
        """Return the product of the factors."""
        return jnp.einsum("smr,snr->smn", payload["left"], payload["right"], precision="highest").reshape(shape)

    def left(self, x_SMN: AnyArray, right_SNR: AnyArray) -> AnyArray:
        """Return an orthonormal basis of what the matrices make of the right factor."""
        return orthonormal(self.projected(x_SMN, right_SNR))

    def projected(self, x_SMN: AnyArray, right_SNR: AnyArray) -> AnyArray:
        """Return the matrices times the right factor."""
        return jnp.einsum("smn,snr->smr", x_SMN, right_SNR, precision="highest")

    def right(self, x_SMN: AnyArray, left_SMR: AnyArray) -> AnyArray:
        """Return the right factor that fits best to this left one."""
        return jnp.einsum("smn,smr->snr", x_SMN, left_SMR, precision="highest")

    def matrices(self, shape: Shape) -> tuple[int, int, int]:
        """Return an array's shape as [S, M, N], M + N as small as can be."""
        front, rest = shape[:self.stacked], shape[self.stacked:]
        cuts = [(math.prod(rest[:cut]), math.prod(rest[cut:])) for cut in range(len(rest) + 1)]
        return (math.prod(front), *min(cuts, key=sum))


@functools.lru_cache(maxsize=1024)  # a message is checked against the shapes of each of its arrays
def _traced(codec: Codec, shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    return jax.eval_shape(lambda: codec.compress(jnp.zeros(shape, F32), codec.begin(shape))[0])


def in_blocks(x: AnyArray, block: int, multiple: int = 1) -> AnyArray:
    """Return an array as [N, block], N a multiple of `multiple`, filled with zeros."""
    size = math.prod(x.shape)
    many = -(-size // (block * multiple)) * multiple
    return jnp.pad(x.reshape(-1), (0, many * block - size)).reshape(many, block)


def from_blocks(x_NB: AnyArray, shape: Shape) -> AnyArray:
    """Return the array of this shape that such blocks hold."""
    return x_NB.reshape(-1)[:math.prod(shape)].reshape(shape)


def orthonormal(x_SMR: AnyArray) -> AnyArray:
    """Return an orthonormal basis of the columns; for columns that depend on others, any that completes it."""
    return jnp.linalg.qr(x_SMR)[0]


def make(method: str, settings: Mapping[str, Any] | None = None, *, stacked: int = 0) -> Codec:
    """Return the codec of this name with these settings, those left out at their defaults.

    Args:
        stacked: how many leading dimensions count matrices, for `power_sgd`.
    """
    kinds = {kind.name: kind for kind in (Codec, Int8, Int4, TopK, RandomK, PowerSGD)}
    if method not in kinds:
        raise UserError("method", f"{method!r} is not a codec", f"use one of {', '.join(kinds)}")
    known = {field.name for field in dataclasses.fields(kinds[method])}
    return kinds[method](**{key: value for key, value in {"stacked": stacked, **(settings or {})}.items()
                            if key in known})


def for_shape(codec: Codec, shape: Shape) -> Codec:
    """Return the codec, or the exact one for an array that it would not make smaller."""
    return codec if codec.size(shape) < 4 * math.prod(shape) else Codec()


def for_parameter(method: str, settings: Mapping[str, Any], names: Sequence[str | None] | None,
                  shape: Shape) -> Codec:
    """Return the codec of a parameter of this shape, or of a part of it, by its logical names.

    A stack has a matrix for each of its layers, which follow one after the other along its first dimension.
    """
    stacked = int(not LAYERS.isdisjoint((names or ())[:1]))
    return for_shape(make(method, settings, stacked=stacked), shape)


def _check_ratio(ratio: float) -> None:
    if not 0 < ratio <= 1:
        raise UserError("ratio", f"{ratio} is not in (0, 1]", "try 0.01")
