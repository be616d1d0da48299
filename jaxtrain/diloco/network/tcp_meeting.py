"""An island's side of the network: the log of outer updates as it is reached by TCP."""

import contextlib
import hashlib
import math
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from jaxtrain.base.annotations import JsonObject
from jaxtrain.diloco.log_records import entry_of
from jaxtrain.diloco.meeting import Entry, Offer, Trimmed
from jaxtrain.diloco.network import certificates, frames
from jaxtrain.diloco.network.meeting_server import VERSION
from jaxtrain.errors import UserError, say
from jaxtrain.files.bounded_files import parsed

PAUSE = 0.1, 10.0  # seconds: the first between two attempts, doubled each time, and the longest
TELL_S = 60.0  # between two times that it says that the coordinator is out of reach
_AHEAD = 8  # parts of a content that are under way before the first of them is answered
_random = random.Random()  # not the module's own generator, whose state the user may rely on
T = TypeVar("T")


class TcpMeeting:
    """The coordinator at an address, for one island; any thread may use it.

    A call that loses its connection goes on with another one, until there was no answer for `patience` seconds.
    """

    def __init__(self, address: str, keys: str | Path, island: int, islands: int = 1, *, patience: float = 3600.0,
                 silence: float = 60.0, sign: float = 5.0, quiet: bool = False):
        """Connect when first used.

        Args:
            address: HOST:PORT of the coordinator.
            keys: the folder with the certificates of `jaxtrain diloco keys`: those of this island and the authority's.
            island: the number of this island.
            islands: how many meet there.
            patience: seconds without any answer after which a call raises an OSError.
            silence: seconds without a byte after which a connection counts as lost.
            sign: seconds between two signs of life while nothing else is said.
            quiet: whether the caller says that the coordinator is out of reach.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise UserError("diloco.meeting", f"tcp://{address} has no port or no host", "give tcp://HOST:PORT")
        self._address, self._host, self._port, self._island = address, host.strip("[]"), int(port), island
        self._tls = certificates.context(keys, f"island-{island}")
        self._patience, self._silence, self._quiet = patience, silence, quiet
        self._fix = f"jaxtrain diloco serve --workdir=DIR --address=0.0.0.0:{port} --keys=DIR --islands={islands}"
        self.log = ""  # the name of the coordinator's log; "": not known yet
        self._unused: list[ssl.SSLSocket] = []
        self._closed, self._heard = threading.Event(), time.monotonic()
        threading.Thread(target=self._live, args=(sign,), name="islands", daemon=True).start()

    def close(self) -> None:
        """Close the connections."""
        self._closed.set()
        while line := self._idle():
            line.close()

    def reach(self) -> None:
        """Ask the coordinator for an answer, once; raises an OSError or EOFError if none comes."""
        try:
            line = self._connected()
            try:
                _ask(line, {"op": "alive"})
            except BaseException:
                line.close()
                raise
        except (OSError, EOFError) as error:
            if why := certificates.refused(error):
                raise certificates.wrong(self._address, why) from error
            raise
        self._heard = time.monotonic()
        self._unused.append(line)

    def offer(self, offer: Offer, content: bytes) -> None:
        """Offer progress, as `Meeting` says."""
        self._send({"op": "offer", "offer": asdict(offer)}, offer.sha256, content)

    def entries(self, after: int, wait: float) -> Sequence[Entry]:
        """Return the entries after this one, as `Meeting` says."""
        end = time.monotonic() + wait
        while True:
            left = max(0.0, end - time.monotonic())
            request = {"op": "entries", "after": after, "wait": min(left, self._silence / 2)}
            _, body = self._tried(lambda line: _ask(line, request))  # noqa: B023 (called at once)
            if (entries := [entry_of(one) for one in parsed(body, list)]) or time.monotonic() >= end:
                return entries

    def content(self, sha256: str) -> bytes:
        """Return the content of an offer in the log, as `Meeting` says."""
        content = bytearray()  # what has come stays when a connection is lost
        self._tried(lambda line: _fetch(line, sha256, content, self._note))
        if hashlib.sha256(content).hexdigest() != sha256:
            raise OSError(f"{self._address} sent another content than {sha256}")
        return bytes(content)

    def put_snapshot(self, position: int, content: bytes) -> None:
        """Keep the outer state after an entry, as `Meeting` says."""
        sha256 = hashlib.sha256(content).hexdigest()
        self._send({"op": "put_snapshot", "position": position, "sha256": sha256}, sha256, content)

    def snapshot(self) -> tuple[int, bytes] | None:
        """Return the newest snapshot, as `Meeting` says."""
        while True:
            header, _ = self._tried(lambda line: _ask(line, {"op": "snapshot"}))
            if "position" not in header:
                return None
            with contextlib.suppress(Trimmed):  # newer ones came while it was on its way
                return header["position"], self.content(header["sha256"])

    def _send(self, request: JsonObject, sha256: str, content: bytes) -> None:
        """Make a request for which the coordinator needs a content, of which it may have a part, or all."""
        def attempt(line: ssl.SSLSocket) -> None:
            header, _ = _ask(line, request)
            for _ in range(2):  # once more, if what came before was damaged
                if "have" not in header:
                    return
                parts = ({"op": "put", "sha256": sha256, "start": start} for start in
                         range(header["have"], len(content), frames.PART))
                for _ in _ask_all(line, ((part, content[part["start"]: part["start"] + frames.PART])
                                         for part in parts), self._note):
                    pass
                header, _ = _ask(line, {**request, "sent": True})
            if "have" in header:
                raise ConnectionError("the coordinator did not get the content whole")

        self._tried(attempt)

    def _tried(self, do: Callable[[ssl.SSLSocket], T]) -> T:
        pause, begun = PAUSE[0], time.monotonic()
        while True:
            line = None
            try:
                line = self._idle() or self._connected()
                done = do(line)
                self._note()
                self._unused.append(line)
                return done
            except (Trimmed, UserError):
                if line:  # there may be more answers in it
                    line.close()
                raise
            except (OSError, EOFError) as error:
                if line:
                    line.close()
                if why := certificates.refused(error):
                    raise certificates.wrong(self._address, why) from error
                if self._closed.is_set() or time.monotonic() - max(begun, self._heard) > self._patience:
                    raise ConnectionError(f"{self._address}: the coordinator of the islands is out of reach "
                                          f"({_words(error)})") from error
                now = time.monotonic()
                if not self._quiet and pause >= min(1.6, PAUSE[1]) and now - self._told >= TELL_S:
                    self._told = now
                    say(f"{self._address}: the coordinator of the islands is out of reach ({_words(error)}); trying "
                        f"again for {self._patience:.0f} s; if it does not run, start it with {self._fix}")
            self._closed.wait(pause * _random.uniform(0.5, 1))
            pause = min(2 * pause, PAUSE[1])

    _told = -math.inf  # when it was said that the coordinator is out of reach

    def _note(self) -> None:
        self._heard = time.monotonic()
        if self._told > -math.inf:
            self._told = -math.inf
            say(f"{self._address}: the coordinator of the islands answers again")

    def _idle(self) -> ssl.SSLSocket | None:
        with contextlib.suppress(IndexError):  # of what another thread may take meanwhile
            return self._unused.pop()
        return None

    def _connected(self) -> ssl.SSLSocket:
        plain = socket.create_connection((self._host, self._port), self._silence)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line = self._tls.wrap_socket(plain, server_hostname=certificates.COORDINATOR)
            hello, _ = frames.receive(line)
            if hello.get("version") != VERSION:
                raise UserError(self._address, f"the coordinator speaks version {hello.get('version')} of the "
                                f"protocol, and this island {VERSION}", "use one version of jaxtrain everywhere")
            self.log = f"{hello.get('log', '')}"
            return line
        except BaseException:
            plain.close()
            raise

    def _live(self, sign: float) -> None:
        while not self._closed.wait(sign):
            if time.monotonic() - self._heard >= sign and self._unused:
                with contextlib.suppress(OSError, EOFError, UserError, IndexError):
                    line = self._unused.pop()
                    _ask(line, {"op": "alive"})
                    self._heard = time.monotonic()
                    self._unused.append(line)


def _ask(line: ssl.SSLSocket, header: JsonObject) -> tuple[JsonObject, bytes]:
    return next(_ask_all(line, [(header, b"")]))


def _ask_all(line: ssl.SSLSocket, requests: Iterable[tuple[JsonObject, bytes]],
             note: Callable[[], None] = lambda: None) -> Iterator[tuple[JsonObject, bytes]]:
    """Yield the answers to requests, of which some are sent ahead, so that a long way costs its delay once."""
    waiting, requests = 0, iter(requests)
    while True:
        while waiting < _AHEAD and (request := next(requests, None)):
            frames.send(line, *request)
            waiting += 1
        if not waiting:
            return
        header, body = frames.receive(line)
        waiting -= 1
        if "trimmed" in header:
            raise Trimmed(header["trimmed"])
        if "error" in header:
            raise UserError(*header["error"])
        note()
        yield header, body


def _fetch(line: ssl.SSLSocket, sha256: str, content: bytearray, note: Callable[[], None]) -> None:
    """Receive what a content lacks; parts come in order, and what has come is kept if the connection is lost."""
    def missing(size: int) -> Iterator[tuple[JsonObject, bytes]]:
        for start in range(len(content), size, frames.PART):
            yield {"op": "get", "sha256": sha256, "start": start}, b""

    header, body = _ask(line, {"op": "get", "sha256": sha256, "start": len(content)})
    content += body
    for _, body in _ask_all(line, missing(header["size"]), note):
        content += body


def _words(error: BaseException) -> str:
    return f"{error}" or type(error).__name__
