"""A run that is to be proven, built again for each layout, and what a few of its steps compute."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxtrain import api
from jaxtrain.base.annotations import AnyArray, JsonMapping, PyTree
from jaxtrain.config.schema import Config
from jaxtrain.plan.estimate import change
from jaxtrain.proof.drawn_layouts import Layout
from jaxtrain.run import Extension, Run
from jaxtrain.train_step.gradients import StateGradient
from jaxtrain.train_step.state import TrainState

GRADIENTS = "gradient of the proof"  # a metric of the step that no objective has

# The kinds of numbers that a step computes, in the order in which each follows from those before.
LOSS, GRADIENT, NORM, UPDATE, OPTIMIZER, EXTRA, FROZEN, COUNTER, METRIC = (
    "loss", "gradient", "norm", "update", "optimizer state", "extra state", "frozen parameter", "counter", "metric")
KINDS = (LOSS, GRADIENT, NORM, OPTIMIZER, UPDATE, EXTRA, FROZEN, COUNTER, METRIC)


class Quantity(NamedTuple):
    """A number or an array that a step computes."""

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return {LOSS: "the loss", NORM: "the norm of the gradient"}.get(self.kind) or (
            f"{'parameter' if self.kind == UPDATE else self.kind} {self.name}" + " after the update" * (
                self.kind == UPDATE))


Quantities = dict[Quantity, np.ndarray]


class _Seen(Extension):
    """Makes the gradient that the optimizer is given one of the metrics, and changes nothing else."""

    def around_gradient(self, gradient: StateGradient) -> StateGradient:
        def seen(state: TrainState, batch: PyTree):
            (total, weight, further), grads = gradient(state, batch)
            of_hooks = further.get("of_hooks", {}) | {GRADIENTS: grads}
            return (total, weight, further | {"of_hooks": of_hooks}), grads
        return seen


@dataclass(frozen=True)
class Subject:
    """All that a run is built from, so that it can be built on other meshes."""

    config: Config
    parts: JsonMapping = field(default_factory=dict)  # further arguments of `jt.build`

    @property
    def own(self) -> bool:
        """Whether the model is one of the user's."""
        return self.parts.get("model") is not None

    def build(self, layout: Layout) -> Run:
        """Return the run on a layout; a `UserError` says why there is none."""
        parts = dict(self.parts)
        parts["extensions"] = [*parts.get("extensions", ()), _Seen()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layouts that waste devices
            return api.build(change(self.config, layout.applied()), devices=jax.devices()[:layout.devices],
                             **parts)


@dataclass(frozen=True)
class Record:
    """The numbers of some steps, each step's apart; and whether copies of one array on several devices were equal."""

    steps: list[Quantities]
    torn: list[list[str]] = field(default_factory=list)  # after each step, arrays of the state whose copies differ


def start_of(run: Run) -> TrainState:
    """Return the state at step 0 on the host."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return jax.device_get(run.init())


def placed(run: Run, start: TrainState) -> TrainState:
    """Return a state of the host where this run wants it, or its own, if that has other arrays."""
    want = jax.tree.leaves(run.abstract)
    same = jax.tree.structure(start) == jax.tree.structure(run.abstract) and all(
        np.shape(x) == y.shape for x, y in zip(jax.tree.leaves(start), want, strict=True))
    return jax.tree.map(jax.device_put, start, run.layout.state) if same else run.init()


def record(run: Run, start: TrainState, batches: Sequence[PyTree],
           between: Callable[[TrainState], TrainState] | None = None) -> Record:
    """Return what a step on each of the batches computes, from this state on.

    `between`: what to make of the state, on the host, before each step but the first.
    """
    state, steps, torn = placed(run, start), [], []
    for n, batch in enumerate(batches):
        if between is not None and n:
            state = placed(run, between(jax.device_get(state)))
        state, metrics = run.step(state, batch)
        jax.block_until_ready(state)  # of many programs at once, CPU devices that share few cores may wait forever
        torn.append(torn_leaves(state))
        steps.append(quantities(jax.device_get(state), jax.device_get(metrics)))
    return Record(steps, torn)


def quantities(state: TrainState, metrics: JsonMapping) -> Quantities:
    """Return by name what a step has computed."""
    found: Quantities = {Quantity(LOSS): np.asarray(metrics["loss"]), Quantity(NORM): np.asarray(metrics["grad_norm"])}
    for kind, tree in ((GRADIENT, metrics[GRADIENTS]), (OPTIMIZER, state.opt_state), (UPDATE, state.params),
                       (EXTRA, state.extras), (FROZEN, state.frozen),
                       (COUNTER, {"step": state.step, "skipped": state.skipped})):
        found |= {Quantity(kind, name): real(leaf) for name, leaf in named(tree)}
    others = {name: x for name, x in metrics.items() if name not in ("loss", "grad_norm", "skipped", GRADIENTS)}
    return found | {Quantity(METRIC, name): real(leaf) for name, leaf in named(others)}


def named(tree: PyTree) -> list[tuple[str, AnyArray]]:
    """Return the leaves of a tree with their paths."""
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def real(x: AnyArray) -> np.ndarray:
    """Return an array of real numbers on the host; both parts of complex ones are in a further dimension."""
    x = np.asarray(x)
    return np.stack([x.real, x.imag], -1) if np.iscomplexobj(x) else x


def torn_leaves(state: TrainState) -> list[str]:
    """Return the arrays of which two devices hold the same part, and not the same numbers."""
    def is_torn(x: jax.Array) -> bool:
        parts: dict[Any, np.ndarray] = {}
        for shard in x.addressable_shards:
            here = np.asarray(shard.data)
            if not np.array_equal(parts.setdefault(f"{shard.index}", here), here, equal_nan=here.dtype.kind in "fc"):
                return True
        return False
    return [name for name, leaf in named(state) if isinstance(leaf, jax.Array) and is_torn(leaf)]


def traced(run: Run, start: TrainState, batch: PyTree) -> tuple[ClosedJaxpr, Callable[[Sequence[AnyArray]], PyTree]]:
    """Return the step as a jaxpr, and what makes a state and metrics of its results."""
    with run.sharded.context():
        closed, shapes = jax.make_jaxpr(run.sharded.make(), return_shape=True)(
            run.abstract, run.sharded.abstract_batch(batch))
    return closed, lambda leaves: jax.tree.unflatten(jax.tree.structure(shapes), leaves)
