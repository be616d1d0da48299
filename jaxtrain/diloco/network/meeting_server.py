"""The coordinator's server: islands reach the log of outer updates by TCP, encrypted, each known by its certificate.

Every request is one frame with one answer, in order, and none depends on an earlier one, so a client that lost its
connection sends again what has no answer. Contents travel in parts; the server says from which byte on it lacks one.
"""

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any

from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.diloco.log_records import as_json, is_hash, offer_of
from jaxtrain.diloco.meeting import Trimmed
from jaxtrain.diloco.network import certificates, frames
from jaxtrain.diloco.outer_log import OuterLog
from jaxtrain.errors import UserError, say
from jaxtrain.files.bounded_files import Form, misfit

VERSION = 1  # of the protocol
GREETING_S = 10.0  # for TLS to be agreed on
WAIT_S = 20.0  # longest wait of one request; clients ask again
_MOST = 256  # connections that may be agreeing on TLS at a time; the oldest of more are closed
_TICK_S = 0.1

Answer = tuple[dict[str, Any], bytes]


class MeetingServer:
    """A listening socket, and a thread for each connection."""

    def __init__(self, log: OuterLog, address: str, tls: ssl.SSLContext, largest: int = 2**36, silence: float = 120.0):
        """Listen on `host:port`.

        Args:
            largest: bytes of the largest content that is taken.
            silence: seconds after which a connection without a request is closed.
        """
        self._log, self._tls, self._largest, self._silence = log, tls, largest, silence
        self._greeting: dict[socket.socket, None] = {}
        self._lock, self._stopped = threading.Lock(), threading.Event()
        host, _, port = address.rpartition(":")
        if not port.isdecimal() or int(port) > 65535:
            raise UserError("--address", f"{address} does not end with a port", "give HOST:PORT, such as 0.0.0.0:7000")
        try:
            self._listener = socket.create_server((host.strip("[]"), int(port)), backlog=_MOST,
                                                  family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise UserError("--address", f"{address} cannot be opened ({error})",
                            "give HOST:PORT of this machine") from error
        self.port = self._listener.getsockname()[1]

    def stop(self) -> None:
        """Take no more connections."""
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def accept(self) -> None:
        """Answer whoever comes, until `stop`."""
        while not self._stopped.is_set():
            try:
                line, peer = self._listener.accept()
            except OSError:
                self._stopped.wait(_TICK_S)  # out of handles, or stopped
                continue
            with self._lock:
                self._greeting[line] = None
                if len(self._greeting) > _MOST:
                    with contextlib.suppress(OSError):
                        next(iter(self._greeting)).shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._talk, args=(line, peer[0]), daemon=True).start()

    def _talk(self, plain: socket.socket, peer: str) -> None:
        try:
            with plain, self._greeted(plain) as line:
                island = certificates.island_of(line)
                # Only now does the client know that it was let in.
                frames.send(line, {"version": VERSION, "log": self._log.name})
                while not self._stopped.is_set():
                    header, body = frames.receive(line)
                    self._log.alive(island)
                    frames.send(line, *self._answer(island, header, body))
        except ssl.SSLError as error:
            say(f"a connection from {peer} was refused ({error.reason or error})")
        except (OSError, EOFError):
            pass  # it went away; it comes back if it is alive

    def _greeted(self, plain: socket.socket) -> ssl.SSLSocket:
        try:
            plain.settimeout(GREETING_S)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line = self._tls.wrap_socket(plain, server_side=True)
        finally:
            with self._lock:
                self._greeting.pop(plain, None)
        line.settimeout(self._silence)
        return line

    def _answer(self, island: int, header: JsonObject, body: bytes) -> Answer:
        do: Callable[..., Answer] | None = {
            "alive": self._alive, "offer": self._offer, "put": self._put, "get": self._get, "entries": self._entries,
            "snapshot": self._snapshot, "put_snapshot": self._put_snapshot}.get(str(header.get("op")))
        try:
            if not do:
                raise ValueError(f"there is no {header.get('op')!r}")
            return do(island, header, body)
        except Trimmed as error:
            return {"trimmed": str(error)}, b""
        except UserError as error:
            return {"error": [error.key, error.reason, error.fix]}, b""
        except ValueError as error:
            return {"error": ["a request", str(error), "use one version of jaxtrain everywhere"]}, b""

    def _alive(self, island: int, header: JsonObject, body: bytes) -> Answer:
        return {}, b""

    def _offer(self, island: int, header: JsonObject, body: bytes) -> Answer:
        """Take an offer; answers from which byte on its content is to be sent first, if it is."""
        offer = offer_of(header.get("offer"))
        if offer.island != island:
            raise UserError(f"island {offer.island}", f"the certificate is of island {island}", "give each its own")
        if not self._log.wants(offer):
            return {}, b""
        if header.get("sent") and self._log.offer(offer):
            return {}, b""
        return {"have": self._log.begin(island, offer.sha256)}, b""

    def _put(self, island: int, header: JsonObject, body: bytes) -> Answer:
        sha256, start = _checked(header, {"sha256": str, "start": int})
        if start + len(body) > self._largest:
            raise UserError(f"island {island}", f"a content is larger than {self._largest:,} bytes",
                            "start the coordinator with a larger --largest")
        return {"have": self._log.begin(island, sha256, body, start)}, b""

    def _get(self, island: int, header: JsonObject, body: bytes) -> Answer:
        sha256, start = _checked(header, {"sha256": str, "start": int})
        size, part = self._log.part(sha256, start, frames.PART)
        return {"size": size, "start": start}, part

    def _entries(self, island: int, header: JsonObject, body: bytes) -> Answer:
        after, wait = _checked(header, {"after": int, "wait": int | float})
        answer, size = [], 0
        for entry in self._log.entries(after, min(wait, WAIT_S)):
            text = json.dumps(as_json(entry), separators=(",", ":"))
            size += len(text) + 1
            if answer and size > frames.PART:
                break
            answer.append(text)
        return {}, f"[{','.join(answer)}]".encode()

    def _snapshot(self, island: int, header: JsonObject, body: bytes) -> Answer:
        newest = self._log.newest_snapshot()
        return ({"position": newest[0], "sha256": newest[1]} if newest else {}), b""

    def _put_snapshot(self, island: int, header: JsonObject, body: bytes) -> Answer:
        position, sha256 = _checked(header, {"position": int, "sha256": str})
        if not self._log.wants_snapshot(position):
            return {}, b""
        if header.get("sent") and self._log.claim_snapshot(island, position, sha256):
            return {}, b""
        return {"have": self._log.begin(island, sha256)}, b""


def _checked(header: JsonObject, form: dict[str, Form]) -> list[Json]:
    """Return these fields of a request, which must be of these types, not negative, and hashes where they say so."""
    if wrong := misfit(header, form):
        raise ValueError(f"is not of the form expected: {wrong}")
    values = [header[name] for name in form]
    if any(not is_hash(value) if isinstance(value, str) else not 0 <= value < 2**53 for value in values):
        raise ValueError("is not of the form expected: a number or a hash is out of range")
    return values
