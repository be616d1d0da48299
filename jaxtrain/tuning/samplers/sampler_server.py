"""The HTTP server of a sampler: the routes of vLLM that `rl.sampler` uses, for programs of this machine."""

import contextlib
import http.server
import json
from collections.abc import Callable
from pathlib import Path

from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.base.bounded_server import BoundedServer, deadline, is_from_here, size_of
from jaxtrain.errors import UserError, say
from jaxtrain.files.bounded_files import parsed
from jaxtrain.tuning.samplers.served_model import Busy, ServedModel, Unknown

CONNECTIONS = 1024
BODY = 2**24  # bytes of a request
IDLE_S = 120.0  # in which a request must have come


def _folder(text: object) -> Path:
    if not isinstance(text, str) or not Path(text).is_dir():
        raise UserError("folder", f"{str(text)[:200]!r} is not a folder here", "let both see it under the same path")
    return Path(text)


def _reload(model: ServedModel, body: JsonObject) -> None:
    if body.get("method") != "reload_weights" or not isinstance(body.get("kwargs"), dict):
        raise UserError("method", "it is not reload_weights with kwargs", "send {'weights_path': FOLDER} with it")
    model.reload(_folder(body["kwargs"].get("weights_path")))


def _load_adapter(model: ServedModel, body: JsonObject) -> None:
    model.load_adapter(_text(body, "lora_name"), _folder(body.get("lora_path")))


def _named(model: ServedModel, body: JsonObject) -> None:
    model.version = _text(body, "new_version")


def _text(body: JsonObject, name: str) -> str:
    if not isinstance(body.get(name), str) or not 0 < len(body[name]) <= 200:
        raise UserError(name, "it is not a text", "send a short one")
    return body[name]


def _nothing(model: ServedModel, body: JsonObject) -> None:
    """Do nothing: weights change between two batches, and no cache outlives one."""


GETS: dict[str, Callable[[ServedModel], Json]] = {
    "/health": lambda model: {},
    "/v1/models": lambda model: {"object": "list", "data": [{"id": name, "object": "model"} for name in model.names]},
    "/weight_info": lambda model: {"weight_version": model.version},
}
POSTS: dict[str, Callable[[ServedModel, JsonObject], Json]] = {
    "/v1/completions": ServedModel.completion,
    "/collective_rpc": _reload,
    "/update_weight_version": _named,
    "/pause": _nothing, "/resume": _nothing, "/reset_prefix_cache": _nothing,
    "/v1/load_lora_adapter": _load_adapter,
    "/v1/unload_lora_adapter": lambda model, body: model.unload_adapter(_text(body, "lora_name")),
}


class SamplerServer(BoundedServer):
    """A server on loopback for a model."""

    def __init__(self, model: ServedModel, port: int = 0):
        self.model = model
        try:
            super().__init__(("127.0.0.1", port), _Handler, CONNECTIONS)
        except (OSError, OverflowError) as error:
            raise UserError("--port", f"127.0.0.1:{port} cannot be opened ({getattr(error, 'strerror', '') or error})",
                            "give another one, or leave it out") from None

    @property
    def url(self) -> str:
        """The URL for `rl.sampler`."""
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = IDLE_S
    server_version, sys_version = "jaxtrain", ""
    server: SamplerServer  # pyrefly: ignore[bad-override-mutable-attribute]

    def handle_one_request(self) -> None:
        """Answer one request, whose head and body must come in time."""
        self._deadline = deadline(self.connection, IDLE_S)
        try:
            super().handle_one_request()
        finally:
            self._deadline.cancel()

    def do_GET(self) -> None:
        self._answer(GETS, False)

    def do_POST(self) -> None:
        self._answer(POSTS, True)

    def _answer(self, routes, has_body: bool) -> None:
        try:
            if not is_from_here(self.headers):
                self._send(403, "only programs of this machine are answered, and no pages")
                return
            body = [self._body()] if has_body else []
            self._deadline.cancel()
            route = routes.get(self.path.partition("?")[0])
            if route is None:
                self._send(404, f"there is no {self.path[:200]}")
            else:
                self._send(200, route(self.server.model, *body) or {})
        except Unknown as mistake:
            self._send(404, f"{mistake}")
        except (UserError, ValueError) as mistake:
            self._send(400, f"{mistake}")
        except Busy:
            self._send(503, "too many requests wait")
        except OSError:  # the client is gone
            self.close_connection = True
        except Exception as error:
            say(f"error: {type(error).__name__}: {error}")
            self._send(500, f"{type(error).__name__} in the sampler")

    def _body(self) -> JsonObject:
        length = self.headers.get("Content-Length", "")
        size = size_of(length) if length.isdecimal() else BODY + 1
        if size > BODY:
            raise UserError("request", f"it does not say its length, or is above {BODY:,} bytes", "send less at once")
        return parsed(self.rfile.read(size) or b"{}", dict)

    def _send(self, status: int, content: JsonObject | str) -> None:
        said = {"error": {"message": content}} if isinstance(content, str) else content
        body = json.dumps(said).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", f"{len(body)}")
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write no log of requests."""
