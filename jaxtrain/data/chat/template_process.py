"""The process that renders chat templates for this one, started when needed and kept for further conversations."""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.chat.template_limits import MESSAGE

PATIENCE = 20  # times the processor time that an answer may take, after which the process counts as stuck
_KEPT = ("PATH", "HOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONHOME")  # of the environment
_COMMAND = [sys.executable, "-P", "-m", "jaxtrain.data.chat.template_worker"]


class Ended(Exception):
    """Raised if the process ended in place of an answer: because of "time", or by a "crash"."""


class TemplateProcess:
    """A process of `template_worker`, which is started again if it has ended."""

    def __init__(self):
        self.owner = os.getpid()
        self.is_asked = False  # whether an answer is to come
        self._process: subprocess.Popen | None = None
        self._line: socket.socket | None = None
        self._until = 0.0

    def ask(self, content: bytes, seconds: float) -> JsonObject:
        """Return the answer to a request that may take so much processor time."""
        self.send(content, seconds)
        return self.receive()

    def send(self, content: bytes, seconds: float) -> None:
        """Send a request, which `receive` gets the answer to."""
        if self._process is None or self._process.poll() is not None:
            self.end()
            self._start()
        assert self._line and not self.is_asked
        self.is_asked, self._until = True, time.monotonic() + PATIENCE * seconds
        self._line.settimeout(PATIENCE * seconds)
        with contextlib.suppress(OSError):  # it ended, as `receive` finds
            self._line.sendall(len(content).to_bytes(4, "big") + content)

    def receive(self) -> JsonObject:
        """Return the answer to the request that was sent; raises `Ended`."""
        try:
            size = int.from_bytes(self._read(4), "big")
            if size > MESSAGE:
                raise ConnectionError("the answer is too long")
            content = self._read(size)
        except TimeoutError:
            self.end()
            raise Ended("time") from None
        except OSError:
            raise Ended("time" if self.end() == -signal.SIGPROF else "crash") from None
        self.is_asked = False
        return json.loads(content.decode(errors="surrogatepass"))

    def end(self) -> int:
        """End the process, and return its exit status, that of before if it had ended by itself."""
        process, line = self._process, self._line
        self._process, self._line, self.is_asked = None, None, False
        if process is None or line is None or self.owner != os.getpid():
            return 0
        line.close()
        try:
            return process.wait(1)  # it ends when its line is closed, unless it is at work
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _start(self) -> None:
        """Start the process, which gets nothing from this one but where modules are found."""
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        self._line, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                _COMMAND, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process
                env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUTF8": "1"})

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            assert self._line
            self._line.settimeout(max(1e-3, self._until - time.monotonic()))
            if not (part := self._line.recv(min(size - len(found), 2**20))):
                raise ConnectionError("it ended")
            found += part
        return bytes(found)


_lock = threading.Lock()
_shared = TemplateProcess()


@contextlib.contextmanager
def shared() -> Iterator[TemplateProcess]:
    """Yield the process of this one, for one thread at a time."""
    global _shared, _lock
    if _shared.owner != os.getpid():  # a forked process does not use its parent's
        _shared, _lock = TemplateProcess(), threading.Lock()
    with _lock:
        try:
            yield _shared
        finally:
            if _shared.is_asked:  # it would get an old answer next
                _shared.end()


@atexit.register
def _end() -> None:
    _shared.end()
