"""Who of the processes is still there: one connection from each of them to the first.

A process that dies, however it dies, has its connection closed by its kernel at once. One that is stopped, a machine
that dies and a network that is cut are found by silence: each end says every few seconds that it lives. JAX's own
heartbeat comes later and ends a process by a C++ abort that names nobody (and takes no Python callback: jaxlib 0.10 and
0.12 fail to convert its argument). It stays as the last resort.
"""

import contextlib
import json
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

Message = dict[str, Any]
_PATIENCE = 5.0  # seconds that the first process waits for the others to end before it does


class Peers:
    """The connection of this process; a thread of its own reads it. Whatever is heard of ends this process, too."""

    def __init__(self, process: int, processes: int, host: str, store: Any, timeout: float,
                 leave: Callable[[int], Any] = os._exit):
        """Every process makes one.

        Args:
            host: where the others reach process 0.
            store: JAX's key-value store, through which they learn the port.
            timeout: seconds of silence after which a peer counts as gone.
        """
        self._process, self._processes, self._timeout, self._leave = process, processes, timeout, leave
        self._names = {i: f"process {i}" for i in range(processes)}
        self._lines: dict[int, _Line] = {}
        self._lock, self._ended, self._heard = threading.Lock(), threading.Event(), threading.Event()
        self._follower = threading.Thread()  # once there is something to follow
        self.workdir: Path | None = None  # where events go, once there is one
        self.on_hang: Callable[[str], bool] | None = None
        if process == 0:
            listener = _listen()
            token = secrets.token_hex(16)
            store.key_value_set("jaxtrain/peers", f"{listener.getsockname()[1]} {token}")
            self._accept(listener, token, timeout)
        else:
            port, token = store.blocking_key_value_get("jaxtrain/peers", int(timeout * 1000)).split()
            line = _Line(socket.create_connection((host, int(port)), timeout), timeout)
            line.send({"kind": "here", "process": process, "host": socket.gethostname(), "token": token})
            line.receive()  # that all are there, and what they are called
            self._names = {int(i): name for i, name in line.messages.pop(0)["names"].items()}
            self._lines[0] = line
        threading.Thread(target=self._listen_on, name="peers", daemon=True).start()

    def hang(self, why: str) -> None:
        """Let the others know that this process saw no progress, and is about to end."""
        self._send({"kind": "hang", "process": self._process, "why": why})

    def fail(self, status: int, why: str) -> None:
        """Let the others know that this process is about to end, and with which status."""
        self._ended.set()
        self._send({"kind": "failed", "process": self._process, "why": why, "status": status})

    def close(self) -> None:
        """This process ends as it should."""
        self._ended.set()
        self._send({"kind": "bye", "process": self._process, "why": ""})

    def see_off(self, seconds: float | None = None) -> None:
        """The first process ends last: JAX aborts all others the moment it goes, and they have things to say."""
        end = time.monotonic() + (_PATIENCE if seconds is None else seconds)
        while self._process == 0 and time.monotonic() < end:
            if all(line.silent for line in list(self._lines.values())):
                return
            time.sleep(0.01)

    def wait_for_news(self, seconds: float) -> None:
        """A connection broke: whoever broke it is known in a moment, and then this does not return."""
        if self._heard.wait(seconds):
            end = time.monotonic() + seconds
            self._follower.join(3 * _PATIENCE)  # it ends the process, if nothing hangs on its way there,
            time.sleep(max(0.0, end - time.monotonic()))  # or leaves that to who writes down a hang

    # -------------------------------------------------------------------------------------------------- its own life
    def _accept(self, listener: socket.socket, token: str, timeout: float) -> None:
        listener.settimeout(timeout)
        with listener:
            while len(self._lines) < self._processes - 1:
                connection, _ = listener.accept()
                with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
                    line = _Line(connection, timeout)
                    line.receive()
                    hello = line.messages.pop(0)
                    if secrets.compare_digest(hello["token"], token):
                        self._lines[hello["process"]] = line
                        self._names[hello["process"]] += f" ({hello['host']})"
        self._names[0] += f" ({socket.gethostname()})"
        self._send({"kind": "here", "names": self._names})

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
                    line.quiet += min(now - before, 2 * pause)  # if this process was stopped, nobody could be heard
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
                        line.left = True  # what comes behind it, the end of the connection, is no news
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
        """End this process because of another one."""
        name, why, status = self._names[message["process"]], message["why"], message.get("status")
        if status is not None and self._ended.wait(_PATIENCE):
            return  # it came to an end of its own, and for the same reason as likely as not
        if message["kind"] == "hang" and self.on_hang and self.on_hang(f"{name} saw {why}"):
            return  # it has seen the same, and is writing it down
        does = {"lost": "is gone", "failed": "failed", "hang": "hangs"}[message["kind"]]
        status = status if status in exit_codes.FINAL else exit_codes.RESTART
        sentence = f"{name} {does}{f' ({why})' if why else ''}: process {self._process} ends" + (
            ", to be started again" if status == exit_codes.RESTART else "")
        if self.workdir and self._process == (message["process"] == 0):
            _record(self.workdir, message, name)
        sys.stdout.flush()
        os.write(2, f"{sentence}\n".encode())
        self.see_off()
        self._leave(status)


class _Line:
    """A connection on which each line is a JSON object."""

    def __init__(self, connection: socket.socket, timeout: float):
        self.connection, self.messages, self.left, self.why = connection, [], False, ""
        self.quiet, self.silent, self._rest = 0.0, False, b""
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> bool:
        """Take what has come; False: nothing more will."""
        while True:
            data = self.connection.recv(1 << 16)
            *lines, self._rest = (self._rest + data).split(b"\n")
            self.messages += [json.loads(line) for line in lines]
            if not data or not self._rest:
                return bool(data)


def _listen() -> socket.socket:
    """On all interfaces, at a port that the kernel picks."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _record(workdir: Path, message: Message, name: str) -> None:
    from jaxtrain.observe import events

    writing = threading.Thread(target=events.record, args=(workdir, f"peer_{message['kind']}"), daemon=True,
                               kwargs={"peer": message["process"], "name": name, "why": message["why"]})
    writing.start()
    writing.join(timeout=_PATIENCE)  # a file system may hang, too
