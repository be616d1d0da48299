"""The routes of vLLM's server that a run uses: completions with token ids, and those that replace its weights.

Answers come by the OpenAI-compatible `/v1/completions`. Adapters are loaded under a name of their own for each version
(`/v1/load_lora_adapter`), which requests then name. A whole model is loaded from a folder into the running server
(`/collective_rpc` with `reload_weights`), between `/pause` and `/resume`, and the server remembers the version's name
(`/update_weight_version`); these routes are there in vLLM's development mode.
"""

import math
import time
import urllib.parse
from dataclasses import dataclass, replace
from pathlib import Path

from jaxtrain.base.annotations import Json, JsonMapping, JsonObject
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import Form, parsed
from jaxtrain.tuning.http_service import Failed, HttpService

KEY = "rl.sampler"
LOADING = "loading"  # the version while weights are replaced: neither the old one nor the new one
ADAPTERS_FIX = ("start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-loras=2 "
                "--max-lora-rank=RANK, on a machine that sees rl.sampler_folder under the same path")
MODEL_FIX = "start vLLM with VLLM_SERVER_DEV_MODE=1, on a machine that sees rl.sampler_folder under the same path"


@dataclass(frozen=True)
class VllmServer:
    """A server at a URL that ends in /v1. `model`: what it calls its model; "": its only one."""

    service: HttpService
    model: str = ""
    until: float = math.inf  # when all requests must have been answered, by time.monotonic()

    @classmethod
    def of(cls, named: str, timeout_s: float, limit: int) -> "VllmServer":
        """Return the server that URL or URL#MODEL names."""
        url = urllib.parse.urlsplit(named)
        plain = url._replace(path=url.path.rstrip("/"), fragment="").geturl()
        service = HttpService(KEY, "sampler", plain, timeout_s, limit)
        if not url.path.rstrip("/").endswith("/v1"):
            raise UserError(KEY, f"{plain} does not end in /v1", "give the URL of an OpenAI-compatible server, such as "
                            "http://127.0.0.1:8000/v1")
        return cls(service, url.fragment)

    def completed(self, asked: JsonMapping) -> JsonObject:
        """Return the response to a request for completions."""
        return self._answer("/v1/completions", asked, dict)

    def models(self) -> set[str]:
        """Return the names of its models and adapters."""
        return {one["id"] for one in self._answer("/v1/models", None, {"data": [{"id": str}]})["data"]}

    def version(self) -> str:
        """Return the version of its weights as it was told, or "default"."""
        return self._managed("/weight_info", None, {"weight_version": str})["weight_version"]

    def base_version(self) -> str:
        """Return the version of the weights that adapters are added to; "default" where the server does not say it."""
        try:
            return self._answer("/weight_info", None, {"weight_version": str})["weight_version"]
        except Failed as error:
            if error.may_pass:
                raise
            return "default"

    def load_model(self, folder: Path, version: str) -> None:
        """Replace its weights by those in a folder. Killed in between, it has no version that a run knows."""
        self._managed("/update_weight_version", {"new_version": LOADING})
        self._managed("/pause?mode=abort", {})
        self._managed("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": f"{folder}"}})
        self._managed("/reset_prefix_cache", {})
        self._managed("/resume", {})
        self._managed("/update_weight_version", {"new_version": version})

    def load_adapter(self, folder: Path, name: str) -> None:
        """Load the adapter in a folder under this name."""
        self._managed("/v1/load_lora_adapter", {"lora_name": name, "lora_path": f"{folder}"}, None, ADAPTERS_FIX)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter, if it has it."""
        try:
            self._answer("/v1/unload_lora_adapter", {"lora_name": name}, None)
        except Failed as error:
            if error.may_pass:
                raise

    def _managed(self, route: str, content: JsonMapping | None, form: Form = None, fix: str = MODEL_FIX) -> Json:
        """Return what a route for weights answers; what it refuses is refused here."""
        try:
            return self._answer(route, content, form)
        except Failed as error:
            if error.may_pass:
                raise
            raise UserError(KEY, f"{self._at(route).url} {told(error)}", fix) from None

    def _answer(self, route: str, content: JsonMapping | None, form: Form) -> Json:
        """Return the JSON that a route answers, of this form; None: whatever it is."""
        service = self._at(route)
        left = min(service.timeout_s, max(0.05, self.until - time.monotonic()))
        answer = replace(service, timeout_s=left).once(content)
        if form is None:
            return None
        try:
            return parsed(answer, form)
        except ValueError as error:
            raise UserError(KEY, f"what {service.url} answers cannot be read (it {error})", "give the URL of a server "
                            "with vLLM's routes") from None

    def _at(self, route: str) -> HttpService:
        url = urllib.parse.urlsplit(self.service.url)
        path, _, query = route.partition("?")
        whole = url._replace(path=url.path.removesuffix("/v1") + path, query="&".join(filter(None, (url.query, query))))
        return replace(self.service, url=whole.geturl())


def told(error: Failed) -> str:
    """Return what a server said of an error, in a line."""
    said = " ".join("".join(x if x.isprintable() else " " for x in error.said).split())
    return f"{error}{f': {said[:200]}' if said else ''}"
