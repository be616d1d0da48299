"""Serve the page of runs on this machine alone, made anew whenever a browser asks for it."""

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from jaxtrain.errors import UserError, say
from jaxtrain.runs.report.report_page import ReportPage

_HOST = "127.0.0.1"
_CONVERSATIONS = "/conversations"
_OURS = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")


def serve(page: ReportPage, port: int = 0) -> None:
    """Serve the page until Ctrl-C; port 0: one that is free."""
    with server(page, port) as made:
        say(f"http://{_HOST}:{made.server_address[1]}/ shows the report and keeps it up to date; press Ctrl-C to stop")
        made.serve_forever()


def server(page: ReportPage, port: int = 0) -> ThreadingHTTPServer:
    """Return the server, which listens already."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page of another site whose name leads to 127.0.0.1 (DNS rebinding) gets nothing.
            if not _OURS.fullmatch(self.headers.get("Host", "")):
                self.send_error(403)
            elif self.path not in ("/", "/now", _CONVERSATIONS):
                self.send_error(404)
            else:
                try:
                    with lock:
                        page.look()
                        content = (page.conversations("/") if self.path == _CONVERSATIONS else page.render(
                            live=True, bare=self.path == "/now", conversations=_CONVERSATIONS if page.written() else ""
                        )).encode()
                except UserError as mistake:  # a file of the run is damaged now
                    self.send_error(500, explain=str(mistake))
                else:
                    self._answer(content)

        def _answer(self, content: bytes) -> None:
            self.send_response(200)
            for name, value in (("Content-Type", "text/html; charset=utf-8"), ("Content-Length", f"{len(content)}"),
                                ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"),
                                ("X-Frame-Options", "DENY"), ("Referrer-Policy", "no-referrer")):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing of requests."""

    try:
        return ThreadingHTTPServer((_HOST, port), Handler)
    except (OSError, OverflowError) as error:
        raise UserError("--port", f"{_HOST}:{port} cannot be opened ({getattr(error, 'strerror', '') or error})",
                        "give another one, or leave it out") from None
