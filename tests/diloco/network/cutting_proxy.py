"""A proxy on loopback that cuts connections, or lets nothing back."""

import contextlib
import socket
import threading


class CuttingProxy:
    """Forwards to a port; `cut_after` has, for each connection to come, after how many bytes to cut it, or None."""

    def __init__(self, port):
        self.target, self.cut_after, self.silent = port, [], []
        self.cuts = self.up = self.down = self.connections = 0
        self.open = set()
        self.closed = False  # whether new connections are cut at once
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    def __enter__(self):
        threading.Thread(target=self.accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # which ends its thread's wait; to close it does not
        self.listener.close()
        self.cut()

    def close_port(self, closed=True):
        """Let no connection through any more, or again."""
        self.closed = closed
        self.cut()

    def cut(self):
        """Cut all connections."""
        for line in list(self.open):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                line = self.listener.accept()[0]
                self.connections += 1
                if self.closed:
                    line.close()
                    continue
                left = [self.cut_after.pop(0) if self.cut_after else None]
                silent = self.silent.pop(0) if self.silent else False
                try:
                    other = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    line.close()
                    continue
                self.open |= {line, other}
                for way in ((line, other, "up"), (other, line, "down")):
                    threading.Thread(target=self.forward, args=(*way, left, silent), daemon=True).start()
                if self.closed:  # since just now
                    self.cut()

    def forward(self, source, target, name, left, silent):
        try:
            while content := source.recv(2**16):
                setattr(self, name, getattr(self, name) + len(content))
                if not (silent and name == "down"):
                    target.sendall(content)
                if left[0] is not None:
                    left[0] -= len(content)
                    if left[0] <= 0:
                        left[0] = None
                        self.cuts += 1
                        break
        except OSError:
            pass
        for line in (source, target):
            self.open.discard(line)
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
