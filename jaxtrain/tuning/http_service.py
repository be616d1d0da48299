"""A service that answers JSON over HTTP: a program of the user's own, on this machine or another."""

import base64
import contextlib
import functools
import http.client
import json
import queue
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError
from jaxtrain.redaction import is_hidden

TRIES = 4
PAUSE_S = 1.0  # before the second try; twice as long before each later one
SAID = 2**12  # bytes that are read of what a service says of an error


class Failed(Exception):
    """A request without an answer. `status`: what the service says, 0 where it says nothing; `said`: the body."""

    def __init__(self, why: str, status: int = 0, said: str = ""):
        super().__init__(why)
        self.status, self.said = status, said

    @property
    def may_pass(self) -> bool:
        """Whether it may be otherwise when the service is asked again."""
        return self.status in (0, 429) or self.status >= 500


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes redirects errors: urllib would follow them without the request's body."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        """Return no request to go on with."""


@dataclass(frozen=True)
class HttpService:
    """A service at a URL that the value of a key names. The first process asks it."""

    key: str
    kind: str  # what the service is, in messages
    url: str  # with its credentials
    timeout_s: float  # of a request
    limit: int  # bytes of a response

    def __post_init__(self):
        if is_hidden(self.url):
            raise UserError(self.key, f"the credentials of {self.url} are not written down", "give the whole URL again")
        try:
            parts = urllib.parse.urlsplit(self.url)
            right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            (parts.hostname or "").encode("idna")
        except ValueError:
            right = False
        if not right or not self.url.isascii() or not self.url.isprintable() or " " in self.url:
            raise UserError(self.key, f"{self.url} is not the URL of a {self.kind}",
                            "write http://HOST:PORT/PATH, with special characters percent-encoded")

    def posted(self, content: JsonMapping) -> bytes:
        """Return what the service answers to this JSON, after several tries where an error may pass."""
        why = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE_S * 2 ** (attempt - 1))
            try:
                return self.once(content)
            except Failed as error:
                why = f"{error}"
                if not error.may_pass:
                    raise UserError(self.key, f"{self.url} {why}",
                                    "check the URL and the format that its server accepts") from None
        raise UserError(self.key, f"{self.url} {why}, in {TRIES} tries of at most {self.timeout_s:g} s",
                        f"check that the {self.kind} is up, or raise rl.reward_timeout_s")

    def once(self, content: JsonMapping | None) -> bytes:
        """Return what the service answers to this JSON, or to a GET without any; raise `Failed` if it does not."""
        try:
            return self._posted(None if content is None else json.dumps(content).encode())
        except urllib.error.HTTPError as error:
            error.close()
            said = getattr(error, "said", b"").decode(errors="replace")
            raise Failed(f"answers {error.code} {error.reason}", error.code, said) from None
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", error)
            raise Failed(f"does not answer ({str(cause) or type(cause).__name__})") from None

    def _posted(self, content: bytes | None) -> bytes:
        parts = urllib.parse.urlsplit(self.url)
        user, _, place = parts.netloc.rpartition("@")
        headers = {"Content-Type": "application/json"}
        if user:
            headers["Authorization"] = f"Basic {base64.b64encode(urllib.parse.unquote_to_bytes(user)).decode()}"
        request = urllib.request.Request(parts._replace(netloc=place).geturl(), content, headers)
        return _before_deadline(request, self.timeout_s, self._body)

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        size, found = response.length, b""
        while (size is None or len(found) < size) and (chunk := response.read1(2**16)):
            found += chunk
            if len(found) > self.limit:
                raise UserError(self.key, f"{self.url} answers more than {self.limit:,} bytes",
                                "let it answer what is asked only")
        if size is not None and len(found) < size:
            raise http.client.IncompleteRead(found, size - len(found))
        return found


def timeout_of(config: Config) -> float:
    """Return the time limit of a request; all tries of one must end before the run counts as hung."""
    limit, longest = config.rl.reward_timeout_s, config.resilience.hang_floor
    tries = TRIES * limit + PAUSE_S * (2 ** (TRIES - 1) - 1)
    if config.resilience.hang_factor and tries > longest:
        raise UserError("rl.reward_timeout_s", f"{TRIES} tries of {limit:g} s take longer than resilience."
                        f"hang_floor={longest:g} s, after which a run counts as hung",
                        f"set resilience.hang_floor={2 * tries:.0f}, or allow less time")
    return limit


def _before_deadline(request: urllib.request.Request, seconds: float,
                     body: Callable[[http.client.HTTPResponse], bytes]) -> bytes:
    """Return the body of the answer to a request, all of which must be there in time.

    The limit of sockets is for each read, and a server that sends a byte now and then, in its status line, headers or
    body, keeps within it; so another thread asks, and its connection is closed at the deadline.
    """
    calls, found = _Calls(), queue.SimpleQueue[Any]()

    def ask() -> None:
        try:
            opener = urllib.request.build_opener(_NoRedirects, *calls.handlers())
            with opener.open(request, timeout=seconds) as response:
                found.put(body(response))
        except urllib.error.HTTPError as error:
            with contextlib.suppress(OSError, http.client.HTTPException):
                error.said = error.read(SAID)  # type: ignore[attr-defined]
            found.put(error)
        except BaseException as error:
            found.put(error)
    threading.Thread(target=ask, name="service", daemon=True).start()
    try:
        answer = found.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError("timed out") from None
    finally:
        calls.close()
    if isinstance(answer, BaseException):
        raise answer
    return answer


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return the context of all calls: reading the certificates takes longer than a call on a fast network."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class _Calls:
    """The connections of a request, which can be closed while they are in use."""

    def __init__(self):
        self._lock, self._lines, self._closed = threading.Lock(), [], False

    def handlers(self) -> list[urllib.request.AbstractHTTPHandler]:
        """Return handlers that make connections known here."""
        handlers: list[Any] = [urllib.request.HTTPHandler(), urllib.request.HTTPSHandler(context=_certificates())]
        for handler, method, kind in zip(handlers, ("http_open", "https_open"),
                                         (http.client.HTTPConnection, http.client.HTTPSConnection), strict=True):
            setattr(handler, method, functools.partial(handler.do_open, functools.partial(self._connection, kind)))
        return handlers

    def close(self) -> None:
        """Cut all connections, and any that is still being made."""
        with self._lock:
            self._closed = True
            for line in self._lines:
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)
                line.close()

    def _connection(self, kind: type[http.client.HTTPConnection], *args: Any, **keys: Any) -> Any:
        made: Any = kind(*args, **keys)
        connect = made._create_connection

        def connected(*where: Any, **how: Any) -> socket.socket:
            line = connect(*where, **how)
            with self._lock:
                self._lines.append(line.dup())  # TLS takes the socket itself away
            if self._closed:
                self.close()
            return line
        made._create_connection = connected
        return made
