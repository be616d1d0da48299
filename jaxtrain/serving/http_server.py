"""The HTTP server of a training service: who may ask, what requests may be like, and which call each path makes.

Connections, the size of requests and the time that they take are bounded. Without keys only programs of this machine
are answered, and pages in its browsers are not: neither those of other sites nor those whose name leads here.
"""

import contextlib
import http.server
import json
import re
import socket
import time
import traceback
import urllib.parse
from collections.abc import Callable

from jaxtrain.base.annotations import JsonObject
from jaxtrain.base.bounded_server import BoundedServer, deadline, is_from_here, size_of
from jaxtrain.errors import UserError, say
from jaxtrain.files.bounded_files import parsed
from jaxtrain.serving import wire
from jaxtrain.serving.keys import Keys
from jaxtrain.serving.service import Service
from jaxtrain.serving.work_queue import Refused

CONNECTIONS = 512
JSON_BYTES = 2**24  # of a request in JSON, which takes many times its size to read
LINGER_S, LINGER_BYTES = 2.0, 2**24  # what is still read of a refused request, so that its client sees the answer
IDLE_S = 75.0  # after which a connection without a request is closed
READ_S = 120.0  # in which a request must have arrived
WAIT_S = 20.0  # for which a client waits for an answer before it asks again; the client gives up after 45 s
# What the client asks at the beginning how to behave: how many connections it may use, among others.
_CONFIG = {"pjwt_auth_enabled": False, "credential_default_source": "api_key", "parallel_fwdbwd_chunks": True,
           "proto_compress_fwdbwd": False, "sample_max_concurrent_requests": 64,
           "sample_enable_stuck_detection": False}
_DYNAMIC = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}
Post = Callable[[Service, str, JsonObject, int], JsonObject | bytes]
POSTS: dict[str, Post] = {
    "client/config": lambda s, owner, body, size: _CONFIG,
    "client/dynamic_config": lambda s, owner, body, size: _DYNAMIC,
    "telemetry": lambda s, owner, body, size: {"status": "accepted"},  # and forgotten
    "create_session": lambda s, owner, body, size: s.create_session(owner, body),
    "session_heartbeat": lambda s, owner, body, size: s.heartbeat(owner, body),
    "create_sampling_session": lambda s, owner, body, size: s.create_sampling_session(owner, body),
    "create_model": lambda s, owner, body, size: s.create_model(owner, body, size),
    "get_info": lambda s, owner, body, size: s.get_info(owner, body),
    "optim_step": lambda s, owner, body, size: s.optim_step(owner, body, size),
    "save_weights": lambda s, owner, body, size: s.save_weights(owner, body, size),
    "save_weights_for_sampler": lambda s, owner, body, size: s.save_weights_for_sampler(owner, body, size),
    "load_weights": lambda s, owner, body, size: s.load_weights(owner, body, size),
    "weights_info": lambda s, owner, body, size: s.weights_info(owner, body),
    "asample": lambda s, owner, body, size: s.sample(owner, body, size),
    "retrieve_future": lambda s, owner, body, size: s.retrieve(owner, body, WAIT_S),
    "cancel_future": lambda s, owner, body, size: s.cancel(owner, body),
}
_ID = r"([A-Za-z0-9_.:-]+)"
OTHERS: list[tuple[str, str, Callable[..., JsonObject]]] = [
    ("GET", r"get_server_capabilities", lambda s, owner: s.capabilities()),
    ("GET", rf"samplers/{_ID}", lambda s, owner, id: s.sampler(owner, id)),
    ("GET", rf"sessions/{_ID}", lambda s, owner, id: s.session(owner, id)),
    ("POST", rf"sessions/{_ID}/finish", lambda s, owner, id: s.finish_session(owner, id)),
    ("GET", rf"training_runs/{_ID}", lambda s, owner, id: s.training_run(owner, id)),
    ("GET", rf"training_runs/{_ID}/checkpoints", lambda s, owner, id: s.checkpoints(owner, id)),
    ("GET", r"checkpoints", lambda s, owner: s.checkpoints(owner)),
    ("DELETE", rf"training_runs/{_ID}/checkpoints/{_ID}/{_ID}",
     lambda s, owner, *names: s.delete_checkpoint(owner, *names)),
]


class Server(BoundedServer):
    """A server that carries the calls of a service."""

    too_many = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

    def __init__(self, service: Service, host: str = "127.0.0.1", port: int = 0, *, keys: Keys | None = None,
                 most_bytes: int = 64 * 2**20):
        self.service, self.keys, self.most_bytes = service, keys or Keys(), most_bytes
        if not self.keys and host not in ("127.0.0.1", "::1", "localhost"):
            raise UserError("--host", f"without keys everybody who reaches {host} could train and read",
                            "add --keys=FILE, or listen on 127.0.0.1")
        try:
            super().__init__((host, port), Handler, CONNECTIONS)
        except socket.gaierror as error:
            raise UserError("--host", f"{host} has no address ({error.strerror})", "give another one") from None
        except (OSError, OverflowError) as error:
            raise UserError("--port", f"{host}:{port} cannot be opened ({getattr(error, 'strerror', '') or error})",
                            "give another one, or leave it out") from None

    @property
    def url(self) -> str:
        """The address that clients are given."""
        host, port = self.server_address[:2]
        return f"http://[{host}]:{port}" if ":" in f"{host}" else f"http://{host}:{port}"


class Handler(http.server.BaseHTTPRequestHandler):
    """The requests of one connection."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    disable_nagle_algorithm, wbufsize = True, -1  # an answer leaves at once and whole
    server_version, sys_version = "jaxtrain", ""
    server: Server  # pyrefly: ignore[bad-override-mutable-attribute]

    def handle_one_request(self) -> None:
        """Answer one request, whose head and body must come in time, however slowly their bytes drip."""
        self._deadline = deadline(self.connection, IDLE_S + READ_S)
        try:
            super().handle_one_request()
        finally:
            self._deadline.cancel()

    def do_GET(self) -> None:
        """Answer a request for what is known."""
        self._answered("GET")

    def do_POST(self) -> None:
        """Answer a call."""
        self._answered("POST")

    def do_DELETE(self) -> None:
        """Answer a request to delete something."""
        self._answered("DELETE")

    def _answered(self, method: str) -> None:
        try:
            body = self._body() if method == "POST" else self._no_body()
            self._deadline.cancel()
            self._send(200, self._called(method, body))
        except Refused as refusal:
            self._send(refusal.status, {"error": f"{refusal}"})
            self._linger()
        except UserError as mistake:
            self._send(400, {"error": f"{mistake}", "category": "user"})
        except OSError:  # the client is gone, or too slow
            self.close_connection = True
        except Exception as error:
            say(f"error: {''.join(traceback.format_exception_only(error))}")
            self._send(500, {"error": f"{type(error).__name__} in the server", "category": "server"})

    def _called(self, method: str, body: bytes) -> JsonObject | bytes:
        path = self.path.partition("?")[0]
        if path == "/api/v1/healthz" and method == "GET":
            return {"status": "ok"}
        owner = self._owner()
        call = urllib.parse.unquote(path).removeprefix("/api/v1/")
        service = self.server.service
        if method == "POST" and call == "forward_backward":
            if self.headers.get("Content-Type", "").partition(";")[0] != wire.TYPE:
                raise Refused(415, f"forward_backward takes {wire.TYPE}")
            return service.forward_backward(owner, body)
        if method == "POST" and call in POSTS:
            return POSTS[call](service, owner, _json(body), len(body))
        for one, pattern, answer in OTHERS:
            if one == method and (found := re.fullmatch(pattern, call)) and path != call:
                return answer(service, owner, *found.groups())
        raise Refused(404, f"this server has no {method} {path[:200]!r}: docs/serve-training.md says what it has")

    def _owner(self) -> str:
        """Return who asks; refuse strangers."""
        keys = self.server.keys
        if not keys and not is_from_here(self.headers):
            raise Refused(403, "without keys only programs of this machine are answered, and no pages")
        owner = keys.owner(given := self._key())
        if owner is None:
            raise Refused(401, "there is no key in the request that this server knows: set TINKER_API_KEY" if given
                          else "the request has no key: set TINKER_API_KEY")
        return owner

    def _key(self) -> str:
        return self.headers.get("X-API-Key") or self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _no_body(self) -> bytes:
        """Refuse a body where none is read: what is left of it would be taken for the connection's next request."""
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            raise Refused(400, f"{self.command} has no body here")
        return b""

    def _body(self) -> bytes:
        """Return the body of a request, which is read to its end even if it is refused, unless it is too long."""
        length, most = self.headers.get("Content-Length", ""), self.server.most_bytes
        if "Transfer-Encoding" in self.headers or not length.isdecimal():
            self.close_connection = True
            raise Refused(411, "the request does not say its length (Content-Length)")
        if self.headers.get("Content-Type", "").partition(";")[0] != wire.TYPE:
            most = min(most, JSON_BYTES)
        size = size_of(length)
        if size > most:
            self.close_connection = True
            raise Refused(413, f"the request has {size:,} bytes, above {most:,} (--request_mib); send "
                          "fewer data at once")
        if "Content-Encoding" in self.headers:
            self.close_connection = True
            raise Refused(415, f"Content-Encoding {self.headers['Content-Encoding'][:40]!r} is not read here")
        if not self.server.keys.owner(self._key()):
            self.close_connection = True
            return b""  # whoever is refused need not send it
        end, found = time.monotonic() + READ_S, bytearray()
        while len(found) < size:
            part = self.rfile.read1(min(size - len(found), 2**20))
            if not part or time.monotonic() > end:
                raise TimeoutError
            found += part
        return bytes(found)

    def _linger(self) -> None:
        """Read on for a moment before a connection is closed: a client that still sends would lose the answer."""
        if not self.close_connection:
            return
        end, left = time.monotonic() + LINGER_S, LINGER_BYTES
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(LINGER_S)
            while left > 0 and time.monotonic() < end and (part := self.rfile.read1(2**16)):
                left -= len(part)

    def _send(self, status: int, content: JsonObject | bytes) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            kind = wire.TYPE if isinstance(content, bytes) else "application/json"
            for name, value in (("Content-Type", kind), ("Content-Length", f"{len(body)}"),
                                ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"),
                                *((("Connection", "close"),) if self.close_connection else ())):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Write no log of requests: they have keys and people's texts."""


def _json(body: bytes) -> JsonObject:
    try:
        return parsed(body or b"{}", dict)
    except ValueError as error:
        raise UserError("request", f"it is not a JSON object ({error})"[:300], "send what the package tinker 0.38 does"
                        ) from None
