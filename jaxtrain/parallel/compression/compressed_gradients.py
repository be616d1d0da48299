"""Gradients that are summed over one mesh axis by compressed messages, once a step (`compression.method`).

The gradient is computed in a `shard_map` that is manual over that axis alone: each of its peers has its own examples,
and accumulates its micro-batches by itself. Over all other axes it is summed as without compression, in full precision.
What then crosses the axis is each device's own part: with parameters split over `fsdp`, or with an axis inside that
splits the batch only, over which the gradient is split for the crossing and gathered again, that is the hierarchical
all-reduce of exchange.py.

What peers remember is in the state's `extras`, by parameter. Each array has one more dimension in front: "error" one
entry for each peer, "right" (PowerSGD's factor) one for each device of the other axes.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.base import further_sums
from jaxtrain.base.annotations import PyTree
from jaxtrain.config.sections.compression_keys import CompressionConfig
from jaxtrain.parallel.compression import codecs, exchange
from jaxtrain.sharding import activations, axis_rules
from jaxtrain.sharding.axis_rules import AnyMesh, Rules, Shardings
from jaxtrain.train_step.gradients import LossSums, StateGradient
from jaxtrain.train_step.state import Layout, Params, TrainState

NAME = "compression"  # in a state's extras


def refused(settings: CompressionConfig, mesh: AnyMesh, rules: Rules) -> tuple[str, str] | None:
    """Return why gradients cannot be compressed on this mesh, and what to do; None if they can."""
    if not (method := settings.method):
        return None
    axis = settings.axis
    split = sorted(name for name in axis_rules.PARAMETER_NAMES if axis in rules[name])
    if mesh.shape["stage"] > 1:
        return f"a pipeline (mesh.stage={mesh.shape['stage']}) sums its gradients by itself", "set mesh.stage=1"
    if axis not in rules.batch:
        return f"{axis} does not split the batch", f"use {rules.batch[0]}" if rules.batch else "leave it out"
    if split and mesh.shape[axis] > 1:
        return (f"parameters are split over {axis} ({split[0]}), so that they cross it whole, and not by {method}",
                "use data, or mesh.rules=data")
    if mesh.shape[axis] == 1:
        warnings.warn(f"compression.method: mesh.{axis} is 1, so no gradient crosses it", stacklevel=2)
    inside = [name for name, size in mesh.shape.items() if size > 1 and name != axis]
    if inside and jax.__version_info__ < (0, 11):
        warnings.warn(f"compression.method: JAX {jax.__version__} gathers parameters and gradients whole over "
                      f"mesh.{inside[0]}, where a step with compression begins and ends; from 0.11 on it does not",
                      stacklevel=2)
    return None


@dataclass(frozen=True)
class CompressedGradients:
    """The codec of every parameter's gradient, and where it is split when it crosses the axis."""

    compression: CompressionConfig
    zero_stage: int
    layout: Layout
    params: Any  # abstract
    updates: Any = None  # the name of the update rule of each that has one of its own, else "": those cross exactly

    @property
    def axis(self) -> str:
        """The mesh axis that is crossed."""
        return self.compression.axis

    @property
    def inside(self) -> tuple[str, ...]:
        """All other mesh axes that have several devices."""
        return tuple(axis for axis, size in self.layout.mesh.shape.items() if size > 1 and axis != self.axis)

    @cached_property
    def crossing(self) -> Shardings:
        """The layout in which each gradient crosses: split over the other axes of the batch, too, where that works."""
        def where(leaf, at_rest):
            for axis in self.layout.rules.batch:
                if axis in self.inside:
                    at_rest = axis_rules.spread(at_rest, leaf.shape, axis)
            return at_rest
        return jax.tree.map(where, self.params, self.layout.gradients)

    @cached_property
    def parts(self) -> list[tuple[codecs.Codec, tuple[int, ...]]]:
        """The codec of each gradient and the shape of a device's part of it, in the order of the tree's leaves."""
        c, names = self.compression, jax.tree.structure(self.params).flatten_up_to(self.layout.axes)
        settings = {"ratio": c.ratio, "rank": c.rank} | ({"block": c.block} if c.block else {})
        rules = jax.tree.leaves(self.updates) or [""] * len(names)
        found = []
        for leaf, where, axes, rule in zip(*map(jax.tree.leaves, (self.params, self.crossing)), names, rules,
                                           strict=True):
            entries = (*where.spec, *(None,) * (len(leaf.shape) - len(where.spec)))
            shape = tuple(size // axis_rules.shards(entry, self.layout.mesh)
                          for size, entry in zip(leaf.shape, entries, strict=True))
            found.append((codecs.for_parameter("exact" if rule else c.method, settings, axes, shape), shape))
        return found

    # ---------------------------------------------------------------------------------------------- what is remembered
    def begin(self, params: Params) -> PyTree:
        """Return what is remembered at step 0: no errors."""
        del params  # it depends on their shapes only
        others, peers = self.layout.mesh.size // self.layout.mesh.shape[self.axis], self.layout.mesh.shape[self.axis]
        def whole(leaf, part):
            codec, shape = part
            state = codec.begin(shape)
            return {key: jnp.zeros((peers, *leaf.shape), jnp.float32) if key == "error" else
                    jnp.broadcast_to(x, (others if key == "right" else 1, *x.shape)) for key, x in state.items()}
        return self._tree([whole(*each) for each in zip(jax.tree.leaves(self.params), self.parts, strict=True)])

    @cached_property
    def shardings(self) -> Shardings:
        """The shardings of the state that is kept between exchanges."""
        specs = jax.tree.map(lambda where, state: {key: self._spec(key, where.spec) for key in state},
                             self.crossing, jax.eval_shape(self.begin, None))
        return jax.tree.map(lambda spec: NamedSharding(self.layout.mesh, spec), specs)

    def _spec(self, key: str, crossing: P) -> P:
        return {"error": P(self.axis if self.layout.mesh.shape[self.axis] > 1 else None, *crossing),
                "right": P(self.inside or None)}.get(key, P())

    def _tree(self, leaves: Sequence[PyTree]) -> PyTree:
        return jax.tree.structure(self.params).unflatten(leaves)

    # ---------------------------------------------------------------------------------------------------- the gradient
    @property
    def _rows(self) -> P:
        """The layout of a batch's rows over the axis; JAX 0.12 tells an axis of one device from none."""
        return axis_rules.without_trivial_axes(P(self.axis), self.layout.mesh)

    def of(self, gradient: StateGradient) -> StateGradient:
        """Return the gradient of the whole batch, made of that which each peer computes of its own examples.

        Its further sums have what is to be remembered, as "extras".
        """
        if self.zero_stage:
            return self._scattered(gradient)
        manual = jax.tree.map(lambda s: P(*(entry if entry == self.axis else None for entry in s.spec[:1])),
                              self.shardings)

        def on_peer(state, remembered, batch):
            sums, grads = gradient(state, batch)
            grads = jax.tree.map(lambda g, where: jax.reshard(g, where.spec), grads, self.crossing)
            specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (sums, grads, remembered))
            sums, grads, remembered = activations.manual_region(self._exchanged, specs, specs)(sums, grads, remembered)
            grads = jax.tree.map(lambda g, where: jax.reshard(g, where.spec), grads, self.layout.gradients)
            return sums, grads, remembered

        def of_state(state: TrainState, batch: PyTree) -> tuple[LossSums, Params]:
            across = jax.shard_map(on_peer, in_specs=(P(), manual, self._rows), out_specs=(P(), P(), manual),
                                   axis_names={self.axis}, check_vma=False)
            (total, weight, further), grads, remembered = across(
                replace(state, opt_state=(), extras={}), state.extras[NAME], batch)
            return (total, weight, further | {"extras": {NAME: remembered}}), grads

        return of_state

    def _scattered(self, gradient: StateGradient) -> StateGradient:
        """Return the gradient whose sum over the axis is left where ZeRO spreads it, by reduce-scatter."""
        def on_peer(state, batch):
            return jax.tree.map(lambda x: x[None], gradient(state, batch))

        def add(sums, grads):
            whole = self._whole(jax.tree.map(lambda x: x[0], sums))
            share = sums[1][0] / jnp.maximum(whole[1], 1e-8)
            return whole, jax.tree.map(lambda g, where: self._sum(g[0].astype(jnp.float32) * share, where.spec), grads,
                                       self.layout.gradients)

        def of_state(state: TrainState, batch: PyTree) -> tuple[LossSums, Params]:
            across = jax.shard_map(on_peer, in_specs=(P(), self._rows), out_specs=P(self.axis),
                                   axis_names={self.axis}, check_vma=False)
            apart = across(replace(state, opt_state=(), extras={}), batch)
            specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, apart)
            whole = jax.tree.map(lambda spec: P(*spec[1:]), specs[0]), jax.tree.map(
                lambda where: where.spec, self.layout.gradients)
            return activations.manual_region(add, specs, whole)(*apart)

        return of_state

    def _whole(self, sums: LossSums) -> LossSums:
        return further_sums.by_kind(lambda x: lax.psum(x, self.axis), lambda x: lax.pmax(x, self.axis), sums)

    def _sum(self, g: jax.Array, spec: P) -> jax.Array:
        at = [d for d, entry in enumerate(spec) if self.axis in axis_rules.axes_of(entry)]
        return lax.psum_scatter(g, self.axis, scatter_dimension=at[0], tiled=True) if at else lax.psum(g, self.axis)

    def _exchanged(self, sums: LossSums, grads: Params, remembered: PyTree) -> tuple[LossSums, Params, PyTree]:
        """Return, on one device, the sums of all peers, the mean gradient by weight, and the state to be kept."""
        whole = self._whole(sums)
        share = sums[1] / jnp.maximum(whole[1], 1e-8)
        given = [g.astype(jnp.float32) * share for g in jax.tree.leaves(grads)]
        states = [{key: x[0] for key, x in state.items()}
                  for state in jax.tree.structure(grads).flatten_up_to(remembered)]
        found, after = exchange.all_reduce([codec for codec, _ in self.parts], given, states, self.axis)
        # Not every codec passes on what is not finite, and the step must be left out then.
        wrong = lax.pmax(jnp.any(jnp.stack([~jnp.isfinite(g).all() for g in given])).astype(jnp.int32), self.axis)
        found = [g + jnp.where(wrong > 0, jnp.nan, 0.0) for g in found]
        after = [{key: x[None] for key, x in state.items()} for state in after]
        return whole, self._tree(found), self._tree(after)
