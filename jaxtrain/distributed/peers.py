"""Detection of lost processes: one connection from each process to the first.

When a process dies, for whatever reason, its kernel closes the connection at once. A stopped process, a dead machine
and a cut network are detected by silence: each end sends a sign of life every few seconds. JAX's own heartbeat comes
later and ends a process by a C++ abort that names no process (and takes no Python callback: jaxlib 0.10 and 0.12 fail
to convert its argument). It stays as the last resort.
"""

import contextlib
import ipaddress
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.distributed import exit_codes
from jaxtrain.distributed.authentication import Forged, derive, opened, sealed
from jaxtrain.distributed.lines import GREETING_S, Line, Message

_MOST = 1000  # connections that may be greeting at a time; the oldest of more are closed
_PATIENCE = 5.0  # seconds that process 0 waits for the others to end before it does


class _Line(Line):
    """The connection to another process, and what is known of it."""

    def __init__(self, connection: socket.socket, key: bytes, accepts: bool):
        self.left, self.why, self.quiet, self.silent = False, "", 0.0, False
        super().__init__(connection, key, accepts)


class Peers:
    """The connection of this process, read by a background thread; a failure of any process ends this one too."""

    def __init__(self, process: int, processes: int, host: str, store: Any, timeout: float,
                 leave: Callable[[int], object] = os._exit):
        """Connect to the other processes; every process makes one instance.

        Args:
            host: the address of process 0.
            store: JAX's key-value store, through which the port is shared.
            timeout: seconds of silence after which a peer counts as lost.
        """
        self._process, self._processes, self._timeout, self._leave = process, processes, timeout, leave
        self._names = {i: f"process {i}" for i in range(processes)}
        self._lines: dict[int, _Line] = {}
        self._lock, self._ended, self._heard = threading.Lock(), threading.Event(), threading.Event()
        self._follower = threading.Thread()  # started once there is something to react to
        self.workdir: Path | None = None  # where events are recorded, once there is one
        self.on_hang: Callable[[str], bool] | None = None
        if process == 0:
            listener = _listen(interface(f"{host}:0"))
            token = secrets.token_hex(16)
            store.key_value_set("jaxtrain/peers", sealed("peers", [listener.getsockname()[1], token]))
            self._accept(listener, derive("peers", token), timeout)
        else:
            port, token = opened("peers", store.blocking_key_value_get("jaxtrain/peers", int(timeout * 1000)))
            line = _Line(socket.create_connection((host, port), timeout), derive("peers", token), accepts=False)
            line.greet({"process": process, "host": socket.gethostname()})
            while not line.messages:  # the answer says that all are connected, and their names
                if not line.receive():
                    raise ConnectionError(0, "process 0 closed the connection")
            self._names = {int(i): name for i, name in line.messages.pop(0)["names"].items()}
            self._lines[0] = line
        threading.Thread(target=self._listen_on, name="peers", daemon=True).start()

    def hang(self, why: str) -> None:
        """Tell the other processes that this one saw no progress and is about to end."""
        self._send({"kind": "hang", "process": self._process, "why": why})

    def fail(self, status: int, why: str) -> None:
        """Tell the other processes that this one is about to end, and with which status."""
        self._ended.set()
        self._send({"kind": "failed", "process": self._process, "why": why, "status": status})

    def close(self) -> None:
        """Announce the regular end of this process."""
        self._ended.set()
        self._send({"kind": "bye", "process": self._process, "why": ""})

    def wait_for_others(self, seconds: float | None = None) -> None:
        """Wait, in process 0, for the others to end, since JAX aborts them as soon as process 0 is gone."""
        end = time.monotonic() + (_PATIENCE if seconds is None else seconds)
        while self._process == 0 and time.monotonic() < end:
            if all(line.silent for line in list(self._lines.values())):
                return
            time.sleep(0.01)

    def wait_for_news(self, seconds: float) -> None:
        """After a broken connection, wait for the cause; does not return if it is found, because that ends the process.
        """
        if self._heard.wait(seconds):
            end = time.monotonic() + seconds
            self._follower.join(3 * _PATIENCE)  # it ends the process, unless something hangs on the way,
            time.sleep(max(0.0, end - time.monotonic()))  # or leaves that to the thread that writes the hang report

    # ----------------------------------------------------------------------------------------------- background threads
    def _accept(self, listener: socket.socket, key: bytes, timeout: float) -> None:
        """Take the greetings of all other processes, in whatever order and however slowly strangers talk meanwhile."""
        end, greeting = time.monotonic() + timeout, dict[int, _Line]()
        with listener, selectors.DefaultSelector() as selector:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)

            def forget(line):
                selector.unregister(line.connection)
                del greeting[line.connection.fileno()]

            while len(self._lines) < self._processes - 1:
                if time.monotonic() > end:
                    raise TimeoutError(0, f"not all processes connected within {timeout:.0f} seconds")
                for ready, _ in selector.select(0.2):
                    line = greeting.get(ready.fd)
                    try:
                        if line is None:
                            connection, _ = listener.accept()
                            connection.setblocking(False)
                            line = greeting[connection.fileno()] = _Line(connection, key, accepts=True)
                            selector.register(connection, selectors.EVENT_READ)
                        elif not line.receive():
                            raise ConnectionError
                        elif line.messages:
                            self._welcome(line, line.accept(), timeout)
                            forget(line)
                    except BlockingIOError:  # it is not ready after all
                        continue
                    except OSError:
                        if line is not None:
                            forget(line)
                            line.connection.close()
                late = [line for line in greeting.values() if time.monotonic() - line.opened > GREETING_S]
                for line in late + list(greeting.values())[:max(0, len(greeting) - len(late) - _MOST)]:
                    if line.connection.fileno() in greeting:
                        forget(line)
                        line.connection.close()
        for line in greeting.values():
            line.connection.close()
        self._names[0] += f" ({socket.gethostname()})"
        self._send({"kind": "here", "names": self._names})

    def _welcome(self, line: _Line, hello: Message, timeout: float) -> None:
        process = hello.get("process")
        if process not in self._names or process in self._lines or process == 0:
            raise Forged("a greeting")
        line.connection.settimeout(timeout)
        self._lines[process] = line
        self._names[process] += f" ({hello.get('host')})"

    def _send(self, message: Message, but: int | None = None) -> None:
        with self._lock:
            for process, line in self._lines.items():
                if process != but:
                    with contextlib.suppress(OSError):
                        line.send(message)

    def _listen_on(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process, line in self._lines.items():
                selector.register(line.connection, selectors.EVENT_READ, process)
            looked, pause = time.monotonic(), self._timeout / 12
            said = looked
            while self._lines:
                ready = selector.select(pause)
                now, before = time.monotonic(), looked
                looked = now
                if now - said > pause:
                    said = now
                    self._send({"kind": "alive"})
                for process, line in self._lines.items():
                    line.quiet += min(now - before, 2 * pause)  # a stopped process cannot receive
                    if line.quiet > self._timeout and not line.left:
                        line.left = line.silent = True
                        why = f"silent for {line.quiet:.0f} seconds"
                        self._hear({"kind": "lost", "process": process, "why": why}, process)
                for key, _ in ready:
                    process, line = key.data, self._lines[key.data]
                    line.quiet = 0.0
                    try:
                        whole = line.receive()
                    except OSError as error:
                        whole, line.why = False, f"{error.strerror}"
                    while line.messages:
                        message = line.messages.pop(0)
                        if message["kind"] == "alive":
                            continue
                        line.left = True  # the end of the connection after this message is expected
                        if message["kind"] != "bye":
                            self._hear(message, process)
                    if whole:
                        continue
                    selector.unregister(line.connection)
                    if not line.left:
                        self._hear({"kind": "lost", "process": process, "why": line.why}, process)
                    line.connection.close()
                    with self._lock:
                        del self._lines[process]

    def _hear(self, message: Message, source: int) -> None:
        if self._process == 0:
            self._send(message, but=source)
        if self._ended.is_set() or self._heard.is_set():
            return
        self._follower = threading.Thread(target=self._follow, args=(message,), name="peers-end", daemon=True)
        self._follower.start()
        self._heard.set()

    def _follow(self, message: Message) -> None:
        """End this process because of a failure in another one."""
        name, why, status = self._names[message["process"]], message["why"], message.get("status")
        if status is not None and self._ended.wait(_PATIENCE):
            return  # this process ends by itself, probably for the same reason
        if message["kind"] == "hang" and self.on_hang and self.on_hang(f"{name} saw {why}"):
            return  # this process found the hang too, and is writing its report
        does = {"lost": "is gone", "failed": "failed", "hang": "hangs"}[message["kind"]]
        status = status if status in exit_codes.FINAL else exit_codes.RESTART
        sentence = f"{name} {does}{f' ({why})' if why else ''}: process {self._process} ends" + (
            ", to be started again" if status == exit_codes.RESTART else "")
        if self.workdir and self._process == (message["process"] == 0):
            _record(self.workdir, message, name)
        sys.stdout.flush()
        os.write(2, f"{sentence}\n".encode())
        self.wait_for_others()
        self._leave(status)


def interface(address: str) -> str:
    """Return the host of `HOST:PORT` if this process can listen there and nowhere else; "": on all interfaces.

    A name (other than localhost) may stand for a loopback address on the host itself, where others would not reach it.
    """
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return host
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((host, 0))  # fails where the network translates the address on the way to this host
        return host
    except (ValueError, OSError):
        return ""


def _listen(host: str) -> socket.socket:
    """Open a listening socket, at a port that the kernel picks."""
    if host:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _record(workdir: Path, message: Message, name: str) -> None:
    from jaxtrain.observe import events

    writing = threading.Thread(target=events.record, args=(workdir, f"peer_{message['kind']}"), daemon=True,
                               kwargs={"peer": message["process"], "name": name, "why": message["why"]})
    writing.start()
    writing.join(timeout=_PATIENCE)  # the file system may hang too
