"""The training state: its abstract shapes, its shardings, and its initial values, made sharded.

Modules are NNX at rest. They are split once, here; from then on parameters are a plain nested dict with string keys.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import PyTree
from jaxtrain.errors import UserError
from jaxtrain.sharding import axis_rules
from jaxtrain.sharding.axis_rules import AnyMesh, Axes, Names, Rules, Shardings
from jaxtrain.sharding.host_memory import HOST
from jaxtrain.train_step import partition
from jaxtrain.train_step.precision import LossScale
from jaxtrain.train_step.quantized_kernels import SCALES

Params = Any  # a pytree of arrays; of our own models a nested dict with string keys
Batch = dict[str, jax.Array]  # arrays by name; the first dimension is the row
GivenBatch = Mapping[str, jax.Array | np.ndarray | jax.ShapeDtypeStruct]  # a batch before it is placed, or abstract
Metrics = dict[str, jax.Array]
PRNGKey = jax.Array  # as jax.random.key makes it
AVERAGE = "ema"  # in a state's extras: the moving average of the trained parameters


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a run carries from step to step; every array of it is checkpointed."""

    step: Any  # optimizer steps taken or skipped: the whole data state
    params: Params
    opt_state: PyTree
    skipped: Any  # steps whose update was left out: not finite, or a spike
    loss_scale: LossScale | None = None
    extras: dict[str, PyTree] = field(default_factory=dict)  # further named state, such as the recent losses
    frozen: Params = field(default_factory=dict)  # parameters that are not trained, in their own dtype

    @property
    def all_params(self) -> Params:
        """Trained and frozen parameters as one tree: what a loss takes."""
        return partition.merge(self.params, self.frozen)

    @property
    def averaged(self) -> "TrainState":
        """Return this state with the moving average in place of the trained parameters: for evaluation only."""
        if AVERAGE not in self.extras:
            raise UserError("train.ema_decay", "the state keeps no average of its parameters", "set it, such as 0.999")
        params = jax.tree.map(lambda p, average: average.astype(p.dtype), self.params, self.extras[AVERAGE])
        return replace(self, params=params)


# How to make each entry of a state's `extras` from the trained parameters, at step 0 or for a checkpoint that lacks it.
Extras = Mapping[str, Callable[[Params], PyTree]]


@dataclass(frozen=True)
class Skeleton:
    """A module without its numbers."""

    graphdef: nnx.GraphDef
    variables: dict[tuple, nnx.Variable]  # path -> variable holding an abstract or old value

    @classmethod
    def of(cls, module: nnx.Module) -> "Skeleton":
        """The skeleton of a concrete or abstract module whose only state is `nnx.Param`."""
        graphdef, params, rest = nnx.split(module, nnx.Param, ...)
        if leaves := nnx.to_flat_state(rest):
            path, variable = next(iter(leaves))
            raise UserError("/".join(map(str, path)), f"the module keeps state of type {type(variable).__name__}",
                            "train a module whose state is all nnx.Param: no batch statistics, and dropout whose key "
                            "comes with the call, nnx.Dropout(rate)(x, rngs=nnx.Rngs(key))")
        return cls(graphdef, dict(nnx.to_flat_state(params)))

    def params(self, get: Callable[[nnx.Variable], Any] = lambda v: v.get_value()) -> dict:
        """A nested dict with string keys of what `get` takes from each variable: its value by default."""
        tree: dict = {}
        for path, variable in self.variables.items():
            *parents, last = map(str, path)
            node = tree
            for key in parents:
                node = node.setdefault(key, {})
            node[last] = get(variable)
        return tree

    def axes(self) -> dict:
        """The logical names of every parameter, or None for one that has none."""
        return self.metadata("axes")

    def metadata(self, key: str, default: Any = None) -> dict:
        """One entry of the metadata of every parameter, such as "compute_dtype" or "update" (models.layers.param)."""
        return self.params(lambda variable: variable.get_metadata().get(key, default))

    def merge(self, params: dict) -> Any:
        """The module with these parameters. Parts of it that `params` lacks cannot be computed with."""
        def value(path, variable):
            node = params
            for key in map(str, path):
                if key not in node:
                    return variable.get_value()
                node = node[key]
            return node
        flat = [(path, variable.replace(value(path, variable))) for path, variable in self.variables.items()]
        return nnx.merge(self.graphdef, nnx.from_flat_state(flat))


@dataclass(frozen=True)
class Layout:
    """The layout of everything: trees of shardings that match a `TrainState`."""

    mesh: AnyMesh
    rules: Rules
    axes: Axes  # the logical names that the trained parameters were laid out by
    state: TrainState
    gradients: Shardings
    frozen_axes: Axes = field(default_factory=dict)
    layerwise: bool = False  # the optimizer's state is updated one layer at a time (UpdateByLayer)

    def batch(self, ndim: int) -> NamedSharding:
        """Return the sharding of a batch array whose first dimension is the example."""
        spec = axis_rules.without_trivial_axes(P(self.rules.batch), self.mesh)
        return NamedSharding(self.mesh, P(*spec, *(None,) * (ndim - 1)))

    @property
    def offloads(self) -> bool:
        """Whether the optimizer's state lies in the hosts' memory between steps."""
        return any(where.memory_kind == HOST for where in jax.tree.leaves(self.state.opt_state))

    @property
    def batch_shards(self) -> int:
        """Into how many pieces a batch is cut."""
        return axis_rules.shards(self.rules.batch, self.mesh)


def abstract_state(params: Params, optimizer: optax.GradientTransformation, loss_scaling: bool,
                   frozen: Params | None = None) -> TrainState:
    """Return shapes and dtypes of the state without extras; nothing is allocated."""
    return jax.eval_shape(lambda p, f: initial_state(p, optimizer, loss_scaling, None, f), params, frozen)


def initial_state(params: Params, optimizer: optax.GradientTransformation, loss_scaling: bool,
                  extras: Extras | None = None, frozen: Params | None = None) -> TrainState:
    """Step 0 around given parameters."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, optimizer.init(params), zero, LossScale.initial() if loss_scaling else None,
                      {name: make(params) for name, make in (extras or {}).items()}, frozen or {})


def make_layout(abstract: TrainState, axes: Axes, rules: Rules, mesh: AnyMesh, zero_stage: int = 0, *,
                pipeline: bool = False, offload: bool = False, layerwise: bool = False,
                frozen_axes: Axes | None = None) -> Layout:
    """Shardings for a state whose parameters have logical names `axes` (a matching tree of tuples or None).

    ZeRO over the data axis: stage 1 spreads the optimizer's state, 2 the gradients too, 3 the parameters as well.
    `offload`: the optimizer's state lies in the hosts' memory, which implies `layerwise`: it is updated one layer at a
    time. `frozen_axes`: logical names of the frozen parameters.
    """
    replicated = NamedSharding(mesh, P())

    def at_rest(tree, axes):
        """Return paths and leaves, the structure, their names and shardings."""
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
        names = treedef.flatten_up_to(axes)
        found = [_parameter(path, leaf, name, rules, mesh) for (path, leaf), name in zip(flat, names, strict=True)]
        if pipeline:  # what is not a stage's own is not on every stage either, at rest
            # Layers that all stages compute are taken one by one.
            found = [axis_rules.spread(s, leaf.shape, "stage", first=int("every_layer" in (name or ())))
                     for s, (_, leaf), name in zip(found, flat, names, strict=True)]
        return flat, treedef, names, found

    flat, treedef, names, base = at_rest(abstract.params, axes)
    frozen_flat, frozen_treedef, frozen_names, frozen = at_rest(abstract.frozen, frozen_axes or {})
    if zero_stage >= 3:
        frozen = [axis_rules.spread(s, leaf.shape, first=int(not {"layers", "every_layer"}.isdisjoint(name or ())))
                  for s, (_, leaf), name in zip(frozen, frozen_flat, frozen_names, strict=True)]
    # Layers are taken from their stack one by one: of parameters always, of the optimizer's state if it is elsewhere.
    split = [axis_rules.spread(s, leaf.shape, first=int("layers" in (name or ())))
             for s, (_, leaf), name in zip(base, flat, names, strict=True)]
    layerwise = layerwise or offload
    wide = split if layerwise else [axis_rules.spread(s, leaf.shape) for s, (_, leaf) in zip(base, flat, strict=True)]
    by_path = {path: (leaf.shape, wide[i] if zero_stage >= 1 else base[i]) for i, (path, leaf) in enumerate(flat)}

    def optimizer_leaf(path, leaf):
        # optax keeps per-parameter state in trees shaped like the parameters: the path ends with the parameter's.
        owner = next((by_path[path[i:]] for i in range(len(path) + 1) if path[i:] in by_path), None)
        where = replicated if owner is None else _like(leaf.shape, *owner, mesh)
        return where.with_memory_kind(HOST) if offload and leaf.ndim else where

    params = treedef.unflatten(split if zero_stage >= 3 else base)
    loss_scale = jax.tree.map(lambda _: replicated, abstract.loss_scale)
    state = TrainState(
        replicated, params, jax.tree_util.tree_map_with_path(optimizer_leaf, abstract.opt_state), replicated,
        loss_scale, {}, frozen_treedef.unflatten(frozen))
    return Layout(mesh, rules, axes, state, treedef.unflatten(wide if zero_stage >= 2 else base), frozen_axes or {},
                  layerwise)


def with_extras(makers: Extras, shardings: Mapping[str, Shardings], abstract: TrainState,
                layout: Layout) -> tuple[TrainState, Layout]:
    """Return a state and its layout with these entries of `extras`.

    `shardings`: of those that lie neither as the parameters do, as trees of their shapes do by themselves, nor whole on
    every device.
    """
    made = {name: jax.eval_shape(make, abstract.params) for name, make in makers.items()}
    whole = jax.tree.map(lambda _: NamedSharding(layout.mesh, P()), made)
    where = _like_parameters(made, whole, abstract.params, layout.state.params) | dict(shardings)
    return (replace(abstract, extras=abstract.extras | made),
            replace(layout, state=replace(layout.state, extras=layout.state.extras | where)))


def _like_parameters(extras: dict[str, PyTree], shardings: dict[str, Shardings], abstract: Params,
                     params: Shardings) -> dict[str, Shardings]:
    """Return shardings of extra state: those of the parameters, for what has their tree and shapes; else as given."""
    def matches(tree: PyTree) -> bool:
        return (jax.tree.structure(tree) == jax.tree.structure(abstract)
                and jax.tree.map(jnp.shape, tree) == jax.tree.map(jnp.shape, abstract))
    return jax.tree.map(lambda tree, where: params if matches(tree) else where, extras, shardings, is_leaf=matches)


def with_shardings(abstract: PyTree, shardings: Shardings) -> PyTree:
    """Abstract arrays that know where they live: what lowering and restoring want."""
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)


def _parameter(path, leaf, names: Names | None, rules: Rules, mesh: AnyMesh) -> NamedSharding:
    what = jax.tree_util.keystr(path, simple=True, separator="/")
    if names is not None and what.endswith(f"/{SCALES}"):  # few blocks need not divide as the dimension does
        spec = (*rules.spec(names), *(None,) * len(names))
        names = tuple(name if size % axis_rules.shards(entry, mesh) == 0 else None
                      for name, size, entry in zip(names, leaf.shape, spec, strict=False))
    if names is not None:
        return axis_rules.parameter_sharding(names, leaf.shape, rules, mesh, what)
    return axis_rules.spread(NamedSharding(mesh, P(*(None,) * len(leaf.shape))), leaf.shape, axis="fsdp")


def _like(shape, owner_shape, owner: NamedSharding, mesh: AnyMesh) -> NamedSharding:
    """Optimizer state lies as its parameter: in each dimension, if it has as many, or in those of the same size."""
    spec = (*owner.spec, *(None,) * (len(owner_shape) - len(owner.spec)))
    if len(shape) == len(owner_shape):
        entries = spec
    else:
        rest = iter(zip(owner_shape, spec, strict=True))
        entries = [next((entry for owner_size, entry in rest if owner_size == size), None) for size in shape]
    return NamedSharding(mesh, P(*(entry if size % axis_rules.shards(entry, mesh) == 0 else None
                                   for size, entry in zip(shape, entries, strict=True))))
