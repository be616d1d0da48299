"""Connections that carry one JSON object per line, of bounded length, each with an authentication code."""

import json
import secrets
import socket
import time

from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.distributed.authentication import Forged, code, matches
from jaxtrain.redaction import redacted

Message = JsonObject
LONGEST = 1 << 20  # bytes of a line between processes of a run
GREETING = 4096  # bytes of a line from whoever connects
GREETING_S = 10.0  # seconds for a whole greeting


class Line:
    """One end of a connection between two processes that both know a key.

    The process that accepts the connection sends a nonce, and the one that connects answers with a nonce and a code of
    both. From then on each message has a code of its number and direction, so none can be made up, dropped or repeated.
    """

    def __init__(self, connection: socket.socket, key: bytes, accepts: bool):
        self.connection, self._key, self._accepts = connection, key, accepts
        self.messages: list[Message] = []
        self.opened = time.monotonic()
        self._session, self._rest, self._sent, self._got = b"", b"", 0, 0
        self._nonce = secrets.token_hex(16)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if accepts:
            connection.sendall(json.dumps({"nonce": self._nonce}).encode() + b"\n")

    def greet(self, about: Message) -> None:
        """Answer the other end's nonce, and tell who this process is; waits for it as long as the socket does."""
        while not self.messages:
            if not self.receive():
                raise ConnectionError(0, "the connection was closed")
        theirs = self.messages.pop(0).get("nonce")
        hello = about | {"nonce": self._nonce, "code": code(self._key, "hello", theirs, self._nonce, about)}
        self.connection.sendall(json.dumps(hello).encode() + b"\n")
        self._begin(theirs, self._nonce)

    def accept(self) -> Message:
        """Return what the other end told of itself; raises `Forged` if it does not know the key."""
        hello = self.messages.pop(0)
        given, theirs = hello.pop("code", None), hello.pop("nonce", None)
        if not matches(given, code(self._key, "hello", self._nonce, theirs, hello)):
            raise Forged("a greeting")
        self._begin(self._nonce, theirs)
        return hello

    def send(self, message: Message) -> None:
        """Send a message."""
        text = json.dumps(redacted(message))
        self.connection.sendall(f"{self._code(self._accepts, self._sent, text)} {text}\n".encode())
        self._sent += 1

    def receive(self) -> bool:
        """Read what has arrived, once, and add the messages in it; returns False at the end of the connection.

        Raises:
            OSError: it is not what a process of the run would send.
        """
        data = self.connection.recv(1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, (*lines, self._rest))) > (LONGEST if self._session else GREETING):
            raise Forged("a line that is too long")
        self.messages += [self._parsed(line) for line in lines]
        return bool(data)

    def _parsed(self, line: bytes) -> Message:
        try:
            text = line.decode()
            if self._session:
                given, _, text = text.partition(" ")
                if not matches(given, self._code(not self._accepts, self._got, text)):
                    raise Forged("a message")
                self._got += 1
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Forged("a line") from error
        if not isinstance(message, dict):
            raise Forged("a line")
        return message

    def _begin(self, nonce: Json, answer: Json) -> None:
        self._session = bytes.fromhex(code(self._key, "session", nonce, answer))

    def _code(self, from_acceptor: bool, number: int, text: str) -> str:
        return code(self._session, from_acceptor, number, text)
