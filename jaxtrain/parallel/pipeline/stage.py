"""One pipeline stage's work at a tick: receive, F, B, W, send; one device's program, among manual axes."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.base import further_sums
from jaxtrain.base.annotations import PyTree
from jaxtrain.parallel.pipeline.deferred import Deferred, Ledger, Path, put, take
from jaxtrain.parallel.pipeline.parts import Parts, Sums, lower, whole
from jaxtrain.parallel.pipeline.residuals import Pull, Residuals
from jaxtrain.parallel.pipeline.stage_placement import Slots
from jaxtrain.parallel.schedules import Column, Hop, Schedule, table
from jaxtrain.sharding import activations
from jaxtrain.train_step import partition
from jaxtrain.train_step.state import Batch, Params

F32 = jnp.float32
Carry = dict[str, Any]
Wrap = Callable[[Callable], Callable]


class Stage:
    """The layers of one stage and its part of the table; `run` goes through all ticks and returns the results.

    Args:
        layers: the trained parameters of the stage's layers.
        outer: the trained parameters of everything else.
        frozen: the frozen parameters of both kinds, as a pair.
        keeps: what makes a chunk's function keep results for B; None: B computes them again.
    """

    def __init__(self, parts: Parts, schedule: Schedule, stage: jax.Array, slots: Mapping[str, Slots], layers: Params,
                 outer: Params, frozen: tuple[Params, Params], batch: Batch, seed: jax.Array,
                 deferrable: frozenset[Path], keeps: Wrap | None = None):
        self.parts, self.slots, self.layers, self.outer = parts, slots, layers, outer
        self.batch, self.seed = batch, seed
        self.frozen_layers, self.frozen_outer = frozen
        self.stages, self.latency, self.last, self.kinds = (
            schedule.stages, schedule.latency, schedule.last, schedule.kinds)
        self.table = table(schedule)
        self.trash = {"acts": self.table.activations, "kept": self.table.activations, "grads": self.table.gradients,
                      "pairs": self.table.weight_slots}
        self.position = jnp.asarray(np.array(schedule.position, np.int32))[stage]
        self.rows = jnp.asarray(self.table.op)[:, stage]
        self.empty = self._activation()
        self.ledgers = {key: Ledger() for key in parts.stacks}
        if "W" in self.kinds:  # trace once to find the products
            weights, micro = pick(self.layers, 0), pick(self.batch, 0)
            looking = put(weights, self._deferred(take(weights, deferrable)[1], dict.fromkeys(deferrable)))
            jax.eval_shape(lambda: self.middle(0, looking, self.empty, micro))
        self.keeps = keeps if "B" in self.kinds else None
        self.residuals = self._residuals() if self.keeps else None

    def run(self) -> Carry:
        """Run all ticks."""
        return lax.scan(self.tick, self.start(), self.rows)[0]

    def start(self) -> Carry:
        """Return empty slots and zero sums."""
        def slots(tree, name):
            return jax.tree.map(lambda x: lax.broadcast(x, (self.trash[name] + 1,)), tree)

        micro, none = pick(self.batch, 0), jnp.zeros((), F32)
        sums = jax.eval_shape(lambda: self.middle(0, pick(self.layers, 0), self.empty, micro)[2])
        end = self.no_end(0, pick(self.layers, 0), micro)
        if self.parts.together:  # of each micro-batch
            count = len(jax.tree.leaves(self.batch)[0])
            end = jax.tree.map(lambda x: lax.broadcast(x, (count,)), end)
        carry = dict(acts=slots(self.empty, "acts"), right=self.empty, left=self.empty, penalty=none, end=end,
                     sums=further_sums.none_of(sums, (self.position.size,), F32))
        if "B" in self.kinds:
            rest, kernels = take(jax.tree.map(lambda w: jnp.zeros_like(w, F32), self.layers), self.rooms())
            carry |= dict(
                grads=slots(self.empty, "grads"), rest_grads=rest, kernel_grads=kernels,
                outer_grads=jax.tree.map(lambda w: jnp.zeros_like(w, F32), self.outer))
        if "W" in self.kinds:
            carry |= dict(pairs=slots(self.rooms(), "pairs"))
        if self.residuals:
            carry |= dict(kept=slots((self.residuals.empty(), none, jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), sums)), "acts"))
        return carry

    def tick(self, carry: Carry, row: jax.Array) -> tuple[Carry, None]:
        """Receive what neighbours sent in the previous tick, do what the table says, and leave outputs to be sent."""
        came = {ring: jax.tree.map(lambda x, step=step: lax.ppermute(
            x, "stage", [(i, (i + step) % self.stages) for i in range(self.stages)]), carry[ring])
            for ring, step in (("right", 1), ("left", -1))}
        if self.latency == 1:
            carry = self.receive(carry, row, came)
        for kind, do in zip("FBW", (self.forward, self.backward, self.weigh), strict=True):
            if kind in self.kinds:
                carry = lax.cond(row[Column[f"{kind}_ON"]] > 0, do, lambda carry, _: carry, carry, row)
        if self.latency == 2:  # nothing above had to wait for the transfer
            carry = self.receive(carry, row, came)
        return carry, None

    # ------------------------------------------------------------------------------------------------ the operations
    def forward(self, carry: Carry, row: jax.Array) -> Carry:
        """F: keep what B needs and send the chunk's output, of which the last chunk has none where B recomputes it."""
        chunk, micro = row[Column.F_CHUNK], pick(self.batch, row[Column.F_MB])
        here, weights = self.position[chunk], pick(self.layers, chunk)
        x = lax.cond(here == 0, lambda: self.parts.begin(self.all_of(chunk, weights, self.outer), micro),
                     lambda: pick(carry["acts"], row[Column.F_IN]))
        if self.residuals:  # B reads the output, which the last chunk's loss begins with, in place of the input
            (y, penalty), pull, sums = self.differentiated(self.at_hand(chunk, weights, micro), x)
            carry = self.store(carry, "acts", y, row, Column.F_IN)
            carry = self.store(carry, "kept", (self.residuals.stored(pull), penalty, sums), row, Column.F_IN)
        elif "B" in self.kinds:
            carry = self.store(carry, "acts", x, row, Column.F_IN)
            y = lax.cond(here == self.last, lambda: x, lambda: self.middle(chunk, weights, x, micro)[0])
        else:
            y, penalty, sums = self.middle(chunk, weights, x, micro)
            end = lax.cond(here == self.last,
                           lambda: self.end(chunk, weights, y, micro), lambda: self.no_end(chunk, weights, micro))
            carry |= self.told(carry, chunk, end, penalty, sums, row[Column.F_MB])
        return self.send(carry, "F", y, row)

    def backward(self, carry: Carry, row: jax.Array) -> Carry:
        """B: recompute the chunk or take what F kept of it, and compute the loss at the end; send the input's gradient.

        With W in the schedule, weight products are deferred: only their inputs and output gradients are kept.
        """
        chunk, micro = row[Column.B_CHUNK], pick(self.batch, row[Column.B_MB])
        here, weights = self.position[chunk], pick(self.layers, chunk)
        at_hand, held = self.at_hand(chunk, weights, micro), pick(carry["acts"], row[Column.B_IN])
        if self.residuals:
            kept, penalty, sums = pick(carry["kept"], row[Column.B_IN])
            y, pull = held, self.residuals.restored(kept, at_hand)
        else:
            (y, penalty), pull, sums = self.differentiated(at_hand, held)

        def at_the_end(grads):
            loss, pull, further = jax.vjp(lambda outer, y: self.parts.end(self.all_of(chunk, weights, outer), y, micro),
                                          self.outer, y, has_aux=True)
            d_outer, dy = pull(self.seed)
            return (loss, further), add(grads, d_outer), dy

        def elsewhere(grads):
            return self.no_end(chunk, weights, micro), grads, pick(carry["grads"], row[Column.B_GRAD])

        end, outer_grads, dy = lax.cond(here == self.last, at_the_end, elsewhere, carry["outer_grads"])
        d_rest, pairs, dx, d_shared = pull((dy, self.seed))
        outer_grads |= add({key: outer_grads[key] for key in d_shared}, d_shared)

        def at_the_beginning(grads):
            _, pull = jax.vjp(lambda outer: self.parts.begin(self.all_of(chunk, weights, outer), micro), self.outer)
            return add(grads, pull(dx)[0])

        outer_grads = lax.cond(here == 0, at_the_beginning, lambda grads: grads, outer_grads)
        carry |= self.told(carry, chunk, end, penalty, sums) | dict(
            rest_grads=add_at(carry["rest_grads"], chunk, d_rest), outer_grads=outer_grads)
        return self.send(self.store(carry, "pairs", pairs, row, Column.B_STORE), "B", dx, row)

    def differentiated(self, at_hand: PyTree, x: PyTree) -> tuple[tuple[PyTree, jax.Array], Pull, Sums]:
        """Return a chunk's output and penalty, the function that gives its gradients, and its sums."""
        (rest, kernels), frozen, rooms, shared, outer, micro, slots = at_hand

        def middle(rest, rooms, x, shared):
            mine = put(rest, self._deferred(kernels, rooms))
            y, penalty, sums = self.parts.middle(lower(partition.merge(*outer, shared, mine, frozen)), x, micro, slots)
            return (y, penalty), sums

        return jax.vjp(self.keeps(middle) if self.keeps else middle, rest, rooms, x, shared, has_aux=True)

    def at_hand(self, chunk: jax.Array | int, weights: Params, micro: Batch) -> PyTree:
        """Return what F and B of a chunk both have: weights, the micro-batch, and the numbers of the chunk's layers."""
        shared = {key: self.outer[key] for key in self.parts.shared if key in self.outer}
        return (take(weights, self.rooms()), pick(self.frozen_layers, chunk), self.rooms(), shared,
                (partition.without(self.outer, shared), self.frozen_outer), micro,
                {key: held.of_chunk(chunk) for key, held in self.slots.items()})

    def weigh(self, carry: Carry, row: jax.Array) -> Carry:
        """W: compute the weight products that B deferred."""
        chunk, pairs = row[Column.W_CHUNK], pick(carry["pairs"], row[Column.W_FROM])
        _, kernels = take(pick(self.layers, chunk), self.rooms())
        grads = {}
        for key, ledger in self.ledgers.items():
            if not ledger.products:  # all of its products are frozen
                continue
            mine = [path for path in ledger.products if path[0] == key]
            grads |= ledger.gradients({path: kernels[path] for path in mine}, {path: pairs[path] for path in mine})
        return carry | dict(kernel_grads=add_at(carry["kernel_grads"], chunk, grads))

    def end(self, chunk: jax.Array | int, weights: Params, y: PyTree, micro: Batch) -> PyTree:
        """Return the end's loss and sums, or its arrays of rows."""
        done = self.parts.end(self.all_of(chunk, weights, self.outer), y, micro)
        return whole(done) if self.parts.together else done

    def no_end(self, chunk: jax.Array | int, weights: Params, micro: Batch) -> PyTree:
        """Return zeros in place of what `end` returns."""
        return jax.tree.map(lambda a: jnp.zeros(a.shape, F32), jax.eval_shape(
            lambda: self.end(chunk, weights, self.empty, micro)))

    def told(self, carry: Carry, chunk: jax.Array | int, end: PyTree, penalty: jax.Array, sums: Sums,
             number: Any = None) -> Carry:
        """Return the totals with what a chunk adds to them; `number`: the micro-batch, for arrays of rows."""
        return dict(end=add_at(carry["end"], number, end) if self.parts.together else add(carry["end"], end),
                    penalty=carry["penalty"] + penalty, sums=further_sums.by_kind(*(
                        lambda a, b, add=add: add_at(a, chunk, b, add) for add in (jnp.add, jnp.maximum)),
                        carry["sums"], sums))

    # -------------------------------------------------------------------------------------------- slots and neighbours
    def receive(self, carry: Carry, row: jax.Array, came: Mapping[str, PyTree]) -> Carry:
        """Store what arrived in its slots."""
        for ring, x in came.items():
            carry = self.store(carry, "acts", x, row, Column[f"{ring.upper()}_ACT"])
            carry = self.store(carry, "grads", x, row, Column[f"{ring.upper()}_GRAD"])
        return carry

    def send(self, carry: Carry, kind: str, x: PyTree, row: jax.Array) -> Carry:
        """Leave an output for the ring that carries it, or in a slot if the next chunk is on this stage."""
        to, ways = row[Column[f"{kind}_TO"]], set(self.table.op[..., Column[f"{kind}_TO"]].flat) - {Hop.NOWHERE}
        for ring, hop in (("right", Hop.RIGHT), ("left", Hop.LEFT)):
            if hop in ways:  # what is sent needlessly ends in the trash slot
                carry |= {ring: x if ways == {hop} else jax.tree.map(
                    lambda x, other, hop=hop: jnp.where(to == hop, x, other), x, carry[ring])}
        return self.store(carry, "acts" if kind == "F" else "grads", x, row, Column[f"{kind}_SELF"])

    def store(self, carry: Carry, slots: str, x: PyTree, row: jax.Array, column: Column) -> Carry:
        """Store `x` in the slot that a column names; does nothing where the column never names one."""
        if slots not in carry or (self.table.op[..., column] == self.trash[slots]).all():
            return carry
        return carry | {slots: jax.tree.map(
            lambda slots, x: lax.dynamic_update_index_in_dim(slots, x, row[column], 0), carry[slots], x)}

    # -------------------------------------------------------------------------------------------------------- weights
    def middle(self, chunk: jax.Array | int, weights: Params, x: PyTree, micro: Batch
               ) -> tuple[PyTree, jax.Array, Sums]:
        """Apply the layers of one chunk."""
        slots = {key: held.of_chunk(chunk) for key, held in self.slots.items()}
        return self.parts.middle(self.all_of(chunk, weights, self.outer), x, micro, slots)

    def all_of(self, chunk: jax.Array | int, weights: Params, outer: Params) -> Params:
        """Return trained and frozen parameters of one chunk, and of everything that is not a layer."""
        return lower(partition.merge(outer, self.frozen_outer, weights, pick(self.frozen_layers, chunk)))

    def layer_gradients(self, carry: Carry) -> Params:
        """Return the gradients of all layers of the stage, from the final carry."""
        return put(carry["rest_grads"], carry["kernel_grads"])

    def rooms(self) -> dict[Path, PyTree]:
        """Return placeholders for the pairs of one chunk; empty where the schedule has no W."""
        return {path: room for key, ledger in self.ledgers.items()
                if ledger.products
                for path, room in ledger.room((len(jax.tree.leaves(self.layers[key])[0][0]),)).items()}

    def _deferred(self, kernels: Mapping[Path, jax.Array], rooms: Mapping[Path, PyTree]) -> dict[Path, Deferred]:
        return {path: Deferred(kernel, rooms[path], self.ledgers[path[0]], path)
                for path, kernel in kernels.items()}

    def _residuals(self) -> Residuals:
        """Return what F leaves for B, found by a trace."""
        at_hand = self.at_hand(0, pick(self.layers, 0), pick(self.batch, 0))
        return Residuals.of(lambda at_hand, x: self.differentiated(at_hand, x)[1], at_hand, self.empty)

    def _activation(self) -> PyTree:
        """Return zeros shaped like the activations passed between chunks."""
        weights, micro = pick(self.layers, 0), pick(self.batch, 0)
        x = jax.eval_shape(lambda: self.parts.begin(self.all_of(0, weights, self.outer), micro))
        return jax.tree.map(lambda x: activations.constrain(
            jnp.zeros(x.shape, x.dtype), "batch", "block_seq", "act_embed"), x)


def pick(tree: PyTree, index: jax.Array | int) -> PyTree:
    """Return element `index` along the first dimension of every array."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def add(total: PyTree, more: PyTree) -> PyTree:
    """Add leaf by leaf, in the dtype of the total."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)


def add_at(total: PyTree, index: jax.Array | int, more: PyTree, add: Callable[..., jax.Array] = jnp.add) -> PyTree:
    """Add `more` to element `index` along the first dimension of the totals."""
    return jax.tree.map(lambda a, b: lax.dynamic_update_index_in_dim(
        a, add(lax.dynamic_index_in_dim(a, index, 0, keepdims=False), b.astype(a.dtype)), index, 0), total, more)
