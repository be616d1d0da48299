"""A model's loss cut in three parts, which a pipeline runs on different stages; without one they run in a row."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxtrain.base.annotations import PyTree
from jaxtrain.sharding import activations
from jaxtrain.train_step import partition
from jaxtrain.train_step.state import Batch, Params

if TYPE_CHECKING:
    from jaxtrain.parallel.pipeline.stage_placement import Placement
    from jaxtrain.parallel.schedules import Position

Sums = dict[str, jax.Array]


@dataclass(frozen=True)
class Parts:
    """A model cut in three parts; the parameters may hold any number of each stack's layers."""

    # the paths of the parameters that are stacks, such as "text/blocks", in order, and the number of layers of each
    stacks: Mapping[str, int]
    # (all parameters, trained and frozen, whole batch) -> the parameters and batch that the other parts need
    prepare: Callable[[Params, Batch], tuple[Params, Batch]]
    weight: Callable[[Batch], jax.Array]  # of a prepared batch: the divisor of the summed loss
    begin: Callable[[Params, Batch], PyTree]  # parameters, batch -> activations: one array or several, all of [B, T, D]
    # parameters, activations, batch, the slots of each stack -> activations, summed penalty, further sums for each
    # layer of the last stack
    middle: Callable[[Params, PyTree, Batch, Any], tuple[PyTree, jax.Array, Sums]]
    # parameters, activations, batch -> summed loss and further sums; with `together` arrays of rows in their place
    end: Callable[[Params, PyTree, Batch], PyTree]
    # those arrays of all rows, batch -> summed loss and further sums: for a loss that compares rows with one another
    together: Callable[[PyTree, Batch], tuple[jax.Array, Sums]] | None = None
    side_by_side: bool = False  # activations are a pair or more, of which each passes through a stack of its own
    shared: tuple[str, ...] = ()  # the parameter keys that are not stacks and that `middle` uses

    def loss(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array, Sums]:
        """Run all parts without a pipeline; return the summed loss, its weight and further sums."""
        params, batch = self.prepare(params, batch)
        x, penalty, sums = self.middle(params, self.begin(params, batch), batch, None)
        done = self.end(params, x, batch)
        loss, further = self.together(done, batch) if self.together else done
        return loss + penalty, self.weight(batch), self.all_sums(batch, sums, further)

    def all_sums(self, batch: Batch, *parts: Sums) -> Sums:
        """Return the further sums of all parts, and the weight of the batch, which makes means of them."""
        return {name: value for part in (*parts, {"weight": self.weight(batch)}) for name, value in part.items()}

    def placement(self, position: "Position") -> "Placement":
        """Return which layers each chunk of a schedule has."""
        from jaxtrain.parallel.pipeline.stage_placement import Placement

        apart = [{key: count} for key, count in self.stacks.items()] if self.side_by_side else [self.stacks]
        return Placement({key: layers for stacks in apart
                          for key, layers in Placement.of(stacks, position).layers.items()})

    def lift(self, tree: Params) -> Params:
        """Return a tree of parameters with each stack at its top, under the stack's path as a key."""
        found = {}
        for path in self.stacks:
            stack = tree
            for key in path.split("/"):
                stack = stack.get(key, {})
            found |= {path: stack} if stack else {}
        return partition.without(tree, lower(found)) | found

    def towards(self, pull: str) -> "Parts":
        """Return parts whose loss has the gradient of `together`, of which the batch has, as `pull`, that of each row.
        """
        def end(params: Params, x: PyTree, batch: Batch) -> tuple[jax.Array, Sums]:
            each = jax.tree.map(lambda done, to: (done * to).sum(), whole(self.end(params, x, batch)), batch[pull])
            return sum(jax.tree.leaves(each), jnp.zeros((), jnp.float32)), {}

        return replace(self, end=end, together=None)


def lower(tree: Params) -> Params:
    """Return the tree of parameters that `Parts.lift` was given."""
    def at(path: str, value: Params) -> Params:
        first, _, rest = path.partition("/")
        return {first: at(rest, value) if rest else value}

    return partition.merge(*(at(key, value) for key, value in tree.items()))


def whole(tree: PyTree) -> PyTree:
    """Return arrays of rows whole on the devices that share rows."""
    return jax.tree.map(lambda x: activations.constrain(x, "batch", *(None,) * (x.ndim - 1)), tree)
