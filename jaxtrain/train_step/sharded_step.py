"""One train step on a mesh: where its state lives, how it is traced and compiled, and how batches reach it.

`Run` and `TrainStep` both hold a `ShardedStep`. What a config's model and a model of one's own differ in is the
`Computation` that it is made of.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxtrain.base.annotations import PyTree
from jaxtrain.errors import UserError, tell
from jaxtrain.sharding import mesh_context, products
from jaxtrain.sharding.axis_rules import AnyMesh, Rules
from jaxtrain.train_step import partition, precision
from jaxtrain.train_step.compiler_options import compiled, compiler_options
from jaxtrain.train_step.gradients import LossSums, StateGradient
from jaxtrain.train_step.hooks import StepHooks
from jaxtrain.train_step.settings import StepSettings
from jaxtrain.train_step.state import Layout, Metrics, Params, TrainState, with_extras, with_shardings
from jaxtrain.train_step.step import Step, make_step


class Computation(Protocol):
    """The functions of parameters and a batch that a step is made of; all of them are traced."""

    @property
    def dtypes(self) -> PyTree:
        """The dtype in which each parameter computes if it is not that of the step, else ""; None: all in the step's.
        """
        ...

    @property
    def updates(self) -> PyTree:
        """The name of the update rule of each trained parameter that has one of its own, else ""; None: none has."""
        ...

    def gradient(self, layout: Layout) -> StateGradient:
        """Return the gradient of a state's trained parameters, before what hooks put around it."""
        ...

    def evaluation(self, params: Params, batch: PyTree) -> LossSums:
        """Return the summed loss, its weight, and further sums if there are any, of parameters as they compute."""
        ...

    def metrics(self, sums: dict[str, Any]) -> Metrics:
        """Return metrics of the further sums of a whole batch."""
        ...


@dataclass(frozen=True, eq=False)
class ShardedStep:
    """A train step laid out on a mesh, and compiled once for each shape of batch."""

    settings: StepSettings
    computation: Computation
    abstract: TrainState  # shapes, dtypes and shardings
    layout: Layout
    hooks: Sequence[StepHooks] = ()
    programs: dict[Any, jax.stages.Compiled] = field(default_factory=dict)  # by their kind and the shape of a batch

    @classmethod
    def of(cls, settings: StepSettings, computation: Computation, abstract: TrainState, layout: Layout,
           hooks: Sequence[StepHooks] = ()) -> "ShardedStep":
        """Return the step whose state has what the hooks add to it."""
        for hook in hooks:
            abstract, layout = with_extras(hook.extra_state(), hook.extra_shardings(layout), abstract, layout)
        return cls(settings, computation, with_shardings(abstract, layout.state), layout, hooks)

    @property
    def mesh(self) -> AnyMesh:
        """The mesh that the state and the batches lie on."""
        return self.layout.mesh

    @property
    def rules(self) -> Rules:
        """The rules by which the traced code resolves logical names."""
        return self.settings.rules

    @cached_property
    def gradient(self) -> StateGradient:
        """The gradient of a state and a batch, with all that hooks put around it."""
        made = self.computation.gradient(self.layout)
        for hook in self.hooks:
            made = hook.around_gradient(made)
        return made

    def make(self) -> Step:
        """Return the pure function (state, batch) -> (state, metrics)."""
        return make_step(self.gradient, self.settings, self.layout, hooks=self.hooks,
                         describe=self.computation.metrics, updates=self.computation.updates)

    def cast(self, params: Params) -> Params:
        """Return trained and frozen parameters in the dtypes in which they compute."""
        dtypes = self.computation.dtypes
        own = None if dtypes is None else partition.like(dtypes, params)
        return precision.cast(params, self.settings.precision, own)

    def evaluation(self, params: Params, batch: PyTree) -> LossSums:
        """Return what the computation's evaluation returns, of parameters as they rest; it is traced."""
        return self.computation.evaluation(self.cast(params), batch)

    def check_devices(self) -> None:
        """Refuse to go on where the step was made for devices that are not here."""
        if not isinstance(self.mesh, Mesh):
            raise UserError("devices", f"this run was built for {self.mesh.size} devices that are not here: it has "
                            "report() and lower() only", "build it without devices=")

    @property
    def compiler_options(self) -> dict[str, str | bool]:
        """The compiler's options for the platform and the shape of the mesh."""
        return self.options_on(list(self.mesh.devices.flat) if isinstance(self.mesh, Mesh) else [])

    def options_on(self, devices: Sequence[jax.Device]) -> dict[str, str | bool]:
        """Return the compiler's options where the mesh has these devices; none: they are not known."""
        here = devices[0].platform if devices else jax.default_backend()
        c, several = self.settings, len({device.process_index for device in devices}) > 1
        return compiler_options(c.platform or here, c.compiler_options, dict(self.mesh.shape).get("tensor", 1),
                                c.precision == "fp8", c.deterministic, c.hang_limit if several else 0.0)

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Make one optimizer step. `state` is donated: use the returned one."""
        return self.run(self.compiled(batch), state, self.place(batch))

    def run(self, compiled: jax.stages.Compiled, state: TrainState, batch: PyTree) -> Any:
        """Call a compiled step, and refuse a state that it cannot take in one sentence."""
        leaves = jax.tree.leaves(state)
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves):  # XLA for CPU may crash on such arrays
            raise UserError("state", "its memory was donated to an earlier step, so it cannot be used again",
                            "use the returned one: state, metrics = step(state, batch)")
        try:
            return compiled(state, batch)
        except (TypeError, ValueError) as error:
            if jax.tree.structure(state) != jax.tree.structure(self.abstract):
                raise UserError("state", "its parameters or optimizer state are not those of this run",
                                "use a state made by this run's init()") from error
            for (path, x), want in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(self.abstract), strict=True):
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                if (np.shape(x), jnp.result_type(x)) != (want.shape, want.dtype):
                    raise UserError("state", f"{name} is {jnp.result_type(x)}{list(np.shape(x))}, and this run has "
                                    f"{want.dtype}{list(want.shape)}",
                                    "use a state made by this run's init()") from error
                if not isinstance(x, jax.Array) or not x.sharding.is_equivalent_to(want.sharding, x.ndim):
                    raise UserError("state", f"{name} lies on the devices as {getattr(x, 'sharding', 'a host array')}, "
                                    f"and this run wants {want.sharding}",
                                    "move it with adopt(state) of this run") from error
            raise

    def adopt(self, state: TrainState) -> TrainState:
        """Move a state that lives elsewhere, as on another mesh, to where this step wants it."""
        return jax.device_put(state, self.layout.state)

    # --------------------------------------------------------------------------------------------------- compilation
    def compiled(self, batch: PyTree) -> jax.stages.Compiled:
        """Return the step for batches of this shape, compiled when first wanted; it takes (state, placed batch)."""
        return self._once("step", batch, lambda: self.lower(batch))

    def compiled_evaluation(self, batch: PyTree) -> jax.stages.Compiled:
        """Return the evaluation of batches of this shape; it takes (trained and frozen parameters, placed batch)."""
        return self._once("evaluation", batch, lambda: self.lower_evaluation(batch))

    def evaluate(self, state: TrainState, batch: PyTree) -> LossSums:
        """Return what the evaluation of a batch returns: its summed loss and its weight come first."""
        return self.compiled_evaluation(batch)(state.all_params, self.place(batch))

    def value_and_grad(self, state: TrainState, batch: PyTree) -> tuple[jax.Array, Params]:
        """Return the mean loss of a batch, and its gradient with respect to the trained parameters, before clipping."""
        return self.run(self.compiled_gradient(batch), state, self.place(batch))

    def compiled_gradient(self, batch: PyTree) -> jax.stages.Compiled:
        """Return what `value_and_grad` runs for batches of this shape; it takes (state, placed batch)."""
        def mean(state, batch):
            (total, weight, _), grads = self.gradient(state, batch)
            return total / jnp.maximum(weight, 1e-8), jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)

        return self._once("gradient", batch, lambda: jax.jit(mean).lower(
            self.abstract, self.abstract_batch(batch, self.settings.accumulation)))

    def _once(self, name: str, batch: PyTree, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        """Compile a program for batches of this shape when it is first wanted."""
        key = program_key(name, batch)
        if key not in self.programs:
            with self.context():
                self.programs[key] = compiled(lower(), self.compiler_options)
        return self.programs[key]

    def lower(self, batch: PyTree, on: Mesh | None = None) -> jax.stages.Lowered:
        """Return the step, traced and lowered for such a batch, which may be abstract; uses no device memory.

        `on`: the devices to compile for, where the mesh is abstract.
        """
        return self.trace(batch, on).lower(lowering_platforms=self.platforms)

    def lower_evaluation(self, batch: PyTree, on: Mesh | None = None) -> jax.stages.Lowered:
        """Return the evaluation, traced and lowered for such a batch, as `lower` does; call it in `context`."""
        abstract = self.abstract_batch(batch)
        if on is not None:
            abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_mesh(on, x.sharding)),
                                    abstract)
        return jax.jit(self.evaluation).trace(self.abstract.all_params, abstract).lower(
            lowering_platforms=self.platforms)

    @property
    def platforms(self) -> tuple[str, ...] | None:
        """The platform to lower for; None: that of the mesh's devices.

        The devices of an abstract mesh are of no kind: take the one that it stands for, or the one that is here.
        """
        return None if isinstance(self.mesh, Mesh) else (
            self.settings.platform.partition(":")[0] or jax.default_backend(),)

    def trace(self, batch: PyTree, on: Mesh | None = None) -> jax.stages.Traced:
        """Return the step as operations on arrays whose types say where they live."""
        abstract = self.abstract_batch(batch, self.settings.accumulation)
        state = on_mesh(on, self.layout.state)
        with self.context():
            jitted = jax.jit(self.make(), donate_argnums=0, out_shardings=(state, None))
            return jitted.trace(self.abstract, abstract)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Trace what is in this block for the mesh, under the rules and the precision of matrix products."""
        with (mesh_context.use(self.mesh, self.rules, self.settings.platform),
              matmul_precision(self.settings.precision),
              products.in_precision(self.settings.precision, *self.settings.wide_layers)):
            yield

    # --------------------------------------------------------------------------------------------------- batches
    def abstract_batch(self, batch: PyTree, accumulation: int = 1) -> PyTree:
        """Return shapes, dtypes and shardings of a batch, which may be abstract; refuse one that does not divide."""
        leaves = jax.tree.leaves(batch)
        sizes = {np.shape(x)[:1] for x in leaves}
        if len(sizes) != 1 or sizes == {()}:
            raise UserError("batch", f"its {len(leaves)} arrays have first dimensions {sorted(map(list, sizes))}",
                            "make the example the first dimension of each; loss_fn can close over anything else")
        self.check_rows(sizes.pop()[0], accumulation)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(
            np.shape(x), jnp.result_type(x), sharding=self.layout.batch(np.ndim(x))), batch)

    def check_rows(self, rows: int, accumulation: int) -> None:
        """Refuse a number of examples that does not divide over devices and micro-batches."""
        shards = self.layout.batch_shards
        if rows % (accumulation * shards):
            raise UserError("batch", f"{rows} examples do not divide over {shards} batch shards x "
                            f"accumulation={accumulation}", f"make it a multiple of {accumulation * shards}")

    def place(self, batch: PyTree) -> PyTree:
        """Spread a batch over the mesh. With several processes each gives the whole batch, or arrays placed already."""
        def put(x):
            if not isinstance(x, jax.Array) and jax.process_count() > 1:
                x = np.asarray(x, jnp.result_type(x))
                return jax.make_array_from_callback(x.shape, self.layout.batch(x.ndim), lambda index: x[index])
            return jax.device_put(x, self.layout.batch(np.ndim(x)))
        return jax.tree.map(put, batch)

    # --------------------------------------------------------------------------------------------------- report
    def report(self, file: TextIO | None = None) -> None:
        """Print what is placed where: path, shape, logical names, partition spec, bytes per device, and totals."""
        from jaxtrain.train_step.report import report

        tell(report(self.abstract, self.layout), file=file)


def on_mesh(on: Mesh | None, shardings: PyTree) -> PyTree:
    """Return shardings of an abstract mesh as they are on the devices of this one; None: as they are."""
    return shardings if on is None else jax.tree.map(
        lambda s: NamedSharding(on, s.spec, memory_kind=s.memory_kind), shardings)


def program_key(name: str, batch: PyTree) -> Hashable:
    """Return the key in `ShardedStep.programs` of a program for batches of this shape."""
    return name, shape_of(batch)


def shape_of(batch: PyTree) -> tuple[Hashable, ...]:
    """Return what decides which executable a batch needs: its structure, and the shape and dtype of each array."""
    leaves, treedef = jax.tree.flatten(batch)
    if wrong := [x for x in leaves if isinstance(x, str | bytes)]:
        raise UserError("batch", f"it has the text {wrong[0]!r}, which is no array", "give arrays of numbers")
    return treedef, tuple((np.shape(x), jnp.result_type(x)) for x in leaves)


def matmul_precision(precision: str):
    """Return the context in which float32 products are float32: accelerators round them to fewer bits otherwise."""
    return jax.default_matmul_precision("highest" if precision == "float32" else "default")
