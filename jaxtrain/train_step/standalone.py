"""A sharded, compiled train step for a module and a loss of one's own: no config, and no sharding in the user's code.

    mesh = jt.make_mesh(data=2, tensor=2)
    step = jt.make_train_step(loss_fn, optax.adamw(1e-3), mesh=mesh, rules=jt.rules("fsdp_tp"), accumulation=4)
    state = step.init(lambda: MyModule(rngs=nnx.Rngs(0)))
    state, metrics = step(state, batch)
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.core.meta import AxisMetadata
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from jaxtrain.base import arguments
from jaxtrain.base.annotations import PyTree
from jaxtrain.errors import UserError, nearest
from jaxtrain.sharding import axis_rules, mesh_context
from jaxtrain.sharding.axis_rules import AnyMesh, Axes, Names, Rules, Shardings
from jaxtrain.sharding.mesh import AXES, check_mesh, with_auto_axes
from jaxtrain.train_step import given_params
from jaxtrain.train_step import precision as precisions
from jaxtrain.train_step.compiler_options import Options
from jaxtrain.train_step.gradients import LossSums, StateGradient, make_gradient
from jaxtrain.train_step.hooks import StepHooks, extras_of
from jaxtrain.train_step.settings import StepSettings
from jaxtrain.train_step.sharded_step import ShardedStep
from jaxtrain.train_step.state import (
    Layout,
    Metrics,
    Params,
    PRNGKey,
    Skeleton,
    TrainState,
    abstract_state,
    initial_state,
    make_layout,
)
from jaxtrain.train_step.static_leaves import StaticLeaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighted:
    """The result of a loss function whose examples do not weigh the same, or which returns metrics besides the loss.

    The loss is `total / weight`, over all micro-batches and devices; so is each of `metrics`, which are sums too.
    """

    total: Any
    weight: Any = 1.0
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)


# From a module or pytree, a batch and, with a seed, a key to the mean loss, or to a sum and its weight.
LossFunction = Callable[..., "jax.Array | Weighted"]
HooksOf = Callable[[TrainState, Layout], Sequence[StepHooks]]


def make_train_step(
    loss_fn: LossFunction, optimizer: optax.GradientTransformation, *, mesh: AnyMesh, rules: Rules | None = None,
    axes: Axes | None = None, accumulation: int = 1, clip_norm: float = 0.0, precision: str = "float32",
    zero_stage: int = 0, gather: bool = True, seed: int | None = None, compiler_options: Options | None = None,
) -> "TrainStep":
    """Return a train step for any mesh, with the numbers of one device.

    Args:
        loss_fn: called with the NNX module or the pytree of parameters that `init` was given, and a batch. It returns
            a scalar, the mean over examples of equal weight; or `jt.Weighted(total, weight)`, a sum and what to divide
            it by (say the number of tokens that count, taken as a constant): then micro-batches of unequal weight give
            exactly the gradient of the whole batch. `jt.Weighted(total, weight, {"accuracy": hits})` has further sums,
            which the step divides by the weight and adds to its metrics.
        optimizer: any optax transformation.
        mesh: from `jt.make_mesh`. The compiler finds the shardings between parameters, batch and gradients; where it
            should not, `jt.constrain(x, "batch", "seq", "act_embed")` in the module pins an activation.
        rules: logical axis names to mesh axes, `jt.rules("fsdp_tp")` by default.
        axes: a pytree of tuples of logical names, one name (or None) for each dimension, that matches the parameters
            or their upper levels. Without it an NNX parameter brings its own, `nnx.Param(value, axes=("embed", "mlp"))`
            or Flax's partitioning metadata, and so does a Linen box. What has no names is spread over `fsdp`.
        accumulation: micro-batches in a step.
        clip_norm: the norm above which the gradient is scaled down; 0: never.
        precision: the dtype the parameters are cast to for `loss_fn`: "float32", "bfloat16", "float16" (with a dynamic
            loss scale) or "auto". The state keeps their own. The batch is left as it is.
        zero_stage: over the mesh axis `data`, spread the optimizer's state (1), gradients (2), parameters (3).
        gather: give `loss_fn` each parameter whole over the mesh axes that split the batch, so that activations stay
            split as the batch is. A module that scans over a stack of layers would have the whole stack gathered at
            once: where that is too large give False and `jt.constrain` the activations between layers.
        seed: call `loss_fn(x, batch, key)` with a key for dropout and the like, which follows from the seed, the number
            of the step and the micro-batch: a run that resumes draws the same numbers.
        compiler_options: XLA's options for the step beside jaxtrain's preset for the platform; "" leaves one to XLA.
    """
    arguments.is_function("loss_fn", loss_fn, "give a function of the model and a batch that returns the mean loss")
    arguments.is_optimizer(optimizer)
    arguments.is_bool("gather", gather)
    check_mesh(mesh, required=True)
    if not isinstance(rules, Rules | None):
        raise UserError("rules", f"{rules!r} is not a table of rules", "make it by jt.rules(...)")
    known = ("auto", *precisions.DTYPES)
    if precision not in known:
        raise UserError("precision", f"{precision!r} is not supported", nearest(str(precision), known))
    if not isinstance(accumulation, int | np.integer | float) or accumulation != int(accumulation) or accumulation < 1:
        raise UserError("accumulation", f"{accumulation} is not a number of micro-batches", "give 1 or more")
    if zero_stage not in (0, 1, 2, 3):
        raise UserError("zero_stage", f"{zero_stage} is not supported", "give 0, 1, 2 or 3")
    if not isinstance(clip_norm, int | float | np.number) or not clip_norm >= 0:
        raise UserError("clip_norm", f"{clip_norm} is not a norm", "give a number above 0, or 0 for no clipping")
    if seed is not None:
        arguments.is_seed("seed", seed)
    if compiler_options is not None:
        arguments.is_mapping("compiler_options", compiler_options, 'give a dict such as {"xla_option": True}')
    platform = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else "abstract"
    settings = StepSettings(
        optimizer=optimizer, mesh=with_auto_axes(mesh), rules=rules or axis_rules.rules(),
        accumulation=int(accumulation),
        clip_norm=clip_norm, precision=precisions.resolve(precision, platform), zero_stage=zero_stage, seed=seed,
        compiler_options=compiler_options or {})
    return TrainStep(OwnLoss(loss_fn, axes, gather), settings)


@dataclasses.dataclass(frozen=True)
class OwnLoss:
    """A loss function of the user's, and how it is given its parameters."""

    function: LossFunction
    axes: Axes | None = None  # the logical names of the parameters, or of their upper levels
    gather: bool = True  # each parameter is whole over the axes that split the batch


class TrainStep:
    """`state, metrics = step(state, batch)`: made by `make_train_step`, given its parameters by `init`."""

    def __init__(self, own: OwnLoss, settings: StepSettings, hooks_of: HooksOf = lambda abstract, layout: ()):
        """Compute nothing yet. `hooks_of`: makes the hooks of the step from its state and layout without theirs."""
        self.own, self.settings, self._hooks_of = own, settings, hooks_of
        self._plan: _Plan | None = None

    # ------------------------------------------------------------------------------------------------- the state
    def init(self, x: PyTree) -> TrainState:
        """The state at step 0 around an NNX module or a pytree of parameters, which is copied and stays usable.

        `x` may be a function without arguments that returns either: it is compiled with sharded outputs, so that
        nothing is ever whole on one device. Leaves of a pytree that are not arrays, such as an Equinox module's
        functions and rates, are not parameters; `loss_fn` gets them as they are.
        """
        abstract = self.abstract(x)
        c = self.settings
        finish = partial(initial_state, optimizer=c.optimizer, loss_scaling=c.precision == "float16",
                         extras=extras_of(self.sharded.hooks))
        with mesh_context.use(c.mesh, c.rules), nnx.use_eager_sharding(False):
            if _is_function(x):
                return jax.jit(lambda: finish(_parameters(x())), out_shardings=self.layout.state)()
            shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.params)
            params = jax.tree.map(jax.device_put, _parameters(x), shardings)
            # Not donated: what lay in place already is still the caller's, and the state must be a copy of it.
            return jax.jit(finish, out_shardings=self.layout.state)(params)

    def abstract(self, x: PyTree) -> TrainState:
        """Return the result of `init(x)` as shapes, dtypes and shardings, nothing allocated."""
        plan = self._make_plan(x)
        if self._plan is None or self._plan.identity != plan.identity:  # equal plans run the same executables
            self._plan = plan
            self._warn_of_idle_axes(plan.sharded.layout)
        return plan.sharded.abstract

    @property
    def sharded(self) -> ShardedStep:
        """The part that compiles the step and places its batches, once `init` or `abstract` has had the parameters."""
        return self._planned.sharded

    @property
    def layout(self) -> Layout:
        """The shardings of the state, the gradients and the batch."""
        return self.sharded.layout

    @property
    def computation(self) -> "OwnComputation":
        """The functions that the step is made of."""
        return self._planned.computation

    @property
    def skeleton(self) -> Skeleton | None:
        """The NNX module without its numbers; None for a pytree."""
        return self.computation.skeleton

    @property
    def name(self) -> str:
        """The class of the module or pytree that is trained."""
        return self._planned.name

    def module(self, state: TrainState, dtype: DTypeLike | None = None) -> PyTree:
        """The NNX module (or pytree) with this state's parameters, whole on one device: to call eagerly, to export.

        Args:
            dtype: that of its floating-point parameters; None leaves each in its own.
        """
        return self.computation.restore(given_params.on_one_device(given_params.of_state(state).params, dtype))

    def report(self, file: TextIO | None = None) -> None:
        """Print what is placed where: path, shape, logical names, partition spec, bytes per device, and totals."""
        self.sharded.report(file)

    # -------------------------------------------------------------------------------------------------- the step
    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """One optimizer step on a batch of arrays whose first dimension is the example.

        `state` is donated: use the returned one. A gradient that is not finite leaves the parameters as they were and
        counts as skipped. Metrics: `loss`, `grad_norm` (before clipping), `skipped`; with float16 `loss_scale`.
        """
        return self.sharded(state, batch)

    def adopt(self, state: TrainState) -> TrainState:
        """Move a state that lives on another mesh to this step's."""
        return self.sharded.adopt(state)

    def compiled(self, batch: PyTree) -> jax.stages.Compiled:
        """The executable for batches of this shape, compiled when first wanted; takes (state, placed batch)."""
        return self.sharded.compiled(batch)

    def lower(self, batch: PyTree) -> jax.stages.Lowered:
        """The step, traced and lowered for a batch of arrays or of `jax.ShapeDtypeStruct`; uses no device memory."""
        return self.sharded.lower(batch)

    def value_and_grad(self, state: TrainState, batch: PyTree) -> tuple[jax.Array, Params]:
        """The mean loss of a batch, and its gradient with respect to the parameters, before clipping."""
        return self.sharded.value_and_grad(state, batch)

    def evaluate(self, state: TrainState, batch: PyTree) -> tuple[jax.Array, jax.Array]:
        """(total, weight) of the loss on a batch: add them up over batches, then divide. A mean loss has weight 1.

        A loss that takes a key gets None: nothing is dropped.
        """
        return self.sharded.evaluate(state, batch)[:2]

    def place(self, batch: PyTree) -> PyTree:
        """Spread a batch over the mesh. With several processes each gives the whole batch, or arrays placed already."""
        return self.sharded.place(batch)

    # --------------------------------------------------------------------------------------------------- innards
    @property
    def _planned(self) -> "_Plan":
        if self._plan is None:
            raise UserError("train step", "it has no parameters yet", "call its init(...) or abstract(...) first")
        return self._plan

    def _make_plan(self, x: PyTree) -> "_Plan":
        static, x = self._shapes(x)
        # Mesh axes speak for themselves where Flax's metadata names them.
        rules = Rules({axis: (axis,) for axis in AXES} | dict(self.settings.rules.table))
        skeleton = _without_arrays(Skeleton.of(x)) if isinstance(x, nnx.Module) else None
        params = jax.tree.map(_abstract, x if skeleton is None else skeleton.params())
        if not jax.tree.leaves(params):
            raise UserError("init", "it was given no parameters", "give a module, a pytree of arrays or a function")
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                what = jax.tree_util.keystr(path, simple=True, separator="/") or "init"
                raise UserError(what, f"an array of {leaf.dtype} has no gradient",
                                "give init only what is trained; loss_fn can close over the rest")
        c = self.settings
        if self.own.axes is not None:
            axes = _spread_names(self.own.axes, params)
        elif skeleton is not None:
            axes = skeleton.params(_names_of_variable)
        else:
            axes = _spread_names(jax.tree.map(_names_of_box, params, is_leaf=_is_box), params)
        abstract = abstract_state(params, c.optimizer, c.precision == "float16")
        layout = make_layout(abstract, axes, rules, c.mesh, c.zero_stage)
        computation = OwnComputation(self.own, c, layout, skeleton, static)
        return _Plan(type(x).__qualname__, computation,
                     ShardedStep.of(c, computation, abstract, layout, self._hooks_of(abstract, layout)))

    @staticmethod
    def _shapes(x: PyTree) -> tuple[StaticLeaves | None, Params]:
        """Return the static leaves of a pytree, and what is trained: of a function's result, as shapes."""
        if not _is_function(x):
            return (None, x) if isinstance(x, nnx.Module) else StaticLeaves.split(x)
        arguments.is_function("model", x, "give a function without arguments, as lambda: Module(rngs=nnx.Rngs(0))", 0)
        found = None

        def trained():
            nonlocal found
            made = x()
            found, made = (None, made) if isinstance(made, nnx.Module) else StaticLeaves.split(made)
            return made

        with nnx.use_eager_sharding(False):  # Flax would take the logical names for mesh axes
            shapes = nnx.eval_shape(trained)
        return found, shapes

    def _warn_of_idle_axes(self, layout: Layout) -> None:
        used = {axis for leaf in jax.tree.leaves((layout.state.params, layout.batch(1)))
                for entry in leaf.spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}
        for axis, size in self.settings.mesh.shape.items():
            if size > 1 and axis not in used:
                warnings.warn(f"mesh axis {axis}={size}: no parameter is split over it, so its devices repeat the same "
                              "work unless loss_fn splits something; give the parameters logical axis names",
                              stacklevel=4)


@dataclasses.dataclass(frozen=True)
class OwnComputation:
    """The computation of a step with a loss function of the user's (`sharded_step.Computation`)."""

    own: OwnLoss
    settings: StepSettings
    layout: Layout
    skeleton: Skeleton | None  # of an NNX module; None for a pytree, which is its own
    static: StaticLeaves | None  # of a pytree that has any

    @property
    def dtypes(self) -> None:
        """None: all parameters compute in the dtype of the step."""

    @property
    def updates(self) -> None:
        """None: no parameter has an update rule of its own."""

    def gradient(self, layout: Layout) -> StateGradient:
        """Return the gradient of a state's parameters."""
        c = self.settings
        return make_gradient(self.weighted_loss, layout, accumulation=c.accumulation, precision=c.precision,
                             seed=c.seed)

    def evaluation(self, params: Params, batch: PyTree) -> LossSums:
        """Return what `weighted_loss` returns; a loss that takes a key gets None."""
        return self.weighted_loss(params, batch)

    def metrics(self, sums: dict[str, Any]) -> Metrics:
        """Return the further sums, divided by the weight of the loss."""
        return {name: value / jnp.maximum(sums["weight"], 1e-8) for name, value in sums["metrics"].items()}

    def restore(self, params: Params) -> PyTree:
        """Return the module or pytree with these parameters."""
        if self.skeleton is not None:
            return self.skeleton.merge(params)
        return params if self.static is None else self.static.merge(params)

    def weighted_loss(self, params: Params, batch: PyTree,
                      key: PRNGKey | None = None) -> tuple[jax.Array, jax.Array, dict]:
        """Return the summed loss of a batch, the weight to divide it by, and the further sums of `loss_fn`."""
        if self.own.gather:
            # Left to itself the compiler may split activations as the weights are, and move both about: measured on an
            # fsdp=8 transformer, 7 times the traffic.
            params = jax.tree.map(jax.lax.with_sharding_constraint, params, self._in_use)
        result = self.own.function(self.restore(params), batch, *(() if self.settings.seed is None else (key,)))
        if isinstance(result, tuple) and len(result) == 2 and all(map(_is_scalar, result)):
            raise UserError("loss_fn", "it returned a pair, which may be a sum and its weight or a mean and a metric",
                            'return jt.Weighted(total, weight), or jt.Weighted(mean, metrics={"name": value})')
        found = result if isinstance(result, Weighted) else Weighted(result)
        if not all(map(_is_scalar, (found.total, found.weight, *found.metrics.values()))):
            raise UserError("loss_fn", f"it returned {_describe(result)}",
                            "return a scalar mean loss, or jt.Weighted(total, weight, metrics) of scalars")
        total, weight = (jnp.asarray(x).astype(jnp.float32) for x in (found.total, found.weight))
        sums = {name: jnp.asarray(x).astype(jnp.float32) for name, x in found.metrics.items()}
        weight, sums = jax.lax.stop_gradient((weight, sums))
        return total, weight, {"metrics": sums, "weight": weight}

    @property
    def _in_use(self) -> Shardings:
        """The parameters' layout at rest less the axes that split the batch."""
        c = self.settings

        def whole(at_rest):
            entries = [(entry,) if isinstance(entry, str) else entry or () for entry in at_rest.spec]
            kept = [tuple(axis for axis in entry if axis not in c.rules.tokens) or None for entry in entries]
            return NamedSharding(c.mesh, P(*kept))
        return jax.tree.map(whole, self.layout.state.params)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The compiled parts that follow from the parameters' shapes and names."""

    name: str  # of the class of what is trained
    computation: OwnComputation
    sharded: ShardedStep

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal plans run the same executables."""
        leaves, treedef = jax.tree.flatten(self.sharded.abstract)
        made = self.computation
        return made.skeleton and made.skeleton.graphdef, made.static, treedef, leaves


def _is_function(x: object) -> bool:
    # A module or a pytree may be callable too, but is not a leaf.
    return callable(x) and not isinstance(x, nnx.Module) and jax.tree_util.all_leaves([x])


def _parameters(x: PyTree) -> Params:
    return Skeleton.of(x).params() if isinstance(x, nnx.Module) else StaticLeaves.split(x)[1]


def _without_arrays(skeleton: Skeleton) -> Skeleton:
    """Return the skeleton with shapes for values, so that the caller's arrays can be freed."""
    shapes = {path: v.replace(_abstract(v.get_value())) for path, v in skeleton.variables.items()}
    return dataclasses.replace(skeleton, variables=shapes)


def _abstract(x: ArrayLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def _is_scalar(x: object) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic | int | float) and jnp.shape(x) == ()


def _describe(x: object) -> str:
    if isinstance(x, tuple):
        return f"({', '.join(map(_describe, x))})"
    if isinstance(x, Weighted):
        return f"Weighted({', '.join(map(_describe, (x.total, x.weight, *x.metrics.values())))})"
    return f"an array of shape {x.shape}" if hasattr(x, "shape") else f"a {type(x).__name__}"


# ------------------------------------------------------------------------------------------------- logical names
def _names_of_variable(variable: nnx.Variable) -> Names | None:
    """Our own metadata, else Flax's, which may leave out trailing dimensions."""
    metadata = variable.get_metadata()
    if "axes" in metadata:
        return metadata["axes"]
    found = next((metadata[key] for key in ("out_sharding", "sharding_names", "sharding") if metadata.get(key)), None)
    found = found.spec if isinstance(found, NamedSharding) else found
    if not isinstance(found, tuple | list | P):
        return None
    return (*found, *(None,) * (jnp.ndim(variable.get_value()) - len(found)))


def _is_box(x: object) -> bool:
    return isinstance(x, AxisMetadata)


def _names_of_box(x: object) -> Names | None:
    return tuple(x.names) if _is_box(x) and getattr(x, "names", None) else None


def _spread_names(axes: Axes | None, params: Params) -> Axes:
    """The names of every parameter, from a tree that matches the parameters' or its upper levels."""
    def is_names(x):
        return x is None or (isinstance(x, tuple) and all(name is None or isinstance(name, str) for name in x))

    def spread(names, part):
        if isinstance(part, tuple) and not any(names or ()):  # parameters in a tuple, none of which has names
            names = None
        return jax.tree.map(lambda _: names, part)

    try:
        return jax.tree.map(spread, axes, params, is_leaf=is_names)
    except (ValueError, TypeError):
        raise UserError("axes", "its structure is not that of the parameters",
                        "give a tree of tuples of names that matches them, or their upper levels") from None
