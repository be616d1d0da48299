"""A model and a loss function of the user's, in place of the config's: `build(config, model=..., loss_fn=...)`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.base.annotations import JsonMapping, JsonObject, PyTree
from jaxtrain.config.schema import Config, DataConfig
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.loading.batch_spec import BatchSpec, Declared, first_steps, row_of
from jaxtrain.errors import UserError
from jaxtrain.objectives.objective import OfTheModelAlone
from jaxtrain.observe.own_parts import describe
from jaxtrain.run.shapes import AbstractBatch
from jaxtrain.sharding.mesh import AXES
from jaxtrain.train_step.sharded_step import ShardedStep
from jaxtrain.train_step.standalone import TrainStep
from jaxtrain.train_step.state import Metrics, Params, TrainState

# The keys that count for a run with a model of its user's. Of the sections that are not here none does.
_COUNT = {
    "mesh": {*AXES, "rules", "overrides"},
    "optimizer": {"clip_norm", "zero_stage"},
    "data": {"prefetch", "workers"},
    "train": {"steps", "epochs", "accumulation", "precision", "ema_decay", "log_every", "progress"},
    "checkpoint": {"every", "keep", "keep_every", "best", "verify", "mtbf_hours", "mirror",
                   "local_checkpoint_every", "local_dir"},
    "resilience": None, "observe": None, "diloco": None,  # all of them
}
# Those that count as well where the batches are made of the config's text.
_OF_TEXT = {
    "data": {field.name for field in fields(DataConfig)} - {"cross_document_attention", "augment", "crop"},
    "train": {"eval_every", "eval_batches", "patience"},
}


@dataclass(frozen=True)
class Given:
    """All that a user gives to `build` about a model of theirs; `make_train_step` explains `axes` and `gather`."""

    model: Any = None  # a module, a pytree of parameters, or a function that returns either
    loss_fn: Callable[..., Any] | None = None
    axes: Any = None
    gather: bool = True
    with_key: bool = False  # the loss takes a key for dropout and the like


@dataclass(frozen=True)
class OwnModel:
    """The model of a run's user: a train step, and the parameters that it begins with."""

    train_step: TrainStep
    initial: Any  # what its `init` takes

    @property
    def name(self) -> str:
        """The class of the module or pytree that is trained."""
        return self.train_step.name

    @property
    def takes_key(self) -> bool:
        """Whether its loss takes a key, which follows from train.seed."""
        return self.train_step.settings.seed is not None

    def shapes(self, batches: Callable[[], BatchSource]) -> "AnyShapes":
        """Return the shapes that batches may have."""
        return AnyShapes(self.train_step.sharded, batches)

    def counted(self, sections: Mapping[str, JsonMapping], of_text: bool) -> dict[str, JsonObject]:
        """Return the keys of a config that count. `of_text`: the batches are made of the config's text."""
        return {section: {key: value for key, value in keys.items() if _counts(section, key, self.takes_key, of_text)}
                for section, keys in sections.items() if section in _COUNT}

    def init(self) -> TrainState:
        """Return the state at step 0."""
        return self.train_step.init(self.initial)

    def restore(self, params: Params) -> Any:
        """Return the module or pytree with these parameters."""
        return self.train_step.computation.restore(params)


class OwnObjective(OfTheModelAlone):
    """The objective of a run whose loss is a function of its user's."""

    pipeline_parts = None

    def __init__(self, train_step: TrainStep):
        self._step = train_step

    @property
    def batch_spec(self) -> Declared:
        """Empty: batches have whatever arrays the first one has."""
        return {}

    @property
    def evaluation_metrics(self) -> Sequence[str]:
        """Empty: which metrics the function returns is not known before it is called."""
        return ()

    @property
    def evaluation(self) -> "OwnObjective":
        """The loss itself."""
        return self

    def loss(self, params: Params, batch: PyTree) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """Return the summed loss, the weight to divide it by, and further sums."""
        return self._step.computation.weighted_loss(params, batch)

    def metrics(self, sums: dict[str, Any]) -> Metrics:
        """Return the further sums, divided by the weight."""
        return self._step.computation.metrics(sums)

    def identity(self, recorded: JsonMapping) -> JsonObject:
        """Return the description of the function."""
        return describe(self._step.own.function)


@dataclass(frozen=True)
class AnyShapes:
    """The arrays that the first batch has, in any shape that divides: for a loss that declares none."""

    sharded: ShardedStep
    batches: Callable[[], BatchSource]

    @cached_property
    def spec(self) -> BatchSpec:
        """The arrays of the first batch."""
        return BatchSpec.like(row_of(self.batches(), 0), "this run")

    def abstract(self, batches: BatchSource | None = None) -> AbstractBatch:
        """Return shapes, dtypes and shardings of the first batch."""
        return self._of_step(batches or self.batches(), 0)

    def allow(self, shape: tuple[int, ...]) -> None:
        """Refuse a number of rows that does not divide over devices and micro-batches."""
        self.sharded.check_rows(shape[0], self.sharded.settings.accumulation)

    def check_steps(self, batches: BatchSource, start: int, stop: int) -> None:
        """Refuse numbers of rows that do not divide."""
        for shape in batches.shapes_of(start, stop):
            self.allow(shape)

    def of_steps(self, batches: BatchSource, start: int, stop: int) -> list[AbstractBatch]:
        """Return a batch of each shape that the batches of these steps have."""
        return [self._of_step(batches, step) for step in first_steps(batches, start, stop)]

    def _of_step(self, batches: BatchSource, step: int) -> dict[str, Any]:
        rows = batches.shape(step)[0]
        return self.sharded.abstract_batch({
            key: jax.ShapeDtypeStruct((rows, *np.shape(x)[1:]), jnp.result_type(x))
            for key, x in row_of(batches, step).items()})


def refuse_vain_keys(config: Config, *, with_key: bool, of_text: bool, rows: int) -> None:
    """Refuse keys that were set and that nothing would read with a model of the user's.

    Args:
        with_key: the loss takes a key.
        of_text: the batches are made of the config's text.
        rows: of a batch.
    """
    if "eval_" in config.checkpoint.best and not of_text:
        raise UserError("checkpoint.best", "batches given by data= have no evaluation split", "name another metric")
    default = Config().to_dict()
    for section, keys in config.to_dict().items():
        for key, value in keys.items():
            if _counts(section, key, with_key, of_text) or value == default[section].get(key, None):
                continue
            if (section, key) == ("data", "global_batch_size"):  # train.accumulation has to divide it
                if value == rows:
                    continue
                raise UserError("data.global_batch_size", f"it is {value}, and the batches given by data= have {rows} "
                                "rows", f"leave it out, or set it to {rows}")
            why = "loss_fn takes no key" if (section, key) == ("train", "seed") else "the model is one of your own"
            raise UserError(f"{section}.{key}", f"nothing reads it in this run, since {why}", "leave it out")


def _counts(section: str, key: str, with_key: bool, of_text: bool) -> bool:
    keys = _COUNT.get(section, frozenset())
    return (keys is None or key in keys or (of_text and key in _OF_TEXT.get(section, ()))
            or (section, key, with_key) == ("train", "seed", True))
