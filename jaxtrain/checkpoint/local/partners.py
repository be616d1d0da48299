"""Host-to-host transfer of snapshot files between the processes of a run, without any device."""

import hmac
import json
import os
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax

from jaxtrain.distributed.coordination import exchange

PATIENCE = 60.0  # seconds without data after which a transfer is abandoned
_BLOCK = 2**20


class Partners:
    """A server in each process that stores files for its peers and sends them parts of files, with its client calls.

    Requests without the run's token, which is shared through the coordination service, are refused.

    Args:
        keep: (process, name) -> the path at which to store a file received from this process.
        find: name -> the path of a stored file.
    """

    def __init__(self, keep: Callable[[int, str], Path], find: Callable[[str], Path]):
        self._keep, self._find = keep, find
        host = _own_address()
        self._server = (_Server6 if ":" in host else _Server)((host, 0), _Handler)
        self._server.partners = self
        token = secrets.token_hex(16)
        known = exchange([host, self._server.server_address[1], token, socket.gethostname()])
        self._addresses = [(address, port) for address, port, _, _ in known]
        self._token = known[0][2]
        self.partner = _partner([name for _, _, _, name in known], jax.process_index())
        threading.Thread(target=self._server.serve_forever, name="partners", daemon=True).start()

    def send(self, process: int, path: Path) -> None:
        """Store a copy of this file on another process, under the same name; raises `OSError` on failure."""
        with self._connected(process) as connection, open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            _say(connection, token=self._token, do="keep", by=jax.process_index(), name=path.name, size=size)
            connection.sendfile(file)
            if (answer := connection.makefile("rb").readline()) != b"kept\n":
                raise OSError(f"process {process} did not store it: {answer.decode().strip() or 'connection closed'}")

    def fetch(self, process: int, name: str, offset: int, size: int) -> bytes:
        """Return `size` bytes at `offset` of a file that another process holds; raises `OSError` on failure."""
        if not size:
            return b""
        with self._connected(process) as connection:
            _say(connection, token=self._token, do="give", name=name, offset=offset, size=size)
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

    def answer(self, asked: dict[str, Any], source: Any, connection: socket.socket) -> None:
        """Handle one request."""
        if not hmac.compare_digest(str(asked.get("token")), self._token):
            return
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
                while left and (block := source.read(min(left, _BLOCK))):
                    left -= file.write(block)
            if not left:  # otherwise the peer died during the transfer
                os.replace(temporary, path)
                connection.sendall(b"kept\n")
        except OSError as error:
            connection.sendall(f"{error.strerror}\n".encode())
        finally:
            temporary.unlink(missing_ok=True)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads, block_on_close, request_queue_size = True, False, 128
    partners: Partners

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a dropped or unauthorized connection; the other side reports it."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(socketserver.StreamRequestHandler):
    timeout = PATIENCE

    def handle(self) -> None:
        cast(_Server, self.server).partners.answer(json.loads(self.rfile.readline(4096)), self.rfile, self.connection)


def _say(connection: socket.socket, **asked: Any) -> None:
    connection.sendall(json.dumps(asked).encode() + b"\n")


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


def _partner(hosts: list[str], process: int) -> int:
    """Return the process that stores this process's files, on another host if possible.

    All processes use the same shift in rank, the smallest that puts every pair on different hosts (1 if there is none),
    so each process stores the files of exactly one other.
    """
    many = len(hosts)
    shift = next((shift for shift in range(1, many)
                  if all(hosts[i] != hosts[(i + shift) % many] for i in range(many))), 1)
    return (process + shift) % many
