"""The values of XLA's options in this environment: the defaults of its version, and what XLA_FLAGS change.

jaxlib passes them with each program as a message of protobuf, but has no Python class for it. Its library contains
the descriptions of its messages, as every program with generated classes does; the class is made from these.
"""

import importlib
import os
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from jaxtrain.base.annotations import JsonObject

_FILE = "xla/pjrt/proto/compile_options.proto"
_MESSAGE = "xla.CompileOptionsProto"
_VARINTS = (10, 11, 14)  # fields of a description that are numbers; all others have a length and content


def here() -> JsonObject:
    """Return each of XLA's options by name, as JSON: a list for several values, a text for the name of one."""
    import jaxlib
    from jax._src import compiler  # what JAX itself compiles with; no public function returns it

    options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    library = (Path(jaxlib.__file__).parent / "libjax_common.so").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    _add(_FILE, library, pool, set())
    made = message_factory.GetMessageClass(pool.FindMessageTypeByName(_MESSAGE))
    debug = made.FromString(options.SerializeAsString()).executable_build_options.debug_options
    return {field.name: _json(field, getattr(debug, field.name)) for field in debug.DESCRIPTOR.fields}


def flags_here() -> list[str]:
    """Return the words of XLA_FLAGS, sorted."""
    return sorted(os.environ.get("XLA_FLAGS", "").split())


def _json(field, value):
    """Return the value of a field as JSON; of a message, its text in one line with sorted entries."""
    kind, several = field.enum_type, not isinstance(value, str | bytes) and hasattr(value, "__len__")
    if kind and several:
        return [_named(kind, one) for one in value]
    if field.message_type:
        return sorted(f"{one} {value[one]}" for one in value) if hasattr(value, "keys") else f"{value}".split("\n")[:-1]
    if several:
        return list(value)
    return _named(kind, value) if kind else value


def _named(kind, number: int) -> str | int:
    return kind.values_by_number[number].name if number in kind.values_by_number else number


def _add(name: str, library: bytes, pool: descriptor_pool.DescriptorPool, known: set[str]) -> None:
    """Add a file's description and those of all that it imports."""
    if name in known:
        return
    known.add(name)
    if name.startswith("google/protobuf/"):
        module = importlib.import_module(f"{name.removesuffix('.proto').replace('/', '.')}_pb2")
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
        return
    content = description(name, library)
    for imported in descriptor_pb2.FileDescriptorProto.FromString(content).dependency:
        _add(imported, library, pool, known)
    pool.AddSerializedFile(content)


def description(name: str, library: bytes) -> bytes:
    """Return the serialized description of a .proto file from a library that contains it.

    It begins with the file's name and the package's, and ends where no field of a description follows.
    """
    begin = end = library.index(b"\x0a" + bytes([len(name)]) + name.encode() + b"\x12")
    while True:
        number, wire = library[end] >> 3, library[end] & 7
        if wire == 2 and 0 < number < 14:
            length, end = _varint(library, end + 1)
            end += length
        elif wire == 0 and number in _VARINTS:
            end = _varint(library, end + 1)[1]
        else:
            return library[begin:end]


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a place, seven bits a byte, and the place behind it."""
    value = shift = 0
    while True:
        value |= (content[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if not content[at - 1] & 128:
            return value, at
