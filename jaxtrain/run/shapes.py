"""The shapes that the batches of a run may have, and those that its config declares."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import jax

from jaxtrain.config import data_stages
from jaxtrain.config.schema import Config
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.loading.batch_spec import BatchSpec
from jaxtrain.errors import UserError
from jaxtrain.run.model_loss import ModelLoss
from jaxtrain.train_step.state import Layout

AbstractBatch = dict[str, jax.ShapeDtypeStruct]


class Shapes(Protocol):
    """The arrays that a run's batches have, and the shapes of them."""

    @property
    def spec(self) -> BatchSpec:
        """The arrays that every batch has."""
        ...

    def abstract(self, batches: BatchSource | None = None) -> AbstractBatch:
        """Return shapes and dtypes of a batch, of these batches or of training."""
        ...

    def allow(self, shape: tuple[int, ...]) -> None:
        """Refuse a shape that a step of this run cannot have."""
        ...

    def check_steps(self, batches: BatchSource, start: int, stop: int) -> None:
        """Refuse shapes that the batches of these steps have, and that a step cannot have."""
        ...

    def of_steps(self, batches: BatchSource, start: int, stop: int) -> list[AbstractBatch]:
        """Return a batch of each shape that the batches of these steps have."""
        ...


@dataclass(frozen=True)
class DeclaredShapes:
    """The shapes that a config declares: those of its section data, of its stages, and of buckets."""

    config: Config
    layout: Layout
    computation: ModelLoss
    batches: Callable[[], BatchSource]

    @cached_property
    def spec(self) -> BatchSpec:
        """The arrays that the objective declares."""
        goal = self.computation.objective
        below = dict.fromkeys(("tokens", "targets"), self.config.model.vocabulary)
        return BatchSpec(goal.batch_spec, type(goal).__name__, below=below)

    def abstract(self, batches: BatchSource | None = None) -> AbstractBatch:
        """Return shapes, dtypes and shardings of a batch of the section data."""
        return self._of_shape((self.config.data.global_batch_size, self.config.data.seq_len))

    def allow(self, shape: tuple[int, ...]) -> None:
        """Refuse a shape that is not declared, or that does not fit."""
        rows, seq_len = shape
        data = self.config.data
        if (rows, seq_len) != (data.global_batch_size, data.seq_len) and not self._declared((rows, seq_len)):
            raise UserError("batch", f"its shape is {rows} x {seq_len}, and the config declares "
                            f"{data.global_batch_size} x {data.seq_len}",
                            "give batches of that shape, or declare the other in data.stages")
        self.computation.of_shape((rows, seq_len))

    def check_steps(self, batches: BatchSource, start: int, stop: int) -> None:
        """Refuse lengths of rows that these steps will have and that do not fit."""
        for rows, length in batches.shapes_of(start, stop):
            try:
                self.allow((rows, length))
            except UserError as error:
                if self.config.data.packing != "bucket":
                    raise
                raise UserError("data.buckets", f"with rows of {length} tokens {error.key} is refused: {error.reason}",
                                "give data.buckets other lengths") from error

    def of_steps(self, batches: BatchSource, start: int, stop: int) -> list[AbstractBatch]:
        """Return a batch of each shape that the batches of these steps have."""
        return [self._of_shape(shape) for shape in batches.shapes_of(start, stop)]

    def declared(self) -> list[AbstractBatch]:
        """Return a batch of each shape that the config declares; data are read for those of buckets alone."""
        if self.config.data.packing == "bucket":
            return self.of_steps(self.batches(), 0, max(1, self.config.train.steps))
        stages = data_stages.stages(self.config.data)
        return [self._of_shape(shape) for shape in dict.fromkeys((stage.batch, stage.seq_len) for stage in stages)]

    def _of_shape(self, shape: tuple[int, int]) -> AbstractBatch:
        return self.spec.abstract(*shape, self.layout.batch)

    def _declared(self, shape: tuple[int, int]) -> bool:
        """Whether the config says that batches of this shape come."""
        stages = {(stage.batch, stage.seq_len) for stage in data_stages.stages(self.config.data)}
        return shape in stages or (self.config.data.packing == "bucket" and shape in self.batches().shapes_of(
            0, max(1, self.config.train.steps)))
