"""The calls of the Tinker API that a training service answers: sessions, models in training, samplers, saved states.

Calls that need the devices are put into the queue, and answered when their client comes back for the answer.
"""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.errors import UserError
from jaxtrain.serving import wire
from jaxtrain.serving.api_parts import (
    adam_of,
    all_listed,
    call_of,
    check_optimizer,
    loaded,
    lora_of,
    section,
    stamp,
    whole,
)
from jaxtrain.serving.datums import checked
from jaxtrain.serving.lora_engine import Adapters, Engine, targets_of
from jaxtrain.serving.sampler_table import Samplers
from jaxtrain.serving.sampling_calls import Sampler, SampleRequest, request_of, sampled
from jaxtrain.serving.saved_adapters import SAMPLING, TRAINING, Place, SavedAdapters
from jaxtrain.serving.work_queue import Refused, Work, WorkQueue

SILENT_S = 300.0  # after which a session's models may make room for others; clients tell of themselves every 10 s
_TRAINED = ("train_mlp", "train_attn", "train_unembed")


@dataclass(frozen=True)
class Limits:
    """The bounds of a service's memory."""

    models: int = 8  # in training at once
    rank: int = 128
    samplers: int = 32  # whose adapters are in memory
    sessions: int = 1024
    queue: int = 1024  # calls that wait
    queue_bytes: int = 2**30
    batch: int = 64  # sequences that are generated at once


@dataclass
class Session:
    """A client that has connected."""

    owner: str
    seen: float


@dataclass
class Model:
    """Adapters in training, and whose they are."""

    owner: str
    session: str
    lora: LoraConfig
    about: JsonObject
    adapters: Adapters
    touched: float = field(default_factory=time.time)


class Service:
    """All that a service knows, and the calls that it answers; each returns a JSON object."""

    def __init__(self, engine: Engine, folder: Path, name: str, *, tokenizer: str = "", alpha: float = 32.0,
                 limits: Limits | None = None):
        self.engine, self.folder, self.name, self.tokenizer, self.alpha = engine, folder, name, tokenizer, alpha
        self.limits = limits or Limits()
        self.queue = WorkQueue(self.limits.queue, self.limits.queue_bytes, self.limits.batch)
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self.models: dict[str, Model] = {}
        self.samplers = Samplers(engine, self.limits.samplers)
        self._lock = threading.RLock()

    def close(self) -> None:
        """End the work that runs, and answer no more."""
        self.queue.close()

    # ------------------------------------------------------------------------------------------------------- sessions
    def capabilities(self) -> JsonObject:
        """Return which models the server has."""
        return {"supported_models": [{"model_name": self.name, "max_context_length": self.engine.longest,
                                      "trainable": True, "sampleable": True}]}

    def create_session(self, owner: str, body: JsonObject) -> JsonObject:
        """Begin a session."""
        with self._lock:
            silent = [id for id, one in self.sessions.items() if time.monotonic() - one.seen > SILENT_S]
            if len(self.sessions) >= self.limits.sessions:
                if not silent:
                    raise Refused(429, f"{len(self.sessions)} sessions are open; try again later")
                self.finish_session(self.sessions[silent[0]].owner, silent[0])
            id = f"session-{secrets.token_hex(8)}"
            self.sessions[id] = Session(owner, time.monotonic())
        return {"type": "create_session", "session_id": id}

    def heartbeat(self, owner: str, body: JsonObject) -> JsonObject:
        """Note that a session's client is there."""
        self._session(owner, body.get("session_id")).seen = time.monotonic()
        return {"type": "session_heartbeat"}

    def finish_session(self, owner: str, id: str) -> JsonObject:
        """End a session: its models and samplers that were not saved are gone."""
        self._session(owner, id)
        with self._lock:
            for model in [name for name, one in self.models.items() if one.session == id]:
                self._unload(model)
            self.samplers.finish(id)
            del self.sessions[id]
        return {}

    def session(self, owner: str, id: str) -> JsonObject:
        """Return the models and samplers of a session."""
        self._session(owner, id)
        return {"training_run_ids": [name for name, one in self.models.items() if one.session == id],
                "sampler_ids": self.samplers.of_session(id)}

    def _session(self, owner: str, id: object) -> Session:
        found = self.sessions.get(id) if isinstance(id, str) else None
        if found is None or found.owner != owner:
            raise Refused(404, f"there is no session {id!r}: it has ended, or the server was started anew; make a new "
                          "ServiceClient")
        return found

    # --------------------------------------------------------------------------------------------- models in training
    def create_model(self, owner: str, body: JsonObject, size: int = 0) -> JsonObject:
        """Make new adapters."""
        id, session = self._new_model(owner, body)
        asked = section(body, "lora_config")
        rank, seed = asked.get("rank", 32), asked.get("seed")
        flags = {name: bool(asked.get(name, True)) for name in _TRAINED}
        seed = secrets.randbelow(2**31) if seed is None else seed

        def make() -> JsonObject:
            self._check_base(body.get("base_model"))
            check_optimizer(body.get("optimizer_config"))
            if not 1 <= whole(rank, "lora_config.rank") <= self.limits.rank:
                raise UserError("lora_config.rank", f"{rank} is out of range", f"give 1 to {self.limits.rank} "
                                "(--max_rank)")
            if not -2**63 <= whole(seed, "lora_config.seed") < 2**63:
                raise UserError("lora_config.seed", f"{seed} is out of range", "give a number of 63 bits")
            if not (flags["train_mlp"] or flags["train_attn"]):
                raise UserError("lora_config", "neither attention nor MLP layers are to be trained, and the output "
                                "projection has no adapters here", "train one of them")
            routed = self.engine.run.config.model.experts.num > 0
            c = LoraConfig(rank=rank, alpha=self.alpha, targets=targets_of(flags["train_mlp"], flags["train_attn"]),
                           experts=flags["train_mlp"] and routed)
            self._add(id, owner, session, c, flags, lambda: self.engine.shape(c).begin(seed))
            return {"type": "create_model", "model_id": id}

        return self._queued(owner, f"{id}:create", size, make)

    def load_weights(self, owner: str, body: JsonObject, size: int = 0) -> JsonObject:
        """Load saved adapters: into a model, or as a new one if a session is named in its place."""
        place, with_optimizer = Place.of(body.get("path")), bool(body.get("optimizer"))
        saved = self._saved(owner)
        if body.get("session_id") is None:
            model = self._model(owner, body.get("model_id"))

            def load() -> JsonObject:
                about = saved.about(place)
                if lora_of(about) != model.lora:
                    raise UserError("path", f"{place} has rank {about['rank']} and alpha {about['alpha']:g}",
                                    "load it as a new model: create_training_client_from_state")
                model.adapters = loaded(self.engine, saved, place, about, with_optimizer)
                return {"type": "load_weights", "path": f"{place}", "model_id": body["model_id"]}
            return self._in_order(owner, body, size, load)
        id, session = self._new_model(owner, body)

        def make() -> JsonObject:
            about = saved.about(place)
            if body.get("base_model") is not None:
                self._check_base(body["base_model"])
            check_optimizer(body.get("optimizer_config"))
            self._add(id, owner, session, lora_of(about), about.get("trained", {}),
                      lambda: loaded(self.engine, saved, place, about, with_optimizer))
            return {"type": "load_weights", "path": f"{place}", "model_id": id}
        return self._queued(owner, f"{id}:create", size, make)

    def get_info(self, owner: str, body: JsonObject) -> JsonObject:
        """Return what a model is."""
        model = self._model(owner, body.get("model_id"))
        return {"type": "get_info", "model_id": body["model_id"], "is_lora": True, "lora_rank": model.lora.rank,
                "model_name": self.name, "model_data": {
                    "arch": self.engine.run.config.model.name, "model_name": self.name,
                    **({"tokenizer_id": self.tokenizer} if self.tokenizer else {})}}

    def forward_backward(self, owner: str, request: bytes) -> JsonObject:
        """Compute the loss of data, and add its gradient to the model's."""
        asked = wire.forward_backward_of(request)
        model = self._model(owner, asked.model_id)

        def compute() -> bytes:
            datums = checked(wire.datums_of(asked), asked.loss_fn, asked.numbers, vocabulary=self.engine.vocabulary,
                             longest=self.engine.longest)
            shape = model.adapters.shape
            if asked.forward_only:
                return wire.forward_backward_output(*shape.forward(model.adapters.params, datums, asked.loss_fn))
            return wire.forward_backward_output(*shape.forward_backward(model.adapters, datums, asked.loss_fn))

        return self._in_order(owner, {"model_id": asked.model_id, "seq_id": asked.seq_id}, len(request), compute)

    def optim_step(self, owner: str, body: JsonObject, size: int = 0) -> JsonObject:
        """Make a step of the optimizer."""
        model = self._model(owner, body.get("model_id"))

        def step() -> JsonObject:
            return {"metrics": model.adapters.shape.optim_step(model.adapters, adam_of(body))}
        return self._in_order(owner, body, size, step)

    def save_weights(self, owner: str, body: JsonObject, size: int = 0) -> JsonObject:
        """Save a model's adapters and its optimizer's state."""
        model, saved = self._model(owner, body.get("model_id")), self._saved(owner)
        id, number = call_of(body)
        place = Place(id, TRAINING, f"{body.get('path') or f'step-{number}'}")

        def save() -> JsonObject:
            saved.check(place, bool(body.get("overwrite")))
            a = model.adapters
            trees = {"params": a.params, "first": a.first, "second": a.second}
            if a.gradient is not None:
                trees["gradient"] = a.gradient
            saved.save(place, trees, self._about(model, body) | {"optimizer": True, "gradient": a.gradient is not None})
            return {"type": "save_weights", "path": f"{place}"}
        return self._in_order(owner, body, size, save)

    def save_weights_for_sampler(self, owner: str, body: JsonObject, size: int = 0) -> JsonObject:
        """Save a model's adapters for samplers, or keep them in memory for one that is made of them now."""
        model, saved = self._model(owner, body.get("model_id")), self._saved(owner)
        name = body.get("path")
        place = Place(f"{body['model_id']}", SAMPLING, f"{name}")
        sampler = f"{model.session}:sample:{whole(body.get('sampling_session_seq_id', 0), 'sampling_session_seq_id')}"

        def save() -> JsonObject:
            if name is not None:
                saved.check(place, False)
                saved.save(place, {"params": model.adapters.params}, self._about(model, body) | {"optimizer": False})
                return {"type": "save_weights_for_sampler", "path": f"{place}"}
            self.samplers.keep(sampler, Sampler(owner, model.session, self.name, None, model.adapters.shape,
                                        model.adapters.params))
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}
        return self._in_order(owner, body, size, save)

    def _about(self, model: Model, body: JsonMapping) -> JsonObject:
        return {"rank": model.lora.rank, "alpha": model.lora.alpha, "targets": list(model.lora.targets),
                "experts": model.lora.experts,
                "steps": model.adapters.steps, "base": self.name, "trained": model.about,
                "user_metadata": dict(section(body, "user_metadata"))}

    # ------------------------------------------------------------------------------------------------------- samplers
    def create_sampling_session(self, owner: str, body: JsonObject) -> JsonObject:
        """Make a sampler of saved adapters, or of the base model."""
        self._session(owner, session := body.get("session_id"))
        number = whole(body.get("sampling_session_seq_id"), "sampling_session_seq_id")
        path, place = body.get("model_path"), None
        if path is not None:
            place = Place.of(path, "model_path")
            self._saved(owner).about(place)
        else:
            self._check_base(body.get("base_model"))
        id = f"{session}:sample:{number}"
        self.samplers.keep(id, Sampler(owner, f"{session}", self.name, place, is_base=place is None))
        return {"type": "create_sampling_session", "sampling_session_id": id}

    def sampler(self, owner: str, id: str) -> JsonObject:
        """Return what a sampler is."""
        found = self.samplers.of(owner, id)
        return {"sampler_id": id, "base_model": found.base_model,
                "model_path": None if found.place is None else f"{found.place}"}

    def sample(self, owner: str, body: JsonObject, size: int = 0) -> JsonObject:
        """Generate sequences behind a prompt."""
        id, number = body.get("sampling_session_id"), whole(body.get("seq_id"), "seq_id")
        self.samplers.of(owner, id)
        asked = request_of(body, self.engine, self.limits.batch)

        def run(items: Sequence[SampleRequest]) -> Sequence[bytes]:
            shape, params = self.samplers.weights(f"{id}", self.samplers.of(owner, id), self._saved(owner))
            return sampled(shape, params, items, self.limits.batch)

        call = f"{id}:{number}"
        self.queue.submit(call, owner, size, Work(run, asked, (id, asked.how), asked.count))
        return {"request_id": call, "sample_sequence_ids": [f"{call}:{n}" for n in range(asked.count)]}

    # --------------------------------------------------------------------------------------------------- saved states
    def checkpoints(self, owner: str, model: str = "") -> JsonObject:
        """List what is saved, of one model or of all."""
        return {"checkpoints": [listed for _, listed in all_listed(self._saved(owner), model)]}

    def delete_checkpoint(self, owner: str, model: str, kind: str, name: str) -> JsonObject:
        """Delete what is saved."""
        self._saved(owner).delete(Place.of(f"tinker://{model}/{kind}/{name}"))
        return {}

    def weights_info(self, owner: str, body: JsonObject) -> JsonObject:
        """Return what model saved adapters are of."""
        about = self._saved(owner).about(Place.of(body.get("tinker_path") or body.get("path")))
        return {"base_model": about["base"], "is_lora": True, "lora_rank": about["rank"], **about.get("trained", {})}

    def training_run(self, owner: str, id: str) -> JsonObject:
        """Return what a model is, whether it is in training or only saved."""
        listed, model = all_listed(saved := self._saved(owner), id), self.models.get(id)
        mine = model if model is not None and model.owner == owner else None
        if mine is None and not listed:
            raise Refused(404, f"there is no model {id!r}")
        newest = {kind: next((one for place, one in listed if place.kind == kind), None)
                  for kind in (TRAINING, SAMPLING)}
        return {"training_run_id": id, "base_model": self.name, "model_owner": owner, "is_lora": True,
                "lora_rank": mine.lora.rank if mine else saved.about(listed[0][0])["rank"],
                "last_request_time": stamp(mine.touched if mine else time.time()),
                "last_checkpoint": newest[TRAINING], "last_sampler_checkpoint": newest[SAMPLING]}

    def _saved(self, owner: str) -> SavedAdapters:
        return SavedAdapters(self.folder / owner)

    # -------------------------------------------------------------------------------------------------------- answers
    def retrieve(self, owner: str, body: JsonObject, seconds: float) -> JsonObject | bytes:
        """Wait for an answer, for so long at most; return it, or that it is still to come."""
        id = body.get("request_id")
        answer = self.queue.answer(id, owner) if isinstance(id, str) else None
        if answer is None:
            raise Refused(410, f"there is no call {id!r}, or no longer: the server was started anew")
        if not self.queue.wait(answer, seconds):
            return {"type": "try_again", "request_id": id, "queue_state": "active"}
        answer.fetched = True
        if answer.content is None:
            return {"error": answer.error, "category": answer.category}
        return answer.content

    def cancel(self, owner: str, body: JsonObject) -> JsonObject:
        """Leave out a call that has not begun."""
        id = body.get("request_id")
        if isinstance(id, str) and (answer := self.queue.answer(id, owner)) is not None and ":sample:" in id:
            answer.cancelled = answer.fetched = True
        return {}

    def _queued(self, owner: str, id: str, size: int, do: Callable[[], JsonObject | bytes]) -> JsonObject:
        """Put a call into the queue."""
        self.queue.submit(id, owner, size, Work(lambda items: [do()]))
        return {"request_id": id}

    def _in_order(self, owner: str, body: JsonMapping, size: int,
                  do: Callable[[], JsonObject | bytes]) -> JsonObject:
        """Put a call of a model into the queue, behind those whose numbers are before its own."""
        model, number = call_of(body)
        self.queue.submit(f"{model}:{number}", owner, size, Work(lambda items: [do()]), model, number)
        return {"request_id": f"{model}:{number}", "model_id": model}

    # -------------------------------------------------------------------------------------------------------- innards
    def _new_model(self, owner: str, body: JsonMapping) -> tuple[str, str]:
        self._session(owner, session := body.get("session_id"))
        return f"{session}:train:{whole(body.get('model_seq_id'), 'model_seq_id')}", f"{session}"

    def _add(self, id: str, owner: str, session: str, c: LoraConfig, about: JsonObject,
             make: Callable[[], Adapters]) -> None:
        """Make a model, in place of one whose client has gone if there is no room."""
        with self._lock:
            if len(self.models) >= self.limits.models:
                now = time.monotonic()
                gone = [name for name, one in self.models.items()
                        if one.session not in self.sessions or now - self.sessions[one.session].seen > SILENT_S]
                if not gone:
                    raise UserError("models", f"{len(self.models)} are in training (--models={self.limits.models})",
                                    "close a client, or wait until one has been silent for "
                                    f"{SILENT_S / 60:.0f} minutes")
                self._unload(min(gone, key=lambda name: self.models[name].touched))
        adapters = make()
        with self._lock:
            self.models[id] = Model(owner, session, c, about, adapters)

    def _model(self, owner: str, id: object) -> Model:
        found = self.models.get(id) if isinstance(id, str) else None
        if found is None or found.owner != owner:
            raise Refused(404, f"there is no model {id!r} in training: its session has ended, or the server was "
                          "started anew; make a training client of the last saved state")
        found.touched = time.time()
        return found

    def _unload(self, id: str) -> None:
        self.models.pop(id, None)
        self.queue.forget(id)

    def _check_base(self, name: object) -> None:
        if name not in (self.name, f"{self.engine.folder}"):
            raise UserError("base_model", f"{name!r} is not served here", f"ask for {self.name!r}")
