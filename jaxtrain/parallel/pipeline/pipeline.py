"""The pipeline executor: runs any schedule's table, tick by tick, on all stages at once.

The executor is a `jax.shard_map` that is manual over every axis but `tensor`. So each device works on its own tokens
with its own stage's layers; tensor parallelism, and the manual regions of context and expert parallelism, work inside.
What a stage does at a tick is looked up in the table and done in a branch: collectives inside join devices of one stage
only. Between stages there is one permutation to the right and one to the left per tick, outside all branches.

A stage keeps the inputs of its chunks and recomputes the rest in B: one more forward pass than without a pipeline. With
`keeps` it keeps, of each micro-batch between its F and its B, what a backward pass needs (`residuals.py`).
Weight gradients are accumulated where they are made, and summed over devices once, after the last tick.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.base import further_sums
from jaxtrain.base.annotations import PyTree
from jaxtrain.config.schema import PipelineConfig
from jaxtrain.parallel import schedules
from jaxtrain.parallel.pipeline.parts import Parts, Sums, lower
from jaxtrain.parallel.pipeline.stage import Stage, Wrap
from jaxtrain.parallel.schedules import Schedule
from jaxtrain.sharding import activations, axis_rules
from jaxtrain.sharding.axis_rules import SpecEntry
from jaxtrain.train_step import partition
from jaxtrain.train_step.state import Batch, Params

MANUAL = ("data", "fsdp", "context", "expert", "stage")
F32 = jnp.float32
_PULL = "pull"  # the array of a batch that has the gradient of each row's outputs


def count_microbatches(c: PipelineConfig, stages: int, rows: int) -> int:
    """Return the number of micro-batches: as configured, the table's, or a divisor of a device's rows."""
    if c.table and not c.microbatches:
        return schedules.from_file(c.table, stages, 0, c.chunks, latency=2 if c.overlap else 1).microbatches
    # Four per stage leave a bubble of about a fifth; more would make the matrix products small.
    chosen = max(n for n in range(1, max(1, min(rows, 4 * stages)) + 1) if rows % n == 0)
    return c.microbatches or chosen


def make_schedules(c: PipelineConfig, stages: int, microbatches: int) -> tuple[Schedule, Schedule]:
    """Return the schedules of training and of evaluation that a config asks for."""
    latency = 2 if c.overlap else 1
    if c.table:
        train = schedules.from_file(c.table, stages, microbatches, c.chunks, latency=latency)
    else:  # in lockstep a tick lasts as long as its longest operation: pair F with B, or split B and W
        pairs = not c.schedule.startswith("zb")
        train = schedules.make(c.schedule, stages, microbatches, c.chunks, paired=pairs, latency=latency)
    return train, schedules.forward_only(stages, microbatches, train.chunks, latency=latency, position=train.position)


@dataclass(frozen=True)
class Pipeline:
    """The loss, and its gradients, of a model whose layers are split over pipeline stages."""

    parts: Parts
    schedule: Schedule
    evaluation: Schedule  # forward only
    rules: axis_rules.Rules
    axes: Any  # logical names of the trained parameters
    frozen_axes: Any  # logical names of the frozen parameters
    at_rest: Any  # partition specs of the gradients
    keeps: Wrap | None = None  # what makes a chunk's function keep results for its B; None: B computes them again

    def gradient(self, params: Params, frozen: Params, batch: Batch,
                 scale: jax.Array | float) -> tuple[tuple[jax.Array, jax.Array, Sums], Params]:
        """Return the loss terms and the float32 gradient of `params`.

        The loss terms are the summed loss with penalties, its weight, and further sums. The gradient is that of `scale`
        times the mean loss; `frozen` parameters have none.
        """
        given, batch = self.parts.prepare(partition.merge(params, frozen), batch)
        weight, parts, rows = self.parts.weight(batch), self.parts, batch
        seed, all_of_it = scale / jnp.maximum(weight, 1e-8), None
        if parts.together:
            outputs, *_ = self._run(parts, self.evaluation, {}, given, batch, seed)
            loss, pull, sums = jax.vjp(lambda outputs: parts.together(outputs, batch), outputs, has_aux=True)
            all_of_it, parts = (loss, sums), parts.towards(_PULL)
            # Each of the devices that share a row has its outputs, and so this part of their gradient.
            seed /= axis_rules.shards(self.rules["seq"], jax.sharding.get_abstract_mesh())
            rows = batch | {_PULL: pull(jnp.ones_like(loss))[0]}
        ends, sums, layers, outer = self._run(parts, self.schedule, partition.like(given, params),
                                              partition.without(given, params), rows, seed)
        (loss, further), placement = all_of_it or ends, parts.placement(self.schedule.position)
        at_rest = parts.lift(self.at_rest)
        grads = {key: jax.tree.map(partial(placement.from_stages, key), layers[key], at_rest[key]) for key in layers}
        return (loss, weight, parts.all_sums(batch, sums, further)), lower(grads | outer)

    def loss(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array, Sums]:
        """Return the summed loss with penalties, its weight, and further sums; `params` holds trained and frozen ones.
        """
        params, batch = self.parts.prepare(params, batch)
        ends, sums, *_ = self._run(self.parts, self.evaluation, {}, params, batch, jnp.zeros((), F32))
        loss, further = self.parts.together(ends, batch) if self.parts.together else ends
        return loss, self.parts.weight(batch), self.parts.all_sums(batch, sums, further)

    def _run(self, parts: Parts, schedule: Schedule, params: Params, frozen: Params, batch: Batch,
             seed: jax.Array) -> tuple[PyTree, ...]:
        """Return what the end does, what layers summed up, and the gradients of layers by stage and of all others."""
        placement, all_axes = parts.placement(schedule.position), parts.lift(partition.merge(
            self.axes, self.frozen_axes))

        def in_use(params):
            """Return layers by stage, all other parameters, and the gradient layouts of both."""
            plan = {key: jax.tree.map(partial(_Plan.of, self.rules, key in parts.stacks),
                                      partition.like(all_axes[key], params[key]), params[key],
                                      is_leaf=lambda x: isinstance(x, tuple)) for key in params}
            layers = {key: jax.tree.map(lambda w, plan, key=key: placement.to_stages(key, w, plan.in_use),
                                        params[key], plan[key]) for key in parts.stacks if key in params}
            outer = {key: jax.tree.map(lambda w, plan: jax.reshard(w, plan.in_use), params[key], plan[key])
                     for key in params if key not in layers}
            return (layers, outer), tuple({key: plan[key] for key in part} for part in (layers, outer))

        trained, plans = in_use(parts.lift(params))
        frozen, frozen_plans = in_use(parts.lift(frozen))
        layer_plan, outer_plan = plans
        batch = jax.tree.map(partial(activations.micro_batches, parts=schedule.microbatches), batch)
        different = _token_axes(self.rules)

        def on_device(trained, frozen, batch, seed):
            stage = lax.axis_index("stage")
            (layers, outer), (frozen_layers, frozen_outer) = trained, frozen
            mine, frozen_mine = (jax.tree.map(lambda w: w[0], tree) for tree in (layers, frozen_layers))
            work = Stage(parts, schedule, stage, placement.slots(stage), mine, outer, (frozen_mine, frozen_outer),
                         batch, seed, self._products(), self.keeps)
            done = work.run()
            if parts.together:
                ends = jax.tree.map(partial(_island, lambda x: _sum(x, ("stage",))), done["end"])
            else:
                loss, further = done["end"]
                ends = jax.tree.map(partial(_island, lambda x: _sum(x, (*different, "stage"))),
                                    (loss + done["penalty"], further))
            sums = further_sums.by_kind(*(partial(_island, lambda x, over=over: over(x, different)[None], new=1)
                                          for over in (_sum, _largest)), done["sums"])
            if "B" not in schedule.kinds:
                return ends, sums, {}, {}
            return (ends, sums, jax.tree.map(_reduced, work.layer_gradients(done), layer_plan),
                    jax.tree.map(_reduced, done["outer_grads"], outer_plan))

        outs = [jax.tree.map(lambda plan: plan.manual_at_rest, part) for part in (layer_plan, outer_plan)]
        by_array = jax.tree.map(lambda x: P(*map(_manual, jax.typeof(x).sharding.spec)), batch)
        ends, sums, layers, outer = jax.shard_map(
            on_device, axis_names=set(MANUAL), check_vma=False,
            in_specs=(*(jax.tree.map(lambda plan: plan.manual_in_use, part) for part in (plans, frozen_plans)),
                      by_array, P()),
            out_specs=(P(None, _manual(activations.split_by("batch"))) if parts.together else P(), P("stage"),
                       *(outs if "B" in schedule.kinds else ({}, {}))))(trained, frozen, batch, seed)
        last = list(parts.stacks)[-1]
        sums = jax.tree_util.tree_map_with_path(lambda path, x: placement.from_stages(
            path[1].key if further_sums.is_largest(path) else last, x, P(*(None,) * (x.ndim - 2))), sums)
        return jax.tree.map(_joined, ends) if parts.together else ends, sums, layers, outer

    def _products(self) -> frozenset:
        """Return the paths of plain products' weights (`layers.Linear`), whose gradients a schedule may defer."""
        axes = self.parts.lift(self.axes)
        stacked = {key: axes[key] for key in self.parts.stacks if key in axes}
        flat = jax.tree_util.tree_flatten_with_path(stacked, is_leaf=lambda x: isinstance(x, tuple))[0]
        flat = [(tuple(key.key for key in path), names) for path, names in flat]
        return frozenset(path for path, names in flat if path[-1] == "kernel" and not {"router", None} & {*names})


@dataclass(frozen=True)
class _Plan:
    """The layout of one parameter in use, and how its gradient is reduced over devices into the layout at rest."""

    stacked: bool
    in_use: P  # without the layers dimension
    scatter: tuple[tuple[str, ...], ...]  # for each dimension: the axes that the gradient is summed and split over
    sum: tuple[str, ...]  # the axes that the gradient is only summed over

    @classmethod
    def of(cls, rules: axis_rules.Rules, stacked: bool, names: axis_rules.Names, weight: jax.Array) -> "_Plan":
        mesh, names, shape = jax.sharding.get_abstract_mesh(), names[stacked:], weight.shape[stacked:]
        in_use = axis_rules.without_trivial_axes(rules.spec(names, gathered=True), mesh)
        at_rest = axis_rules.at_rest(names, shape, rules, mesh)
        kept = [axis_rules.axes_of(entry) for entry in in_use]
        # A dimension that tensor splits in use is not scattered here: the pieces would be in another order.
        scatter = tuple(() if "tensor" in mine else tuple(
            axis for axis in axis_rules.axes_of(entry) if axis not in mine)
                        for mine, entry in zip(kept, at_rest, strict=True))
        done = {axis for axes in (*kept, *scatter) for axis in axes}
        different = _token_axes(rules) if stacked else (*_token_axes(rules), "stage")
        rest = tuple(axis for axis in different if mesh.shape[axis] > 1 and axis not in done)
        return cls(stacked, in_use, scatter, rest)

    @property
    def manual_in_use(self) -> P:
        """The manual axes of the weight."""
        return P(*self._front, *map(_manual, self.in_use))

    @property
    def manual_at_rest(self) -> P:
        """The manual axes of the gradient."""
        return P(*self._front, *((_manual(entry, new)) for entry, new in zip(self.in_use, self.scatter, strict=True)))

    @property
    def _front(self) -> tuple:
        return ("stage", None, None) if self.stacked else ()  # stages, chunks, slots

    def reduce(self, grad: jax.Array) -> jax.Array:
        """Reduce one device's gradient to its part of the sum."""
        for dim, axes in enumerate(self.scatter, start=2 * self.stacked):
            if axes:
                grad = lax.psum_scatter(grad, axes, scatter_dimension=dim, tiled=True)
        grad = _sum(grad, self.sum)
        return grad[None] if self.stacked else grad


def _token_axes(rules: axis_rules.Rules) -> tuple[str, ...]:
    """Return the manual axes whose devices see different tokens (`tensor`, if a rule names it, is in the types)."""
    return tuple(axis for axis in MANUAL if axis in rules.tokens)


def _reduced(grad: jax.Array, plan: _Plan) -> jax.Array:
    return _island(plan.reduce, grad, new=plan.stacked)


def _island(f: Callable[[jax.Array], jax.Array], x: jax.Array, new: int = 0) -> jax.Array:
    """Apply `f` where `tensor` is manual too; it may add a leading dimension."""
    spec = jax.typeof(x).sharding.spec
    return activations.manual_region(f, (spec,), P(*(None,) * new, *spec))(x)


def _joined(x: jax.Array) -> jax.Array:
    """Undo `activations.micro_batches`."""
    _, batch, *rest = jax.typeof(x).sharding.spec
    return jax.lax.reshape(jnp.moveaxis(x, 0, 1), (x.shape[0] * x.shape[1], *x.shape[2:]), out_sharding=P(batch, *rest))


def _sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum(x, axes) if axes else x


def _largest(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.pmax(x, axes) if axes else x


def _manual(entry: SpecEntry, more: tuple[str, ...] = ()) -> tuple[str, ...] | None:
    """Return the manual axes in one entry of a spec, plus `more`."""
    return (*(axis for axis in axis_rules.axes_of(entry) if axis in MANUAL), *more) or None
