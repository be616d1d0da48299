"""Files that hold one process's pieces of a state, each with a checksum, and arrays rebuilt from all pieces.

A file is a magic string, the length of a JSON header and a code of it, the header, and the bytes of the pieces. For
each piece the header names its leaf, its bounds in the leaf, so that any mesh can be filled from the files, and the
sha256 of its bytes. The code depends on the run's secret, if it has one, so that nobody else can make such a file.
"""

import hashlib
import hmac
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.base.annotations import JsonObject
from jaxtrain.distributed.authentication import derive
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import opened, parsed, reason

_MARK = b"jaxtrain-pieces\n"
_OPENING = len(_MARK) + 8 + 32  # the magic string, the length of the header, and its code
_BLOCK = 2**24
_HEADER = {"about": {"meta?": dict}, "pieces": [(str, str, [int], [(int, int)], int, int, str)]}
Bounds = tuple[tuple[int, int], ...]  # (start, stop) of each dimension
Read = Callable[[int, int], bytes]  # (offset, size) -> bytes of a file


class Damaged(Exception):
    """Raised when a file of pieces does not hold what was written."""


@dataclass(frozen=True)
class Piece:
    """A box of a leaf: its bounds within the leaf, and the position of its bytes in the file."""

    path: str
    dtype: str
    shape: tuple[int, ...]  # of the whole leaf
    bounds: Bounds
    offset: int
    size: int
    sha256: str

    @property
    def box(self) -> tuple[int, ...]:
        """The shape of the piece."""
        return tuple(stop - start for start, stop in self.bounds)


@dataclass(frozen=True)
class Header:
    """The header of a file; `about` is the writer's own metadata, such as step, run and process."""

    about: dict[str, Any]
    pieces: list[Piece]
    data: int  # offset of the first data byte


# ------------------------------------------------------------------------------------------- from devices to the host
def owned(flat: Mapping[str, jax.Array], process: int) -> list[tuple[str, Bounds, int]]:
    """Return the pieces that this process writes, as (leaf, bounds, shard number); each piece has one writer.

    Where several processes hold the same piece, the writer rotates from leaf to leaf to spread the work.
    """
    found = []
    for number, (path, leaf) in enumerate(flat.items()):
        holders: dict[Bounds, set[int]] = {}
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            holders.setdefault(bounds_of(index, leaf.shape), set()).add(device.process_index)
        here = {bounds_of(shard.index, leaf.shape): i for i, shard in reversed([*enumerate(leaf.addressable_shards)])}
        for bounds, shard in here.items():
            processes = sorted(holders[bounds])
            if processes[number % len(processes)] == process:
                found.append((path, bounds, shard))
    return found


def to_host(flat: Mapping[str, jax.Array], wanted: Sequence[tuple[str, Bounds, int]]) -> list[np.ndarray]:
    """Copy these pieces to host memory; the state may be donated as soon as this returns."""
    with jax.transfer_guard("allow"):  # on purpose
        shards = [flat[path].addressable_shards[shard].data for path, _, shard in wanted]
        for shard in shards:  # start all copies before waiting for the first
            shard.copy_to_host_async()
        # On CPU the array would alias the device's memory, which the next step overwrites.
        return [np.array(shard, copy=True if _is_host(shard) else None, order="C") for shard in shards]


def _is_host(array: jax.Array) -> bool:
    return next(iter(array.devices())).platform == "cpu"


def bounds_of(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    """Return a tuple of slices as (start, stop) pairs."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


# --------------------------------------------------------------------------------------------------------- in a file
def write(path: Path, about: JsonObject, names: Iterable[tuple[str, tuple[int, ...], Bounds]],
          arrays: Sequence[np.ndarray]) -> int:
    """Write a file of pieces atomically and return its size in bytes.

    Args:
        names: leaf, shape of the leaf and bounds of each array.
    """
    pieces, offset = [], 0
    contents = [array.reshape(-1).view(np.uint8).data for array in arrays]
    for (leaf, shape, bounds), array, content in zip(names, arrays, contents, strict=True):
        pieces.append(Piece(leaf, array.dtype.name, shape, bounds, offset, content.nbytes,
                            hashlib.sha256(content).hexdigest()))
        offset += content.nbytes
    header = json.dumps({"about": about, "pieces": [list(asdict(piece).values()) for piece in pieces]}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_files.written(path, durable=False, shared=False) as file:
        file.write(_MARK + len(header).to_bytes(8, "big") + _code(header) + header)
        for content in contents:
            file.write(content)
    return path.stat().st_size


def reader(path: Path) -> Read:
    """Return a function that reads parts of this file."""
    def read(offset: int, size: int) -> bytes:
        try:
            with opened(path) as file:
                file.seek(offset)
                return file.read(size)
        except OSError as error:
            raise Damaged(f"{path.name} cannot be read ({error.strerror})") from error
    return read


def read_header(read: Read) -> Header:
    """Return the header of a file; raises `Damaged` if it is not intact."""
    opening = read(0, _OPENING)
    if len(opening) < _OPENING or not opening.startswith(_MARK):
        raise Damaged("it is not a file of pieces")
    length = int.from_bytes(opening[len(_MARK): len(_MARK) + 8], "big")
    content = read(_OPENING, length) if length < 2**32 else b""
    if not hmac.compare_digest(_code(content), opening[len(_MARK) + 8:]):
        raise Damaged("its header is not what was written")
    try:
        header = parsed(content, _HEADER)
    except ValueError as error:
        raise Damaged(f"its header {reason(error)}") from None
    pieces = [Piece(path, dtype, tuple(shape), tuple(map(tuple, bounds)), *rest)
              for path, dtype, shape, bounds, *rest in header["pieces"]]
    return Header(header["about"], pieces, _OPENING + length)


def _code(header: bytes) -> bytes:
    return hmac.digest(derive("pieces"), header, "sha256")


def read_piece(read: Read, header: Header, piece: Piece) -> np.ndarray:
    """Read one piece; raises `Damaged` if its bytes are not those that were written."""
    content = read(header.data + piece.offset, piece.size)
    if hashlib.sha256(content).hexdigest() != piece.sha256:
        raise Damaged(f"{piece.path} is not what was written")
    return np.frombuffer(content, jnp.dtype(piece.dtype)).reshape(piece.box)


def check(path: Path) -> Header:
    """Verify every byte of a file and return its header; raises `Damaged` otherwise."""
    read = reader(path)
    header = read_header(read)
    if path.stat().st_size != header.data + sum(piece.size for piece in header.pieces):
        raise Damaged("its length is not what was written")
    with opened(path) as file:
        file.seek(header.data)
        for piece in header.pieces:
            digest, left = hashlib.sha256(), piece.size
            while left:
                block = file.read(min(left, _BLOCK))
                digest.update(block)
                left -= len(block) or left
            if digest.hexdigest() != piece.sha256:
                raise Damaged(f"{piece.path} is not what was written")
    return header


# ----------------------------------------------------------------------------------------------- from files to devices
def assemble(leaf: jax.ShapeDtypeStruct, pieces: Sequence[tuple[Piece, Callable[[], np.ndarray]]]) -> jax.Array:
    """Build a leaf with its sharding from pieces cut in any way; each piece is read at most once.

    Raises:
        Damaged: the pieces do not cover what this process needs.
    """
    read: dict[Bounds, np.ndarray] = {}
    made: dict[Bounds, np.ndarray] = {}

    def content(index: Sequence[slice] | None) -> np.ndarray:
        wanted = bounds_of(index or (), leaf.shape)
        if wanted not in made:
            made[wanted] = _box(wanted)
        return made[wanted]

    def _box(wanted: Bounds) -> np.ndarray:
        filled, out = 0, np.empty([stop - start for start, stop in wanted], leaf.dtype)
        for piece, get in pieces:
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, piece.bounds, strict=True)]
            if any(start >= stop for start, stop in common):
                continue
            if piece.bounds not in read:
                read[piece.bounds] = get()
            if piece.bounds == wanted:
                return read[piece.bounds]
            out[_slices(common, wanted)] = read[piece.bounds][_slices(common, piece.bounds)]
            filled += math.prod(stop - start for start, stop in common)
        if filled != out.size:
            raise Damaged(f"only {filled} of {out.size} elements are available")
        return out

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, content)


def _slices(part: Iterable[tuple[int, int]], whole: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, whole, strict=True))
