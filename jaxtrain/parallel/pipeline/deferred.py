"""Deferred weight gradients: B stores each product's input and output gradient, W multiplies the two later.

This is how a zero-bubble schedule splits the backward pass. A `Deferred` weight has, besides its values, a placeholder
for the pair, and the product's gradient with respect to that placeholder is the pair itself. So whatever transports
gradients (`lax.scan` over layers, rematerialization) transports the pairs, and W computes just one product per weight.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import PyTree
from jaxtrain.sharding import products
from jaxtrain.sharding.products import Product
from jaxtrain.train_step.state import Params

Path = tuple[str, ...]  # keys of nested dicts
Weights = dict[Path, jax.Array]


@dataclass(eq=False)
class Ledger:
    """The products of one layer whose weight gradients are deferred, by the path of the weight."""

    products: dict[Path, Product] = field(default_factory=dict)
    owner: dict[Path, Path] = field(default_factory=dict)  # products that share an input store it once
    shapes: dict[Path, tuple] = field(default_factory=dict)  # of input and output: (shape, dtype, spec)
    _inputs: dict[int, tuple[Path, Any]] = field(default_factory=dict)

    def note(self, path: Path, product: Product, x: jax.Array, y: jax.Array) -> None:
        """Record a product."""
        self.products[path] = product
        self.owner[path] = self._inputs.setdefault(id(x), (path, x))[0]
        self.shapes[path] = tuple((a.shape, a.dtype, getattr(jax.typeof(a).sharding, "spec", P())) for a in (x, y))

    def room(self, lead: tuple[int, ...]) -> dict[Path, tuple]:
        """Return zeros for all pairs, with leading dimensions `lead`."""
        def zeros(shape, dtype, spec):
            return jax.reshard(jnp.zeros((*lead, *shape), dtype), P(*(None,) * len(lead), *spec))
        return {path: (zeros(*x) if self.owner[path] == path else None, zeros(*y))
                for path, (x, y) in self.shapes.items()}

    def gradients(self, weights: Weights, pairs: dict[Path, tuple]) -> Weights:
        """Compute the gradients of a stack's weights from the pairs of each layer; this is all that W does."""
        def one(_, layer):
            weights, pairs = layer

            def weight_gradient(path):
                x, dy = pairs[self.owner[path]][0], pairs[path][1]
                return products.weight_gradient(self.products[path], x, weights[path], dy)

            return None, {path: weight_gradient(path) for path in self.products}
        return jax.lax.scan(one, None, (weights, pairs))[1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Deferred:
    """A weight whose gradient is deferred, with a placeholder for its pair: None while a ledger is being filled."""

    weight: jax.Array
    room: tuple | None
    ledger: Ledger = field(metadata={"static": True})
    path: Path = field(metadata={"static": True})

    def multiplied(self, product: Product, x: jax.Array) -> jax.Array:
        """Return `product(x, weight)`, with the weight's gradient deferred."""
        if self.room is None:
            y = products.forward(product, x, self.weight)
            self.ledger.note(self.path, product, x, y)
            return y

        @jax.custom_vjp
        def apply(x, weight, room):
            return products.forward(product, x, weight)

        def backward(saved, dy):
            x, weight, keeps_input = saved
            dx = products.input_gradient(product, x, weight, dy)
            return dx, jnp.zeros_like(weight), (None if keeps_input is None else x, dy)

        apply.defvjp(lambda x, weight, room: (products.forward(product, x, weight), (x, weight, room[0])), backward)
        return apply(x, self.weight, self.room)


def take(tree: Params, paths: Container[Path]) -> tuple[Params, Weights]:
    """Return the tree with None in place of the leaves at `paths`, and those leaves."""
    taken = {}

    def keep(path, leaf):
        keys = tuple(key.key for key in path)
        if keys not in paths:
            return leaf
        taken[keys] = leaf
        return None

    return jax.tree_util.tree_map_with_path(keep, tree), taken


def put(tree: Params, leaves: Mapping[Path, PyTree]) -> Params:
    """Return the tree with these leaves at their paths."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaves.get(tuple(key.key for key in path), leaf), tree, is_leaf=lambda leaf: leaf is None)
