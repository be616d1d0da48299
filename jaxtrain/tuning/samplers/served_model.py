"""A model that answers the requests of many clients in batches, and takes new weights between two of them.

One thread uses the devices: it takes what waits and agrees in how it is sampled, and generates it together. Weights and
adapters come in folders, as vLLM's routes name them.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.errors import UserError
from jaxtrain.hub.generate import Generated, generate

if TYPE_CHECKING:
    from jaxtrain.run import Run
    from jaxtrain.train_step.state import TrainState

LINGER_S = 0.02  # a batch begins when no request has come for so long, or when it is full
WAITING = 4096  # requests, at most
ADAPTERS = 16  # at once
KINDS = 4  # of adapters, whose programs are kept
FIX = "send what docs/rl.md says of rl.sampler"
# What vLLM has and this has not, with the values that change nothing.
UNCHANGED = {"n": 1, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}


class Unknown(UserError):
    """Raised for an adapter that is not there."""


class Busy(Exception):
    """Raised where too many requests wait."""


@dataclass(frozen=True)
class How:
    """The terms of a request; those that agree in them are generated together."""

    model: str  # the name of an adapter; "": the model itself
    max_tokens: int
    temperature: float
    ends: tuple[int, ...]


@dataclass(frozen=True)
class _Asked:
    prompt: list[int]
    seed: int
    how: How
    future: "Future[Generated]"


class ServedModel:
    """A model, its adapters by name, and the thread that uses them."""

    def __init__(self, run: "Run", state: "TrainState", name: str, batch_size: int = 64):
        self.name, self.version, self._batch_size = name, "default", batch_size
        self._run, self._state = run, state
        self._adapters: dict[str, tuple[Run, TrainState]] = {}
        self._lora_runs: dict[str, Run] = {}
        self._files: dict[str, str] = {}  # with their hashes, from which the weights are
        self._waiting: list[_Asked | tuple[Callable[[], None], Future[None]]] = []
        self._changed, self._over = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="devices", daemon=True)
        self._thread.start()

    @property
    def names(self) -> list[str]:
        """The names that requests may give."""
        return [self.name, *self._adapters]

    def close(self) -> None:
        """End the thread after the batch that it is at."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join()

    def completion(self, body: JsonMapping) -> JsonObject:
        """Return the response to a request for one completion of token ids; waits for it."""
        asked = self._asked(body)
        self._put(asked)
        one = asked.future.result()
        tokens, logprobs = [*one.tokens, *(one.end or ())[:1]], [*(one.logprobs or ()), *(one.end or ())[1:]]
        return {"object": "text_completion", "model": asked.how.model or self.name, "choices": [{
            "index": 0, "text": "", "token_ids": tokens, "prompt_token_ids": asked.prompt, "finish_reason":
            one.finish_reason, "logprobs": {"token_logprobs": logprobs, "tokens": [f"token_id:{n}" for n in tokens]}}]}

    def reload(self, folder: Path) -> None:
        """Replace the weights by those in a folder, after what is being generated."""
        self._between(lambda: self._reload(folder))

    def load_adapter(self, name: str, folder: Path) -> None:
        """Have an adapter under a name, besides the model and other adapters."""
        self._between(lambda: self._load_adapter(name, folder))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        if self._adapters.pop(name, None) is None:
            raise Unknown("lora_name", f"there is no adapter {name[:80]!r}", "see /v1/models")

    # ------------------------------------------------------------------------------------------------- the requests
    def _asked(self, body: JsonMapping) -> _Asked:
        longest, known = self._run.config.model.max_seq_len, self._run.config.model.vocabulary
        prompt, ends, seed = body.get("prompt"), body.get("stop_token_ids") or [], body.get("seed")
        if not _are_tokens(prompt, known) or not _are_tokens(ends, 2**31):
            raise UserError("prompt", f"it, or stop_token_ids, is not a list of token ids below {known}", FIX)
        many, temperature = body.get("max_tokens", 16), body.get("temperature", 1.0)
        if type(many) is not int or many < 1 or not prompt or len(prompt) + many > longest:
            raise UserError("max_tokens", f"{len(prompt)} tokens of the prompt and {many!r} more do not fit into "
                            f"{longest}", FIX)
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < 1e6:
            raise UserError("temperature", f"{str(temperature)[:20]} is not a temperature", FIX)
        for name, value in UNCHANGED.items():
            if body.get(name) not in (None, value):
                raise UserError(name, f"{str(body[name])[:20]} is not supported", f"leave it at {value}")
        if body.get("top_k") not in (None, 0, -1) or type(seed) is not int:
            raise UserError("seed", "there is none, or there is a top_k", FIX)
        model = body.get("model") or ""
        if model not in ("", *self.names):
            raise Unknown("model", f"there is no model {str(model)[:80]!r}", "see /v1/models")
        how = How("" if model == self.name else model, many, float(temperature), tuple(ends))
        return _Asked(prompt, seed % 2**32, how, Future())

    def _put(self, item: "_Asked | tuple[Callable[[], None], Future[None]]") -> None:
        with self._changed:
            if len(self._waiting) >= WAITING or self._over:
                raise Busy
            self._waiting.append(item)
            self._changed.notify()

    def _between(self, change: Callable[[], None]) -> None:
        future: Future[None] = Future()
        self._put((change, future))
        future.result()

    # -------------------------------------------------------------------------------------------------- the devices
    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._over)
                while not self._over and (many := len(self._waiting)) < self._batch_size:
                    self._changed.wait(LINGER_S)
                    if len(self._waiting) == many:
                        break
                if self._over:
                    for item in self._waiting:
                        (item.future if isinstance(item, _Asked) else item[1]).set_exception(Busy())
                    return
                first = self._waiting[0]
                taken = self._alike(first.how) if isinstance(first, _Asked) else [first]
                self._waiting = [item for item in self._waiting if not any(item is one for one in taken)]
            if isinstance(first, _Asked):
                self._generate(first.how, [one for one in taken if isinstance(one, _Asked)])
            else:
                _settle(first[1], first[0])

    def _alike(self, how: How) -> "list[_Asked | tuple[Callable[[], None], Future[None]]]":
        """Return the requests that wait on these terms, before weights are changed."""
        found: list[_Asked | tuple[Callable[[], None], Future[None]]] = []
        for item in self._waiting:
            if not isinstance(item, _Asked):
                break
            if item.how == how:
                found.append(item)
        return found

    def _generate(self, how: How, asked: list[_Asked]) -> None:
        try:
            if how.model and how.model not in self._adapters:
                raise Unknown("model", f"there is no model {how.model[:80]!r} any more", "see /v1/models")
            run, state = self._adapters[how.model] if how.model else (self._run, self._state)
            found = generate(run, state, [one.prompt for one in asked], max_new_tokens=how.max_tokens,
                             temperature=how.temperature, tempered=how.temperature > 0, stop=how.ends, logprobs=True,
                             batch_size=self._batch_size, drawn=[(one.seed, 0) for one in asked])
        except Exception as error:  # each client is told
            for one in asked:
                one.future.set_exception(error)
            return
        for one, answer in zip(asked, found, strict=True):
            one.future.set_result(answer)

    def _reload(self, folder: Path) -> None:
        from jaxtrain.hub import trained_model
        from jaxtrain.hub.weights import published_weights
        from jaxtrain.run import abstract_model
        from jaxtrain.tuning.samplers.sent_weights import files_of

        files = files_of(folder)
        same = [name for name, digest in files.items() if self._files.get(name) == digest]
        params = published_weights.load(folder, self._run.config.model, abstract_model(self._run),
                                        self._state.all_params, same)
        self._state, self._files = trained_model.with_params(self._run, params), files

    def _load_adapter(self, name: str, folder: Path) -> None:
        from jaxtrain import builder
        from jaxtrain.config.sections.tuning_keys import LoraConfig
        from jaxtrain.hub import trained_model
        from jaxtrain.hub.adapters import adapter_files
        from jaxtrain.models import lora
        from jaxtrain.run import abstract_model
        from jaxtrain.train_step import partition

        config, base = self._run.config, self._state.all_params
        section = LoraConfig(**adapter_files.keys(folder, config.model))
        kind = f"{section}"
        run = self._lora_runs.pop(kind, None) or builder.build(replace(config, lora=section), mesh=self._run.mesh)
        self._lora_runs = dict([*self._lora_runs.items(), (kind, run)][-KINDS:])  # whose programs are compiled once
        found = adapter_files.load(folder, config.model, section, lora.adapters(abstract_model(run)), base)
        self._adapters.pop(name, None)
        while len(self._adapters) >= ADAPTERS:  # the oldest: whose run has been started again, or is over
            del self._adapters[next(iter(self._adapters))]
        self._adapters[name] = run, trained_model.with_params(run, partition.merge(base, found))


def _settle(future: "Future[None]", change: Callable[[], None]) -> None:
    try:
        change()
        future.set_result(None)
    except Exception as error:
        future.set_exception(error)


def _are_tokens(found: object, known: int) -> TypeGuard[list[int]]:
    return isinstance(found, list) and all(type(n) is int and 0 <= n < known for n in found)
