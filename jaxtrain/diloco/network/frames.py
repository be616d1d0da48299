"""Messages of the islands' network: a JSON object and raw bytes, with their lengths and their sha256.

A frame is 4 bytes that name the format, the lengths of its two parts, 4 bytes each, and the sha256 of both parts; then
the parts. Lengths beyond what the protocol needs are refused before anything is read, so a peer cannot fill the memory.
"""

import hashlib
import json
import socket
import struct

from jaxtrain.base.annotations import JsonObject
from jaxtrain.files.bounded_files import parsed

PART = 2**20  # bytes of a content in one frame
_HEADER, _BODY = 2**16, 2**23  # the longest parts: many entries are longer than a part of a content
_START = struct.Struct(">4sII32s")
_FORMAT = b"JTi1"


class Damaged(ConnectionError):
    """Raised for bytes that are not a frame, or not the one that was sent; the connection cannot be used any more."""


def send(line: socket.socket, header: JsonObject, body: bytes = b"") -> None:
    """Send a frame."""
    head = json.dumps(header, separators=(",", ":")).encode()
    if len(head) > _HEADER or len(body) > _BODY:
        raise ValueError("is too large for a frame")
    both = head + body
    line.sendall(_START.pack(_FORMAT, len(head), len(body), hashlib.sha256(both).digest()) + both)


def receive(line: socket.socket) -> tuple[JsonObject, bytes]:
    """Receive a frame; raises EOFError if the other side closed the connection between two frames."""
    start = _exactly(line, _START.size, at_start=True)
    name, head, body, hashed = _START.unpack(start)
    if name != _FORMAT or head > _HEADER or body > _BODY:
        raise Damaged("what came is not a frame")
    both = _exactly(line, head + body)
    if hashlib.sha256(both).digest() != hashed:
        raise Damaged("a frame was damaged on its way")
    try:
        return parsed(both[:head]), both[head:]
    except ValueError as error:
        raise Damaged(f"a frame's header {error}") from error


def _exactly(line: socket.socket, size: int, at_start: bool = False) -> bytes:
    content, here = bytearray(size), 0
    while here < size:
        count = line.recv_into(memoryview(content)[here:])
        if not count:
            raise EOFError if at_start and not here else Damaged("the connection was cut")
        here += count
    return bytes(content)
