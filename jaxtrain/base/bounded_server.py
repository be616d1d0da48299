"""A small HTTP server whose connections are bounded in number and time; what its routes are, its handler says."""

import contextlib
import http.server
import re
import socket
import threading
from email.message import Message

_HERE = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")


class BoundedServer(http.server.ThreadingHTTPServer):
    """A server with a thread for each of at most so many connections."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024  # the system makes clients beyond it wait for seconds
    too_many = b""  # what a client beyond the most connections is told

    def __init__(self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler], connections: int):
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._free = threading.BoundedSemaphore(connections)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without a look-up of this host's name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = f"{self.server_address[0]}", self.server_address[1]

    def process_request(self, request, client_address) -> None:
        """Answer on a thread, or hang up if there are too many connections."""
        if self._free.acquire(blocking=False):
            return super().process_request(request, client_address)
        with contextlib.suppress(OSError):
            request.settimeout(1)
            request.sendall(self.too_many)
        self.shutdown_request(request)

    def process_request_thread(self, request, client_address) -> None:
        """Answer the requests of one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request, client_address) -> None:
        """Log nothing of a connection that broke."""


def deadline(connection: socket.socket, seconds: float) -> threading.Timer:
    """Return a timer that ends a connection, however slowly its bytes drip, unless it is cancelled before."""
    def hang_up() -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, hang_up)
    timer.daemon = True
    timer.start()
    return timer


def is_from_here(headers: Message) -> bool:
    """Return whether a program of this machine asks, and no page in a browser, of whatever name leads here."""
    return bool(_HERE.fullmatch(headers.get("Host", ""))) and "Origin" not in headers


def size_of(length: str) -> int:
    """Return the bytes that a Content-Length of digits says; more than can be are as many as 20 digits say."""
    return int(length.lstrip("0")[:20] or "0")
