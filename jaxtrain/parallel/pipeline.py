"""One executor for every pipeline schedule: the ticks of its table, run by all stages at once.

The executor is a `jax.shard_map` that is manual over every axis but `tensor`. So each device works on its own tokens
with its own stage's layers; tensor parallelism, and the islands of context and expert parallelism, go on inside. What a
stage does at a tick stands in a table, and it does it in a branch: collectives in there join devices of one stage only.
Between stages there is one permutation to the right and one to the left a tick, outside all branches.

A stage keeps the inputs of its chunks and computes the rest again in B: one forward pass more than without a pipeline.
Weight gradients are added up where they are made, and summed over devices once, after the last tick.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain import sharding
from jaxtrain.config import Config
from jaxtrain.errors import UserError
from jaxtrain.parallel import schedules
from jaxtrain.parallel.placement import Placement
from jaxtrain.parallel.schedules import Column, Hop, Schedule, table

TOKENS = ("data", "fsdp", "context", "expert")  # their devices see different tokens
MANUAL = (*TOKENS, "stage")
F32 = jnp.float32
Sums = dict[str, jax.Array]


@dataclass(frozen=True)
class Parts:
    """A model cut in three; of each stack, the parameters may hold any number of layers."""

    stacks: Mapping[str, int]  # the keys of parameters that are stacks of layers, in order, and how many layers each has
    begin: Callable[[Any, Any], jax.Array]  # parameters, batch -> activations
    # parameters, activations, batch, which layers are real -> activations, summed penalty, other sums for each layer
    middle: Callable[[Any, jax.Array, Any, Any], tuple[jax.Array, jax.Array, Sums]]
    end: Callable[[Any, jax.Array, Any], jax.Array]  # parameters, activations, batch -> summed loss


@dataclass(frozen=True)
class Pipeline:
    """The loss, and its gradients, of a model whose layers are spread over stages."""

    parts: Parts
    schedule: Schedule
    evaluation: Schedule  # forward only
    rules: sharding.Rules
    axes: Any  # logical names of the parameters
    at_rest: Any  # partition specs of the gradients

    def gradient(self, params: Any, batch: Any, seed: jax.Array) -> tuple[jax.Array, Sums, Any]:
        """Summed loss, other sums, and the float32 gradient of `seed` times the summed loss."""
        placement, (loss, sums, layers, outer) = self._run(self.schedule, params, batch, seed)
        grads = {key: jax.tree.map(partial(placement.from_stages, key), grads, self.at_rest[key])
                 for key, grads in layers.items()}
        return loss, sums, grads | outer

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Summed loss."""
        return self._run(self.evaluation, params, batch, jnp.zeros((), F32))[1][0]

    def _run(self, schedule: Schedule, params: Any, batch: Any, seed: jax.Array) -> Any:
        mesh, _ = sharding.current() or (None, None)
        assert mesh is not None, "a pipeline runs on a mesh"
        plans = {key: jax.tree.map(lambda names: _Plan.of(names, self.rules, mesh, stacked=key in self.parts.stacks),
                                   self.axes[key], is_leaf=lambda x: isinstance(x, tuple)) for key in params}
        placement = Placement.of(self.parts.stacks, schedule.position)
        layers, outer = {}, {}
        for key, weights in params.items():
            if key in self.parts.stacks:
                layers[key] = jax.tree.map(lambda w, plan, key=key: placement.to_stages(key, w, plan.in_use),
                                           weights, plans[key])
            else:
                outer[key] = jax.tree.map(lambda w, plan: jax.reshard(w, plan.in_use), weights, plans[key])
        batch = {key: sharding.micro_batches(x, schedule.microbatches) for key, x in batch.items()}

        def on_device(layers, outer, batch, seed):
            stage = lax.axis_index("stage")
            layers = jax.tree.map(lambda w: w[0], layers)
            work = _Stage(self.parts, schedule, placement.real(stage), stage, layers, outer, batch, seed)
            carry = work.run()
            total = _island(lambda x: _sum(x, MANUAL), (carry["loss"],))[0]
            if not work.backwards:
                return total, {}, {}, {}
            sums = _island(lambda x: _sum(x, TOKENS)[None], carry["sums"], new=1)
            reduced = [{key: jax.tree.map(lambda g, plan: _island(plan.reduce, (g,), new=plan.stacked)[0], grads, plans[key])
                        for key, grads in carry[which].items()} for which in ("layer_grads", "outer_grads")]
            return total, sums, *reduced

        def manual(plan, stage=("stage", None, None)):
            return P(*(stage if plan.stacked else ()), *(_only(entry, MANUAL) for entry in plan.in_use))

        ins = jax.tree.map(manual, plans)
        outs = jax.tree.map(lambda plan: plan.reduced, plans)
        tokens = P(None, *(_only(entry, MANUAL) for entry in (sharding.split_by("batch"), sharding.split_by("seq"))))
        pick = lambda tree, keys: {key: tree[key] for key in keys}  # noqa: E731
        backwards = "B" in schedule.kinds
        return placement, jax.shard_map(
            on_device, axis_names=set(MANUAL), check_vma=False,
            in_specs=(pick(ins, layers), pick(ins, outer), tokens, P()),
            out_specs=(P(), P("stage"), *((pick(outs, layers), pick(outs, outer)) if backwards else (P(), P()))),
        )(layers, outer, batch, seed)


def make_schedules(config: Config, stages: int, batch_shards: int) -> tuple[Schedule, Schedule]:
    """The schedules that a config asks for: of training, and of evaluation."""
    c, rows = config.pipeline, config.data.global_batch_size // config.train.accumulation // batch_shards
    # Four micro-batches a stage leave a bubble of about a fifth; more of them make small matrix products.
    count = c.microbatches or max(n for n in range(1, max(1, min(rows, 4 * stages)) + 1) if rows % n == 0)
    if rows % count:
        raise UserError("pipeline.microbatches", f"{count} does not divide the {rows} rows of a device's batch",
                        "choose a divisor, or 0")
    latency = 2 if c.overlap else 1
    if c.table:
        train = schedules.from_file(c.table, stages, count, c.chunks)
    else:  # in lockstep a tick lasts as long as its longest operation, hence pairs of F and B, or B and W apart
        train = schedules.make(c.schedule, stages, count, c.chunks, paired=not c.schedule.startswith("zb"), latency=latency)
    return train, schedules.forward_only(stages, count, c.chunks, latency=train.latency, position=train.position)


class _Stage:
    """What one device does: its stage's part of every tick."""

    def __init__(self, parts: Parts, schedule: Schedule, real: Mapping[str, Any], stage: jax.Array, layers: Any,
                 outer: Any, batch: Any, seed: jax.Array):
        self.parts, self.real, self.layers, self.outer, self.batch = parts, real, layers, outer, batch
        self.seed, self.stages, self.latency, self.last = seed, schedule.stages, schedule.latency, schedule.last
        self.table, self.backwards = table(schedule), "B" in schedule.kinds
        self.position = jnp.asarray(np.array(schedule.position, np.int32))[stage]
        self.rows = jnp.asarray(self.table.op)[:, stage]
        self.trash = {"acts": self.table.activations, "grads": self.table.gradients}

    def run(self) -> dict[str, Any]:
        """All ticks; what has been added up by then."""
        return lax.scan(self.tick, self.start(), self.rows)[0]

    def start(self) -> dict[str, Any]:
        """Empty slots and zero sums."""
        micro = pick(self.batch, 0)
        x = jax.eval_shape(self.parts.begin, self.all(self.chunk(0)), micro)
        spec = sharding.activation_spec("batch", "block_seq", "act_embed") or P()

        def slots(count):
            return jax.reshard(jnp.zeros((count + 1, *x.shape), x.dtype), P(None, *spec))

        empty = jax.reshard(jnp.zeros(x.shape, x.dtype), spec)
        carry = dict(acts=slots(self.trash["acts"]), right=empty, left=empty, loss=jnp.zeros((), F32))
        if self.backwards:
            sums = jax.eval_shape(lambda: self.middle(0, self.chunk(0), empty, micro)[2])
            carry |= dict(
                grads=slots(self.trash["grads"]),
                sums=jax.tree.map(lambda a: jnp.zeros((self.position.size, *a.shape), F32), sums),
                layer_grads=jax.tree.map(lambda w: jnp.zeros_like(w, F32), self.layers),
                outer_grads=jax.tree.map(lambda w: jnp.zeros_like(w, F32), self.outer))
        return carry

    def tick(self, carry: dict[str, Any], row: jax.Array) -> tuple[dict[str, Any], None]:
        """Receive what neighbours sent in the tick before; do what the table says; leave what is to be sent."""
        came = {ring: lax.ppermute(carry[ring], "stage", [(i, (i + step) % self.stages) for i in range(self.stages)])
                for ring, step in (("right", 1), ("left", -1))}
        if self.latency == 1:
            carry = self.receive(carry, row, came)
        carry = lax.cond(row[Column.F_ON] > 0, self.forward, lambda c, _: c, carry, row)
        if self.backwards:
            carry = lax.cond(row[Column.B_ON] > 0, self.backward, lambda c, _: c, carry, row)
        if self.latency == 2:  # nothing above had to wait for the transfer
            carry = self.receive(carry, row, came)
        return carry, None

    def receive(self, carry: dict[str, Any], row: jax.Array, came: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Put what came into its slots."""
        for ring, x in came.items():
            for slots, kind in (("acts", "ACT"), ("grads", "GRAD")):
                carry = self.store(carry, slots, x, row, Column[f"{ring.upper()}_{kind}"])
        return carry

    def forward(self, carry: dict[str, Any], row: jax.Array) -> dict[str, Any]:
        """F: keep the chunk's input, send its output. At the end there is none: B computes it for itself."""
        chunk, micro = row[Column.F_CHUNK], pick(self.batch, row[Column.F_MB])
        here, weights = self.position[chunk], self.chunk(chunk)
        x = lax.cond(here == 0, lambda: self.parts.begin(self.all(weights), micro),
                     lambda: pick(carry["acts"], row[Column.F_IN]))
        if self.backwards:
            carry = self.store(carry, "acts", x, row, Column.F_IN)
            y = lax.cond(here == self.last, lambda: x, lambda: self.middle(chunk, weights, x, micro)[0])
        else:
            y, penalty, _ = self.middle(chunk, weights, x, micro)
            end = lax.cond(here == self.last, lambda: self.parts.end(self.all(weights), y, micro),
                           lambda: jnp.zeros((), F32))
            carry |= dict(loss=carry["loss"] + end + penalty)
        return self.send(carry, "F", y, row)

    def backward(self, carry: dict[str, Any], row: jax.Array) -> dict[str, Any]:
        """B: the chunk again, at the end the loss, then gradients: the input's is sent, the weights' is added up."""
        chunk, micro = row[Column.B_CHUNK], pick(self.batch, row[Column.B_MB])
        here, weights = self.position[chunk], self.chunk(chunk)
        x = pick(carry["acts"], row[Column.B_IN])

        def middle(weights, x):
            y, penalty, sums = self.middle(chunk, weights, x, micro)
            return (y, penalty), sums

        (y, penalty), pull, sums = jax.vjp(middle, weights, x, has_aux=True)

        def at_the_end(grads):
            end, pull = jax.vjp(lambda outer, y: self.parts.end(outer | weights, y, micro), self.outer, y)
            d_outer, dy = pull(self.seed)
            return end, add(grads, d_outer), dy

        end, outer_grads, dy = lax.cond(
            here == self.last, at_the_end,
            lambda grads: (jnp.zeros((), F32), grads, pick(carry["grads"], row[Column.B_GRAD])), carry["outer_grads"])
        d_weights, dx = pull((dy, self.seed))

        def at_the_beginning(grads):
            _, pull = jax.vjp(lambda outer: self.parts.begin(outer | weights, micro), self.outer)
            return add(grads, pull(dx)[0])

        outer_grads = lax.cond(here == 0, at_the_beginning, lambda grads: grads, outer_grads)
        carry |= dict(loss=carry["loss"] + end + penalty, sums=add_at(carry["sums"], chunk, sums),
                      layer_grads=add_at(carry["layer_grads"], chunk, d_weights), outer_grads=outer_grads)
        return self.send(carry, "B", dx, row)

    def send(self, carry: dict[str, Any], kind: str, x: jax.Array, row: jax.Array) -> dict[str, Any]:
        """Leave an output for the ring that takes it, or in a slot where the next chunk is the stage's own."""
        to, ways = row[Column[f"{kind}_TO"]], set(self.table.op[..., Column[f"{kind}_TO"]].flat) - {Hop.NOWHERE}
        for ring, hop in (("right", Hop.RIGHT), ("left", Hop.LEFT)):
            if hop in ways:  # what is sent without need goes to a slot for trash
                carry |= {ring: x if ways == {hop} else jnp.where(to == hop, x, carry[ring])}
        return self.store(carry, "acts" if kind == "F" else "grads", x, row, Column[f"{kind}_SELF"])

    def store(self, carry: dict[str, Any], slots: str, x: jax.Array, row: jax.Array, column: Column) -> dict[str, Any]:
        """Put `x` into the slot that a column names; nothing where it never names one."""
        if slots not in carry or (self.table.op[..., column] == self.trash[slots]).all():
            return carry
        return carry | {slots: lax.dynamic_update_index_in_dim(carry[slots], x, row[column], 0)}

    def middle(self, chunk: Any, weights: Any, x: jax.Array, micro: Any) -> tuple[jax.Array, jax.Array, Sums]:
        """The layers of one chunk."""
        real = {key: None if mask is None else mask[chunk] for key, mask in self.real.items()}
        return self.parts.middle(self.all(weights), x, micro, real)

    def chunk(self, chunk: Any) -> Any:
        """The weights of one chunk."""
        return pick(self.layers, chunk)

    def all(self, weights: Any) -> Any:
        """Parameters as the parts take them."""
        return self.outer | weights


@dataclass(frozen=True)
class _Plan:
    """How one parameter lies in use, and how its gradient is summed over devices and laid out as at rest."""

    in_use: P  # without the dimension of layers
    scatter: tuple[tuple[str, ...], ...]  # of each dimension: the axes that it is summed and split over
    sum: tuple[str, ...]  # the axes that it is only summed over
    stacked: bool

    @classmethod
    def of(cls, names: sharding.Names, rules: sharding.Rules, mesh: sharding.AnyMesh, stacked: bool) -> "_Plan":
        names = names[1:] if stacked else names
        in_use, at_rest = (sharding.without_trivial_axes(rules.spec(names, gathered=gathered), mesh)
                           for gathered in (True, False))
        kept = [set(sharding.axes_of(entry)) for entry in in_use]
        # A dimension split over tensor in use is put together by the compiler, if it is split over more at rest.
        scatter = tuple(() if "tensor" in mine else tuple(a for a in sharding.axes_of(entry) if a in TOKENS and a not in mine)
                        for mine, entry in zip(kept, at_rest, strict=True))
        done = set().union(*kept, *scatter)
        summed = tuple(axis for axis in (TOKENS if stacked else MANUAL) if mesh.shape[axis] > 1 and axis not in done)
        return cls(in_use, scatter, summed, stacked)

    @property
    def reduced(self) -> P:
        """The manual axes of the gradient: stages, chunks and slots first if it is stacked."""
        mine = [(*sharding.axes_of(_only(entry, MANUAL)), *new) for entry, new in zip(self.in_use, self.scatter, strict=True)]
        return P(*(("stage", None, None) if self.stacked else ()), *(axes or None for axes in mine))

    def reduce(self, grad: jax.Array) -> jax.Array:
        """On one device, inside an island."""
        for dim, axes in enumerate(self.scatter):
            if axes:
                dim += 2 * self.stacked  # chunks and slots
                grad = lax.psum_scatter(grad, axes, scatter_dimension=dim, tiled=True)
        grad = _sum(grad, self.sum)
        return grad[None] if self.stacked else grad


def _island(f: Callable, tree: Any, new: int = 0) -> Any:
    """`f` on each leaf, where `tensor` is manual too; it may put a new dimension in front."""
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)
    out = jax.tree.map(lambda spec: P(*(None,) * new, *spec), specs)
    return sharding.island(lambda tree: jax.tree.map(f, tree), (specs,), out)(tree)


def _sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum(x, axes) if axes else x


def _only(entry: Any, axes: tuple[str, ...]) -> Any:
    kept = tuple(axis for axis in sharding.axes_of(entry) if axis in axes)
    return kept[0] if len(kept) == 1 else kept or None


def pick(tree: Any, index: Any) -> Any:
    """Element `index` of every array's first dimension."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def add(total: Any, more: Any) -> Any:
    """Leaf by leaf, in the dtype of the total."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)


def add_at(total: Any, index: Any, more: Any) -> Any:
    """`more` onto element `index` of the totals' first dimension."""
    return jax.tree.map(lambda a, b: lax.dynamic_update_index_in_dim(
        a, lax.dynamic_index_in_dim(a, index, 0, keepdims=False) + b.astype(a.dtype), index, 0), total, more)
