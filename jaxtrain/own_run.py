"""A run of a model and loss function of one's own: `build(config, model=..., loss_fn=..., optimizer=..., data=...)`.

The config says how it is trained: mesh, train, checkpoint and resilience; and, without `data=`, on what text: the
section data. What describes a model or an optimizer of ours does not count, and is refused where it was set.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.config.schema import Config, DataConfig
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.loading.batch_spec import BatchSpec, first_steps, row_of
from jaxtrain.data.loading.configured import configured_corpus
from jaxtrain.data.loading.grain_datasets.given_datasets import as_batch_source
from jaxtrain.errors import UserError
from jaxtrain.objectives.objective import OfTheModelAlone
from jaxtrain.observe.own_parts import describe, describe_data, describe_optimizer
from jaxtrain.run import Run, extras_of
from jaxtrain.sharding import rules as sharding
from jaxtrain.sharding.mesh import AXES, make_mesh
from jaxtrain.sharding.rules import AnyMesh
from jaxtrain.train_step import precision
from jaxtrain.train_step.sharded_step import ShardedStep
from jaxtrain.train_step.standalone import LossFunction, TrainStep, make_train_step, mean_metrics
from jaxtrain.train_step.state import TrainState

# The keys that count for such a run. Of the sections that are not here none does.
_COUNT = {
    "mesh": {*AXES, "rules", "overrides"},
    "optimizer": {"clip_norm", "zero_stage"},
    "data": {"prefetch", "workers"},
    "train": {"steps", "epochs", "accumulation", "precision", "ema_decay", "log_every", "progress"},
    "checkpoint": {"every", "keep", "keep_every", "best", "verify", "mtbf_hours", "mirror",
                   "local_checkpoint_every", "local_dir"},
    "resilience": None, "observe": None, "islands": None,  # all of them
}
# Those that count as well where the batches are made of the config's text.
_OF_TEXT = {
    "data": {field.name for field in fields(DataConfig)} - {"cross_document_attention", "augment", "crop"},
    "train": {"eval_every", "eval_batches", "patience"},
}


class OwnLoss(OfTheModelAlone):
    """The objective of a run whose loss is a function of its user's."""

    pipeline_parts = None

    def __init__(self, step: TrainStep):
        self._step = step

    @property
    def batch_spec(self) -> Mapping[str, Any]:
        """Empty: batches have whatever arrays the first one has."""
        return {}

    @property
    def evaluation_metrics(self) -> Sequence[str]:
        """No metric: nothing is known about the user's loss."""
        return ()

    @property
    def evaluation(self) -> "OwnLoss":
        """The loss itself."""
        return self

    def loss(self, params: Any, batch: Any) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """Return the summed loss, the weight to divide it by, and further sums."""
        return self._step.weighted_loss(params, batch)

    def metrics(self, sums: dict[str, Any]) -> dict[str, jax.Array]:
        """Return the further sums, divided by the weight."""
        return mean_metrics(sums)

    def identity(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Return the description of the function."""
        return describe(self._step.loss_fn)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class OwnRun(Run):
    """A run of one's own model: all that the loop wants of a run, from a `TrainStep` and its parameters at step 0."""

    own: TrainStep
    initial: Any  # what its `init` takes

    @cached_property
    def corpus(self) -> Any:  # pyrefly: ignore[bad-override]
        """The tokenised text of the config."""
        return configured_corpus(self.config)

    def _evaluation_fields(self, nats: float, more: list[Any]) -> dict[str, float]:
        """Return the metrics of the loss function on the batches for evaluation: what its loss counts is not known."""
        return {f"eval_{name}": float(value) for name, value in self.objective.metrics(*more).items()}

    def init(self, seed: int | None = None, *, parts: Mapping[str, Any] | None = None,
             meanwhile: Callable[[], object] | None = None) -> TrainState:
        """The state at step 0, around the parameters that the run was built with."""
        self.check_devices()
        if seed is not None:
            raise UserError("seed", "the initial values are those of the model that this run was built with",
                            "draw them with another key there")
        return self.own.init(self.initial)

    @property
    def sharded(self) -> ShardedStep:  # pyrefly: ignore[bad-override]
        """The part that compiles the step, places its batches and evaluates."""
        return self.own.sharded

    @cached_property
    def batch_spec(self) -> BatchSpec:  # pyrefly: ignore[bad-override]
        """The arrays that every batch has: those of the first one."""
        return BatchSpec.like(row_of(self.batch_source, 0), "this run")

    @property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of the first batch."""
        return self.sharded.abstract_batch(_abstract_batch(self.batch_source, 0))

    def compiled(self, batch: Any) -> jax.stages.Compiled:
        """The step for batches of this shape: (state, placed batch) -> (state, metrics)."""
        self.check_devices()
        self.batch_spec.check(batch)
        return self.sharded.compiled(batch)

    @cached_property
    def compiled_eval(self) -> jax.stages.Compiled:
        """(parameters, batch) -> (summed loss, weight, further sums), for batches of the evaluation split."""
        assert self.eval_batches is not None
        return self.sharded.compiled_evaluation(_abstract_batch(self.eval_batches, 0))

    def compile_ahead(self, batches: BatchSource, start: int, stop: int) -> None:
        """Compile the step for every shape that the batches of these steps have."""
        for step in first_steps(batches, start, stop):
            self.compiled(_abstract_batch(batches, step))

    def of_shape(self, shape: tuple[int, ...]) -> "OwnRun":
        """Return this run: its batches may have any shape that divides over the devices."""
        self.sharded.check_rows(shape[0], self.sharded.accumulation)
        return self

    def cast(self, params: Any) -> Any:
        """Parameters in the dtype in which they compute."""
        return precision.cast(params, self.precision)

    def module(self, state: TrainState, dtype: Any = None) -> Any:
        """The module (or pytree) with this state's parameters, whole on one device, in `dtype` if one is given."""
        return self.own.module(state, dtype)

    @property
    def own_model(self) -> bool:
        """True: the config does not describe the model."""
        return True

    @property
    def name(self) -> str:
        """The class of the module or pytree that is trained."""
        return self.own.name

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The part of the config that counts for this run."""
        of_text = self.data is None
        return {section: {key: value for key, value in keys.items() if _counts(section, key, self.own, of_text)}
                for section, keys in self.config.to_dict().items() if section in _COUNT}

    def own_parts(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """The description of model, loss function, optimizer and data, for run.json."""
        found = {"model": {"class": self.name}, "loss_fn": self.objective.identity({}),
                 "optimizer": describe_optimizer(self.optimizer, self.abstract.params)}
        return found if self.data is None else found | {"data": describe_data(self.data)}


def build_own(config: Config, *, model: Any, loss_fn: LossFunction | None, mesh: AnyMesh | None, devices: Any,
              platform: str, optimizer: optax.GradientTransformation | None, data: BatchSource | None, axes: Any,
              gather: bool, with_key: bool) -> OwnRun:
    """Check that nothing is missing and nothing set in vain, and lay the state out; nothing is allocated."""
    text = None if config.data == DataConfig() else config.data  # so that nobody trains on a default by mistake
    for name, part, fix in (
            ("model", model, "give an NNX module, a pytree of parameters, or a function that returns either"),
            ("loss_fn", loss_fn, "give a function of the model and a batch that returns the mean loss or jt.Weighted"),
            ("optimizer", optimizer, "pass an optax optimizer, such as optax.adamw(1e-3)"),
            ("data", text if data is None else data, "give a jt.BatchSource, such as jt.BatchFunction(function_of_the_"
             "step), or a Grain dataset, or name data.source in the config")):
        if part is None:
            raise UserError(name, "it is missing; with model= you must pass one too" if model is not None else
                            "it is missing", fix)
    assert loss_fn and optimizer
    data = data if data is None else as_batch_source(data)
    t, o, r = config.train, config.optimizer, config.resilience
    if t.precision == "fp8":
        raise UserError("train.precision", "fp8 is the precision of products in jaxtrain's own layers", "use bfloat16")
    mesh = mesh or make_mesh(*(getattr(config.mesh, axis) for axis in AXES),
                             devices=jax.devices() if devices is None else devices)
    rules = sharding.rules(config.mesh.rules, **config.mesh.overrides)
    step = make_train_step(
        loss_fn, optimizer, mesh=mesh, rules=rules, axes=axes, accumulation=t.accumulation, clip_norm=o.clip_norm,
        precision=t.precision, zero_stage=o.zero_stage, gather=gather, seed=t.seed if with_key else None,
    ).for_a_run(extras_of(config), spike_z=r.spike_z, skip_spikes=r.spikes != "record", ema_decay=t.ema_decay)
    first = data.shape(0) if data is not None else (config.data.global_batch_size, config.data.seq_len)
    _refuse_vain_keys(config, step, data is None, first[0])
    abstract = step.abstract(model)
    run = OwnRun(config, step.mesh, rules, step.skeleton, OwnLoss(step), optimizer, None, step.precision, abstract,
                 step.layout, None, platform, extras_of(config), data, own=step, initial=model)
    run.of_shape(first)
    return run


def _counts(section: str, key: str, step: TrainStep, of_text: bool) -> bool:
    """Return whether a key counts; `of_text`: the batches are made of the config's text."""
    keys = _COUNT.get(section, frozenset())
    return (keys is None or key in keys or (of_text and key in _OF_TEXT.get(section, ()))
            or (section, key, step.seed is not None) == ("train", "seed", True))


def _refuse_vain_keys(config: Config, step: TrainStep, of_text: bool, rows: int) -> None:
    """Refuse keys that were set and that nothing would read."""
    if "eval_" in config.checkpoint.best and not of_text:
        raise UserError("checkpoint.best", "batches given by data= have no evaluation split", "name another metric")
    default = Config().to_dict()
    for section, keys in config.to_dict().items():
        for key, value in keys.items():
            if _counts(section, key, step, of_text) or value == default[section].get(key, None):
                continue
            if (section, key) == ("data", "global_batch_size"):  # train.accumulation has to divide it
                if value == rows:
                    continue
                raise UserError("data.global_batch_size", f"it is {value}, and the batches given by data= have {rows} "
                                "rows", f"leave it out, or set it to {rows}")
            why = "loss_fn takes no key" if (section, key) == ("train", "seed") else "the model is one of your own"
            raise UserError(f"{section}.{key}", f"nothing reads it in this run, since {why}", "leave it out")


def _abstract_batch(batches: BatchSource, step: int) -> dict[str, jax.ShapeDtypeStruct]:
    rows = batches.shape(step)[0]
    return {key: jax.ShapeDtypeStruct((rows, *np.shape(x)[1:]), jnp.result_type(x))
            for key, x in row_of(batches, step).items()}
