"""Payloads as bytes: a header in JSON that names each array's codec and shape, then the payloads' arrays end to end.

What is read is checked against what the named codecs make of such shapes; nothing in it is executed or unpickled. A few
bytes may stand for a large array: compare names and shapes with those that are expected before anything is decoded.
"""

import json
import math
from collections.abc import Mapping

import numpy as np

from jaxtrain.base.annotations import AnyArray, JsonObject
from jaxtrain.errors import UserError
from jaxtrain.parallel.compression import codecs
from jaxtrain.parallel.compression.codecs import Codec, Payload, Shape

MAGIC = b"JTC1"
MOST_HEADER = 2**24  # bytes
MOST_VALUES = 2**40  # of one array

Message = dict[str, tuple[Codec, Payload, Shape]]


def to_bytes(message: Mapping[str, tuple[Codec, Payload, Shape]]) -> bytes:
    """Return the bytes of payloads by name, each with its codec and the shape of the array that it stands for."""
    heads, arrays = [], []
    for name, (codec, payload, shape) in message.items():
        heads.append({"name": name, "codec": codec.name, "settings": codec.settings(), "shape": list(shape)})
        specs = sorted(codec.abstract(shape).items())
        arrays += [np.asarray(payload[key], spec.dtype).tobytes() for key, spec in specs]
    header = json.dumps(heads).encode()
    return b"".join([MAGIC, len(header).to_bytes(4, "little"), header, *arrays])


def from_bytes(data: bytes | memoryview) -> Message:
    """Return the payloads that such bytes hold, as NumPy arrays.

    Raises:
        UserError: they are not what `to_bytes` makes.
    """
    view = memoryview(data)
    if view[:4] != MAGIC or len(view) < 8:
        raise _wrong("they do not begin as one")
    length = int.from_bytes(view[4:8], "little")
    if not 0 < length <= min(MOST_HEADER, len(view) - 8):
        raise _wrong(f"a header of {length:,} bytes is none")
    try:
        heads = json.loads(bytes(view[8:8 + length]))
        known = [_known(head) for head in heads]
    except UserError as error:
        raise _wrong(error.reason) from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise _wrong(f"their header is none ({type(error).__name__})") from None
    sizes = [{key: math.prod(spec.shape) * spec.dtype.itemsize for key, spec in sorted(specs.items())}
             for _, _, _, specs in known]
    if (said := sum(sum(each.values()) for each in sizes)) != len(view) - 8 - length:
        raise _wrong(f"their header speaks of {said:,} bytes, and {len(view) - 8 - length:,} follow")
    found, at = {}, 8 + length
    for (name, codec, shape, specs), parts in zip(known, sizes, strict=True):
        payload = {}
        for key, size in parts.items():
            payload[key] = np.frombuffer(view[at:at + size], specs[key].dtype).reshape(specs[key].shape)
            at += size
        _check_positions(codec, payload, shape)
        found[name] = codec, payload, shape
    if len(found) != len(known):
        raise _wrong("two arrays have one name")
    return found


def _known(head: JsonObject) -> tuple[str, Codec, Shape, Mapping[str, AnyArray]]:
    """Return an array's name, codec, shape and the arrays of its payload, of what its header says."""
    name, shape, settings = head["name"], tuple(head["shape"]), head["settings"]
    if not isinstance(name, str) or not all(type(size) is int and size > 0 for size in shape):
        raise TypeError
    if math.prod(shape) > MOST_VALUES:
        raise ValueError
    codec = codecs.make(head["codec"], settings)
    if codec.settings() != settings or any(type(value) not in (int, float) for value in settings.values()):
        raise ValueError
    return name, codec, shape, codec.abstract(shape)


def _check_positions(codec: Codec, payload: Payload, shape: Shape) -> None:
    """Refuse places outside of a block, and one named twice."""
    if not isinstance(codec, codecs.TopK):
        return
    where = np.sort(payload["positions"].astype(np.int32), axis=1)
    if where[:, -1].max() >= min(codec.block, math.prod(shape)) or (np.diff(where, axis=1) == 0).any():
        raise _wrong("they name a place twice, or one outside of a block")


def _wrong(reason: str) -> UserError:
    return UserError("payload", f"{reason}: these bytes are not a payload", "send what to_bytes made, whole")
