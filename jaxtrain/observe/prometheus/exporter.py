"""The exporter: answers a scrape of Prometheus over HTTP, and writes files for node_exporter's textfile collector.

A monitor must never cost a run: what it cannot do is told once and tried again, and no error of it ends anything.
"""

import contextlib
import errno
import http.server
import ipaddress
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxtrain.base.bounded_server import BoundedServer, deadline
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.observe import events, profile_requests
from jaxtrain.observe.prometheus.run_metrics import RunMetrics

AGAIN_S = 10.0  # between attempts to open a port that is in use
FILE_S = 15.0  # between files
REQUEST_S = 5.0  # for the next bytes of a request
WHOLE_S = 10.0  # for a request and its answer
MOST = 16  # connections at once
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@contextlib.contextmanager
def exporting(metrics: RunMetrics, workdir: str | Path, *, host: str = "", port: int = 0,
              textfile: str | Path = "") -> Iterator[None]:
    """Export metrics within this context: at `port` of the address `host`, in the folder `textfile`, or both."""
    ended = threading.Event()
    jobs: list[Callable[[], None]] = []
    if port:
        jobs.append(lambda: _serve(metrics, workdir, (host, port), ended))
    if textfile:
        jobs.append(lambda: _write(metrics, workdir, Path(textfile), ended))
    threads = [threading.Thread(target=job, name="prometheus", daemon=True) for job in jobs]
    events.listeners.append(metrics.heard)
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        events.listeners.remove(metrics.heard)
        for thread in threads:
            thread.join(timeout=2 * REQUEST_S)


def _serve(metrics: RunMetrics, workdir: str | Path, address: tuple[str, int], ended: threading.Event) -> None:
    """Open the port, as soon as it is free, and answer there."""
    shown = f"http://{f'[{address[0]}]' if ':' in address[0] else address[0]}:{address[1]}/metrics"
    refused = ""
    while not ended.is_set():
        try:
            server = _Server(address, metrics, workdir)
        # Such as the process that was here before, which is still ending; or a port above 65535, on a host with many.
        except (OSError, OverflowError, UnicodeError) as error:
            if not refused:
                refused = getattr(error, "strerror", "") or f"{error}"
                said = f"nothing can be exported at {shown} ({refused}); the run continues, and this is tried again"
                of_host = isinstance(error, socket.gaierror | UnicodeError)
                key = "host" if of_host or getattr(error, "errno", 0) == errno.EADDRNOTAVAIL else "port"
                events.tell(workdir, "prometheus_failed", f"observe.prometheus_{key}: {said} every {AGAIN_S:.0f} s",
                            address=shown, reason=refused)
            ended.wait(AGAIN_S)
            continue
        with server:
            said = f"metrics are exported at {shown}" if refused or metrics.process == 0 else ""
            events.tell(workdir, "prometheus", said, address=shown)
            threading.Thread(target=server.serve_forever, name="prometheus", args=(0.1,), daemon=True).start()
            ended.wait()
            server.shutdown()


def _write(metrics: RunMetrics, workdir: str | Path, folder: Path, ended: threading.Event) -> None:
    """Write the file every few seconds; it goes when the run ends in whatever way that this process survives."""
    # The collector reads all files whose names end with .prom, and merges what they have.
    path = folder / f"jaxtrain-{re.sub(r'[^A-Za-z0-9_.-]', '_', metrics.run)}-{metrics.process}.prom"
    refused = False
    while not ended.is_set():
        try:
            atomic_files.write(path, metrics.text())
            refused = False
        except OSError as error:
            if not refused:
                refused = True
                events.tell(workdir, "prometheus_failed", f"observe.prometheus_textfile: {path} cannot be written "
                            f"({error.strerror}); the run continues, and it is tried again every {FILE_S:.0f} s",
                            path=f"{path}", reason=error.strerror)
        ended.wait(FILE_S)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


class _Server(BoundedServer):
    """Answers GET /metrics; and POST /profile?steps=5, where only this machine can ask."""

    request_queue_size = 8 * MOST

    def __init__(self, address: tuple[str, int], metrics: RunMetrics, workdir: str | Path):
        self.metrics, self.workdir = metrics, workdir
        super().__init__(address, _Handler, MOST)

    def process_request_thread(self, request, client_address) -> None:
        """Answer one connection, and end it if it takes too long."""
        limit = deadline(request, WHOLE_S)
        try:
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server_version, sys_version = "jaxtrain", ""

    def do_GET(self) -> None:
        """Answer with the metrics."""
        if self.path.partition("?")[0] != "/metrics":
            return self._answer(404, "the metrics are at /metrics\n", "text/plain; charset=utf-8")
        try:
            self._answer(200, self.server.metrics.text(), _TYPE)  # pyrefly: ignore[missing-attribute]
        except OSError:  # the client is gone
            raise
        except Exception as error:
            self._answer(500, f"{type(error).__name__}\n", "text/plain; charset=utf-8")

    def do_POST(self) -> None:
        """Ask the run for a profile of its next steps."""
        path, _, query = self.path.partition("?")
        server: _Server = self.server  # pyrefly: ignore[bad-assignment]
        wanted, text = dict(urllib.parse.parse_qsl(query)).get("steps", "5"), "text/plain; charset=utf-8"
        if path != "/profile":
            return self._answer(404, "a profile is asked for at /profile\n", text)
        if not ipaddress.ip_address(self.client_address[0]).is_loopback or "Origin" in self.headers:
            return self._answer(403, "a profile is for programs of this machine to ask for, not for pages\n", text)
        try:
            if not wanted.isdecimal():
                raise UserError("steps", f"{wanted!r} is not a number", "give one, such as /profile?steps=5")
            profile_requests.request_profile(server.workdir, int(wanted[:9]))
            self._answer(202, "it is written to profiles/STEP in the workdir\n", text)
        except UserError as error:
            self._answer(409, f"{error}\n", text)

    def _answer(self, status: int, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", f"{len(body)}")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *words) -> None:
        """Write no log of requests."""
