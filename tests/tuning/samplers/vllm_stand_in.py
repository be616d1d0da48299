"""A stand-in for vLLM's server: the routes that a run uses, over weights that are a number in a file, and kills."""

import contextlib
import http.server
import json
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.tuning.samplers.sent_weights import SentWeights

END = 256


class Numbers(SentWeights):
    """Weights whose states are numbers."""

    def _save(self, state, folder, linked):
        (folder / "number").write_text(f"{state}")


@dataclass(eq=False)
class Vllm:
    """A server on loopback, which may be killed and started again on the same port, without what it was sent."""

    answer: object = None  # (asked, response) -> what is answered instead, or bytes
    dies_after: object = None  # a function that says after how many answers it dies next; None: never
    port: int = 0

    def __post_init__(self):
        self.asked, self.answered, self.starts, self.loads = [], [], 0, []
        self._lock, self._server, self._lines = threading.RLock(), None, []
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self):
        with self._lock:
            self.starts += 1
            self.version, self.number, self.adapters, self._left = "default", None, {}, self.dies_after and (
                self.dies_after())
            self._server = _Server(("127.0.0.1", self.port), self)
            self.port = self._server.server_port
            threading.Thread(target=self._server.serve_forever, args=(0.005,), daemon=True).start()

    def kill(self):
        """Cut all calls: their answers are lost."""
        with self._lock:
            server, self._server = self._server, None
            lines, self._lines = self._lines, []
        if server is not None:
            server.shutdown()
            server.server_close()
        for line in lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def replies(self, path, content, server):
        """Return the status and the body; None: it is dead."""
        path = path.partition("?")[0]
        if path == "/v1/completions":
            with self._lock:
                found = self._completion(content) if server is self._server else None
            if found is None or found[0] != 200 or self.answer is None:
                return found
            return 200, self.answer(content, found[1])
        with self._lock:
            if server is not self._server:
                return None
            if path == "/v1/models":
                return 200, {"data": [{"id": name} for name in ("base", *self.adapters)]}
            if path == "/weight_info":
                return 200, {"weight_version": self.version}
            if path == "/update_weight_version":
                self.version = content["new_version"]
            elif path == "/collective_rpc":
                assert content["method"] == "reload_weights" and self.version == "loading"
                self.number = _number(content["kwargs"]["weights_path"])
                self.loads.append(self.number)
            elif path == "/v1/load_lora_adapter":
                self.adapters[content["lora_name"]] = _number(content["lora_path"])
                self.loads.append(self.adapters[content["lora_name"]])
            elif path == "/v1/unload_lora_adapter":
                self.adapters.pop(content["lora_name"], None)
            else:
                assert path in ("/pause", "/resume", "/reset_prefix_cache"), path
            return 200, {"success": True}

    def _completion(self, asked):
        self.asked.append(asked)
        if (name := asked.get("model")) and name not in self.adapters:
            return 404, {"error": {"message": f"The model `{name}` does not exist."}}
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                if self._left == -1:
                    threading.Thread(target=self._again, daemon=True).start()
                return None
        number = self.adapters[name] if name else self.number
        tokens = [97 + number, 98 + asked["seed"] % 2, END]
        said = {"choices": [{"index": 0, "text": "", "token_ids": tokens, "prompt_token_ids": asked["prompt"],
                             "logprobs": {"token_logprobs": [-1.0, -2.0, -0.5]}, "finish_reason": "stop"}]}
        self.answered.append((number, asked["seed"]))
        return 200, said

    def _again(self):
        self.kill()
        self.start()


def _number(folder):
    """Return the number that weights are; of a run's own weights, the step of their folder."""
    path = Path(folder) / "number"
    return int(path.read_text() if path.exists() else path.parent.name.removeprefix("step-"))


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, where, owner):
        self.owner = owner
        super().__init__(where, _Handler)

    def get_request(self):
        line, place = super().get_request()
        self.owner._lines.append(line)
        return line, place

    def handle_error(self, *_):
        pass


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

    def do_GET(self):
        self._reply(None)

    def _reply(self, content):
        found = self.server.owner.replies(self.path, content, self.server)
        if found is None:
            return
        status, body = found
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass
