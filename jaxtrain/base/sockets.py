"""Read messages of a known size from a socket; with nothing but the standard library, as worker processes are."""

import socket


def read_exactly(line: socket.socket, size: int) -> bytes:
    """Return this many bytes, or b"" at the end."""
    found = bytearray()
    while len(found) < size:
        if not (part := line.recv(min(size - len(found), 2**20))):
            return b""
        found += part
    return bytes(found)
