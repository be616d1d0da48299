"""A server that speaks S3, on loopback, and a proxy before it that does to requests what networks do."""

import contextlib
import http.client
import os
import random
import socket
import subprocess
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

FAULTS = "error", "busy", "reset", "truncated", "short"  # and "silent", which waits


class Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Network"

    def handle_one(self):
        body = self.body()
        fault = ""
        if self.path.startswith(f"/{self.server.bucket}"):  # else a thread of an earlier test still reads ahead
            with self.server.lock:
                number = len(self.server.requests)
                self.server.requests.append(f"{self.command} {self.path}")
            fault = self.server.fault(number, self.command, self.path)
        self.server.faults += [fault] if fault else []
        if fault == "reset":
            return self.drop()
        if fault == "silent":
            self.connection.settimeout(60)
            with contextlib.suppress(OSError):
                self.connection.recv(1)  # until the client gives up
            return self.drop()
        if fault in ("error", "busy", "forbidden"):
            status, code = {"error": (500, "InternalError"), "busy": (503, "SlowDown"),
                            "forbidden": (403, "AccessDenied")}[fault]
            content = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
            return self.answer(status, {"Content-Type": "application/xml"}, content)
        headers = {key: value for key, value in self.headers.items()
                   if key.lower() not in ("expect", "host", "transfer-encoding")}
        to_server = http.client.HTTPConnection("127.0.0.1", self.server.port)
        to_server.request(self.command, self.path, body, headers)
        with to_server.getresponse() as reply:
            status, headers, content = reply.status, dict(reply.headers), reply.read()
        to_server.close()
        half = len(content) // 2
        if fault == "flipped" and content:
            content = content[:half] + bytes([content[half] ^ 1]) + content[half + 1:]
        if fault == "short":
            content = content[:half]
        self.answer(status, headers, content, half if fault == "truncated" else None)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def answer(self, status, headers, content, only=None):
        self.send_response_only(status)
        for key, value in headers.items():
            if key.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(key, value)
        length = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:only])
        if only is not None:
            self.drop()

    def drop(self):
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_one

    def log_message(self, *_):
        pass


class Network(ThreadingHTTPServer):
    """The proxy: `requests` were made; `fault(number, method, path)` says what goes wrong, and `faults` did."""

    daemon_threads = True

    def __init__(self, port: int):
        super().__init__(("127.0.0.1", 0), Proxy)
        self.port, self.lock, self.bucket = port, threading.Lock(), ""  # "": any
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.calm()

    def calm(self):
        self.requests: list[str] = []
        self.faults: list[str] = []
        self.fault = lambda number, method, path: ""

    def shake(self, seed: int, faults=FAULTS, share: float = 0.3, methods=("GET",), silent=()):
        """A share of the requests fails, as the seed says; some get no answer, which takes longer."""
        rng = random.Random(seed)
        drawn = [rng.choice(faults) if rng.random() < share else "" for _ in range(10_000)]
        self.fault = lambda number, method, path: (
            "silent" if number in silent else drawn[number] if method in methods else "")

    def handle_error(self, *_):
        pass  # a client that went away


def environment(address: str) -> dict[str, str]:
    return {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": address, "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull, "AWS_MAX_ATTEMPTS": "1", "NO_PROXY": "127.0.0.1"}


@pytest.fixture(scope="session")
def _server():
    for needed in ("moto.server", "s3fs"):
        pytest.importorskip(needed, reason=f"{needed} comes with the extra .[test-all]")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
                               env=os.environ | environment(""), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert process.poll() is None
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="session")
def _network(_server):
    network = Network(_server)
    thread = threading.Thread(target=network.serve_forever, daemon=True)
    thread.start()
    yield network
    network.shutdown()
    network.server_close()


@pytest.fixture
def network(_network, monkeypatch):
    """Between this process, and those that it starts, and the server; calm until a test shakes it."""
    from jaxtrain import storage

    for key, value in environment(_network.address).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(storage, "PAUSE", (0.001, 0.01))
    _network.bucket = ""
    _network.calm()
    yield _network
    _network.calm()


@pytest.fixture
def impatient(network, monkeypatch):
    """Shorten the time for which this process waits for an answer, as a user would set it."""
    import fsspec.config

    from jaxtrain import storage

    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 2.0}})
    storage._connected.cache_clear()
    yield
    storage._connected.cache_clear()


@pytest.fixture
def bucket(network):
    """The URL of an empty one."""
    from jaxtrain import storage

    name = f"b{uuid.uuid4().hex}"
    storage._connected("s3").mkdir(name)
    network.bucket = name
    network.calm()
    return f"s3://{name}"
