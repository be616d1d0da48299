"""The loss of a config's model and its gradient: whole, or cut into the stages of a pipeline."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxtrain.base.annotations import PyTree
from jaxtrain.config.schema import Config
from jaxtrain.data.loading.batch_spec import SEQ, Array
from jaxtrain.objectives import Objective
from jaxtrain.train_step import partition
from jaxtrain.train_step.gradients import LossSums, StateGradient, make_gradient
from jaxtrain.train_step.state import Batch, Layout, Metrics, Params, Skeleton, TrainState

if TYPE_CHECKING:  # few runs have a pipeline
    from jaxtrain.parallel.pipeline.pipeline import Pipeline
    from jaxtrain.parallel.schedules import Schedule

Schedules = tuple["Schedule", "Schedule"]  # for training, and for evaluation
Shape = tuple[int, int]  # rows, and tokens of each


@dataclass(frozen=True, eq=False)
class ModelLoss:
    """The computation of a step with a config's model and an objective (`sharded_step.Computation`)."""

    config: Config
    model: Skeleton
    objective: Objective
    precision: str
    abstract: TrainState  # of parameters
    layout: Layout
    schedules: Schedules | None  # of the pipeline, for the shape that the config declares; None without a pipeline
    check_shape: Callable[[Config], Schedules | None]  # refuses a config whose batches cannot be trained on
    _others: dict[Shape, Schedules | None] = field(default_factory=dict)

    def of_shape(self, shape: Shape) -> Schedules | None:
        """Return the schedules for batches of this many rows and tokens a row; refuse a shape that does not fit."""
        (rows, seq_len), data = shape, self.config.data
        if (rows, seq_len) == (data.global_batch_size, data.seq_len):
            return self.schedules
        if shape not in self._others:
            kept = data.packing in ("pairs", "answers") or not self.config.model.text
            data = replace(data, global_batch_size=rows, seq_len=seq_len, stages=[], buckets=[],
                           packing=data.packing if kept else "concat")
            self._others[shape] = self.check_shape(replace(self.config, data=data))
        return self._others[shape]

    # ------------------------------------------------------------------------------------ what a step is made of
    @cached_property
    def dtypes(self) -> PyTree:
        """The dtype in which each parameter computes if it is not that of the step, else ""."""
        return self._metadata("compute_dtype", self.abstract.all_params)

    @cached_property
    def updates(self) -> PyTree:
        """The name of the update rule of each trained parameter that has one of its own, else ""."""
        return self._metadata("update", self.abstract.params)

    def gradient(self, layout: Layout) -> StateGradient:
        """Return the gradient of a state's trained parameters."""
        def of(schedules: Schedules | None) -> StateGradient:
            return make_gradient(self.objective.loss, layout, accumulation=self.config.train.accumulation,
                                 precision=self.precision, dtypes=self.dtypes,
                                 differentiate=schedules and self.pipeline(self.objective, schedules).gradient)

        if not self.schedules:
            return of(None)
        return lambda state, batch: of(self.of_shape(self._shape(batch)))(state, batch)

    def evaluation(self, params: Params, batch: Batch) -> LossSums:
        """Return the summed loss, its weight, and further sums if the objective reports any."""
        goal, schedules = self.objective.evaluation, self.schedules and self.of_shape(self._shape(batch))
        found = (self.pipeline(goal, schedules) if schedules else goal).loss(params, batch)
        return found if self.objective.evaluation_metrics else found[:2]

    def metrics(self, sums: Metrics) -> Metrics:
        """Return the objective's metrics."""
        return self.objective.metrics(sums)

    def pipeline(self, objective: Objective, schedules: Schedules) -> "Pipeline":
        """Return the loss of an objective cut into stages."""
        from jaxtrain.models.rematerialization import of_several_layers
        from jaxtrain.parallel.pipeline.pipeline import Pipeline

        assert objective.pipeline_parts
        at_rest = jax.tree.map(lambda s: s.spec, self.layout.gradients)
        keeps = None if self.config.pipeline.recompute else of_several_layers(
            self.config.train.remat, self.config.model.stacked_layers)
        return Pipeline(objective.pipeline_parts, *schedules, self.layout.rules, self.layout.axes,
                        self.layout.frozen_axes, at_rest, keeps)

    def _shape(self, batch: Batch) -> Shape:
        arrays = {name: Array.of(declared) for name, declared in self.objective.batch_spec.items()}
        rows, seq_len = np.shape(batch[next(name for name, array in arrays.items() if array.dims == (SEQ,))])
        return rows, seq_len

    def _metadata(self, key: str, params: Params) -> PyTree:
        """Return one entry of the metadata of these parameters, which are the model's or the objective's."""
        known = self.model.metadata(key, "") | self.objective.frozen_metadata(key)
        return partition.like(known, params)
