"""`rl.sampler_devices`: the last devices of this process answer, on a thread, while the others train.

They hold the weights of the versions whose answers are outstanding, in memory alone. So that a run that was killed goes
on with the same answers, a save waits for those that are under way.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax

from jaxtrain import builder
from jaxtrain.checkpoint import fingerprint
from jaxtrain.checkpoint.trees import flatten
from jaxtrain.config.schema import Config, DataConfig, MeshConfig, TrainConfig
from jaxtrain.errors import UserError
from jaxtrain.hub import trained_model
from jaxtrain.hub.generate import Generated, generate
from jaxtrain.run import abstract_model
from jaxtrain.sharding.mesh import make_mesh
from jaxtrain.train_step import partition
from jaxtrain.tuning.samplers.asked_in_turn import AnyWeights, AskedInTurn, Job, Record, Stopped
from jaxtrain.tuning.samplers.awaited import Awaited
from jaxtrain.tuning.samplers.completions import Answering

if TYPE_CHECKING:
    from concurrent.futures import Future

    from jaxtrain.data.tokenizers.tokenizer import Tokenizer
    from jaxtrain.run import Run
    from jaxtrain.train_step.state import Params, TrainState

KEY = "rl.sampler_devices"


@dataclass(frozen=True)
class Copied:
    """The weights after a step, on the devices that sample. `version`: the step, and a hash of what is trained."""

    step: int
    version: str
    state: "TrainState"


class DeviceSampler(AskedInTurn["Copied"]):
    """The devices of this process that answer, and the weights that they have."""

    patience_s = None  # Python must not end while programs run on devices

    def __init__(self, run: "Run", tokenizer: "Tokenizer", ends: Sequence[int]):
        """Take the run that is sampled for. `ends`: tokens that end answers, beside the end of a document."""
        if jax.process_count() > 1:
            raise UserError(KEY, "the devices that train and those that sample have to be of one process",
                            "leave it out, and start jaxtrain serve_sampler elsewhere, for rl.sampler")
        super().__init__()
        self.trained, self.run = run, _run_on(jax.devices()[-run.config.rl.sampler_devices:], run.config)
        self._cast = jax.jit(run.sharded.cast)
        self._sample = partial(
            generate, max_new_tokens=run.config.rl.max_new_tokens, temperature=run.config.rl.temperature, tempered=True,
            stop=tuple(dict.fromkeys([*ends, tokenizer.eod])), logprobs=True, tokenizer=tokenizer)
        self._known: dict[int, Copied] = {}
        self._frozen: Params | None = None  # what is not trained, which is copied once
        self._outstanding: list[Future[list[Generated]]] = []

    def written(self, step: int, state: "TrainState") -> Copied:
        """Return the weights after this step, copied to the devices that sample: what has changed since the last."""
        if step not in self._known:
            jax.block_until_ready(state)
            began, moved = time.perf_counter(), 0
            if self._frozen is None:
                frozen = partition.without(state.frozen, self.trained.objective.frozen_axes)
                self._frozen, moved = self._copied(frozen)
            params, more = self._copied(state.params)
            sums = fingerprint.total([fingerprint.read(fingerprint.on_device(flatten(params)))])
            digest = hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
            self._known[step] = Copied(step, f"step-{step}-{digest[:12]}", trained_model.with_params(
                self.run, partition.merge(params, self._frozen)))
            self._add("sync_s", time.perf_counter() - began)
            self._add("sync_bytes", moved + more)
        return self._known[step]

    def _copied(self, params: "Params") -> "tuple[Params, int]":
        """Return parameters, as they compute, on the devices that sample, and their bytes there."""
        where = jax.tree.map(lambda leaf: leaf.sharding, partition.like(abstract_model(self.run), params))
        found = jax.block_until_ready(jax.device_put(self._cast(params), where))
        return found, sum(leaf.nbytes for leaf in jax.tree.leaves(found))

    def kept(self, step: int) -> Copied | None:
        """Return the weights after this step if they are still there."""
        return self._known.get(step)

    def ask(self, many: int, asking: Callable[[Answering], list[Generated]], weights: AnyWeights,
            record: Record) -> Awaited:
        """Have answers made by these weights; weights before them are dropped when the answers are on record."""
        def recorded(answers: list[Generated]) -> None:
            record(answers)
            for step in list(self._known):  # another thread adds to it
                if step < weights.step:
                    self._known.pop(step, None)

        found = super().ask(many, asking, self._known[weights.step], recorded)
        self._outstanding = [one for one in (*self._outstanding, found.future) if one is not None and not one.done()]
        return found

    def before_save(self) -> None:
        """Wait until all answers are on record: after a kill, nothing can make them again."""
        wait(self._outstanding)

    def forget(self) -> None:
        """Forget what was asked for, and all weights: the steps begin elsewhere."""
        super().forget()
        self._known, self._frozen, self._outstanding = {}, None, []

    def _made(self, job: Job[Copied], stop: threading.Event) -> list[Generated]:
        """Return all answers of a job."""
        tokens, seconds = 0, 0.0

        def answering(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Generated]:
            nonlocal tokens, seconds
            if stop.is_set():
                raise Stopped
            began = time.perf_counter()
            found = self._sample(self.run, job.weights.state, prompts, batch_size=job.many,
                                 drawn=[(seed % 2**32, 0) for seed in seeds])
            seconds += time.perf_counter() - began
            tokens += sum(len(one.tokens) + (one.end is not None) for one in found)
            return found

        answers = job.asking(answering)
        self._took(seconds, tokens)
        return answers


def _run_on(devices: Sequence[jax.Device], config: Config) -> "Run":
    """Return a run of the same model on these devices: split over `tensor` as where it trains, if that divides."""
    many, tensor = len(devices), config.mesh.tensor
    tensor = tensor if tensor > 0 and many % tensor == 0 else 1
    mesh = make_mesh(data=many // tensor, tensor=tensor, devices=devices)
    return builder.build(Config(
        model=config.model, lora=config.lora, train=TrainConfig(precision=config.train.precision),
        mesh=MeshConfig(data=many // tensor, tensor=tensor, rules=config.mesh.rules, overrides=config.mesh.overrides),
        data=DataConfig(seq_len=config.data.seq_len, global_batch_size=many)), mesh=mesh)
