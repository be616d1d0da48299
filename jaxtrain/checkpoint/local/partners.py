"""Host-to-host transfer of snapshot files between the processes of a run, without any device."""

import contextlib
import json
import os
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxtrain.distributed.authentication import Forged, code, derive, matches
from jaxtrain.distributed.coordination import exchange
from jaxtrain.distributed.lines import GREETING, GREETING_S

PATIENCE = 60.0  # seconds without data after which a transfer is abandoned
_BLOCK = 2**20
_MOST = 128  # connections that have not proved yet that they belong to the run


class Partners:
    """A server in each process that stores files for its peers and sends them parts of files, with its client calls.

    Requests from other than processes of the run are refused (distributed/authentication.py). What is sent is verified
    by the codes in the files themselves (pieces.py).

    Args:
        keep: (process, name) -> the path at which to store a file received from this process.
        find: name -> the path of a stored file.
    """

    def __init__(self, keep: Callable[[int, str], Path], find: Callable[[str], Path]):
        self._keep, self._find = keep, find
        host = _own_address()
        self._server = (_Server6 if ":" in host else _Server)((host, 0), socketserver.BaseRequestHandler)
        self._server.partners = self
        token = secrets.token_hex(16)
        known = exchange([host, self._server.server_address[1], token, socket.gethostname()])
        self._addresses = [(address, port) for address, port, _, _ in known]
        self._key = derive("partners", known[0][2])
        shift = shift_of([name for _, _, _, name in known])
        self.partner = (jax.process_index() + shift) % len(known)
        threading.Thread(target=self._server.serve_forever, name="partners", daemon=True).start()

    def send(self, process: int, path: Path) -> None:
        """Store a copy of this file on another process, under the same name; raises `OSError` on failure."""
        with self._connected(process) as connection, open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            nonce = self._ask(connection, do="keep", by=jax.process_index(), name=path.name, size=size)
            connection.sendfile(file)
            answer = connection.makefile("rb").readline(GREETING).decode(errors="replace").strip()
            if not matches(answer, code(self._key, nonce, "kept")):
                raise OSError(f"process {process} did not store it: {answer or 'connection closed'}")

    def fetch(self, process: int, name: str, offset: int, size: int) -> bytes:
        """Return `size` bytes at `offset` of a file that another process holds; raises `OSError` on failure."""
        if not size:
            return b""
        with self._connected(process) as connection:
            self._ask(connection, do="give", name=name, offset=offset, size=size)
            content = connection.makefile("rb").read(size)
        if len(content) != size:
            raise OSError(f"process {process} gave {len(content)} of {size} bytes of {name}")
        return content

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()

    def _connected(self, process: int) -> socket.socket:
        return socket.create_connection(self._addresses[process], timeout=PATIENCE)

    def _ask(self, connection: socket.socket, **asked: Any) -> str:
        """Send a request, with a code of it and of the nonce that the other end sent."""
        nonce = _line(connection, PATIENCE).decode()
        connection.sendall(json.dumps(asked | {"code": code(self._key, nonce, asked)}).encode() + b"\n")
        return nonce

    def answer(self, connection: socket.socket) -> None:
        """Handle one request."""
        nonce = secrets.token_hex(16)
        connection.sendall(f"{nonce}\n".encode())
        asked = json.loads(_line(connection, GREETING_S))
        given = asked.pop("code", None)
        if not matches(given, code(self._key, nonce, asked)):
            raise Forged("a request")
        self._server.known(connection)
        connection.settimeout(PATIENCE)
        if asked["do"] == "give":
            with open(self._find(asked["name"]), "rb") as file:
                connection.sendfile(file, asked["offset"], asked["size"])
            return
        path = self._keep(asked["by"], asked["name"])
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with open(temporary, "wb") as file:
                left = asked["size"]
                while left and (block := connection.recv(min(left, _BLOCK))):
                    left -= file.write(block)
            if not left:  # otherwise the peer died during the transfer
                os.replace(temporary, path)
                connection.sendall(f"{code(self._key, nonce, 'kept')}\n".encode())
        except OSError as error:
            connection.sendall(f"{error.strerror}\n".encode())
        finally:
            temporary.unlink(missing_ok=True)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads, block_on_close, request_queue_size = True, False, 128
    partners: Partners

    def __init__(self, *args: Any):
        self._unknown: dict[int, socket.socket] = {}  # those that have not proved yet that they belong to the run
        self._counting = threading.Lock()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection on a thread of its own; the oldest of too many strangers is closed."""
        with self._counting:
            self._unknown[id(request)] = request
            if len(self._unknown) > _MOST:
                with contextlib.suppress(OSError):  # its thread ends
                    self._unknown.pop(next(iter(self._unknown))).shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def known(self, request: Any) -> None:
        """Stop counting a connection among the strangers."""
        with self._counting:
            self._unknown.pop(id(request), None)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer a request."""
        try:
            self.partners.answer(request)
        finally:
            self.known(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a dropped or unauthorized connection; the other side reports it."""


class _Server6(_Server):
    address_family = socket.AF_INET6


def _line(connection: socket.socket, seconds: float) -> bytes:
    """Read one short line and nothing behind it, within this many seconds for all of it."""
    found, end = b"", time.monotonic() + seconds
    while not found.endswith(b"\n"):
        connection.settimeout(max(0.001, end - time.monotonic()))
        byte = connection.recv(1)
        if not byte or len(found) > GREETING:
            raise Forged("a line")
        found += byte
    return found[:-1]


def _own_address() -> str:
    """Return the address of this host on the network that leads to the coordinator."""
    coordinator = jax._src.distributed.global_state.coordinator_address
    if coordinator is None or jax.process_count() == 1:
        return "127.0.0.1"
    host = coordinator.rpartition(":")[0].strip("[]")
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]


def shift_of(hosts: list[str]) -> int:
    """Return by how many ranks the process is apart that stores a process's files, on another host if possible.

    All processes use the same shift, the smallest that puts every pair on different hosts (1 if there is none), so each
    process stores the files of exactly one other.
    """
    many = len(hosts)
    return next((shift for shift in range(1, many)
                 if all(hosts[i] != hosts[(i + shift) % many] for i in range(many))), 1)
