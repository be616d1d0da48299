"""One of the two runs that are compared: its recorded folder, or a config; its states and batches, made again."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import jax
import numpy as np

from jaxtrain import api
from jaxtrain.base.annotations import JsonMapping, PyTree
from jaxtrain.bisection.operations import Trace, trace
from jaxtrain.checkpoint import restore, verify
from jaxtrain.config.load import load_config
from jaxtrain.config.schema import Config
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.loading.skipped_batches import SkippedBatches, remaining
from jaxtrain.errors import UserError
from jaxtrain.plan.estimate import change
from jaxtrain.proof.drawn_layouts import AXES, Layout
from jaxtrain.proof.reference import measure
from jaxtrain.proof.trial import GRADIENTS, Subject, named, record, traced
from jaxtrain.proof.wrong_quantities import compare
from jaxtrain.run import Extension, Run
from jaxtrain.runs.recorded_run import RecordedRun
from jaxtrain.train_step.state import TrainState

Shape = tuple[tuple[int, ...], str]
SERIES = ("loss", "grad_norm", "learning_rate")


@dataclass(eq=False)
class Side:
    """A run, of which any step can be made again."""

    name: str
    config: Config
    parts: JsonMapping = field(default_factory=dict)  # further arguments of `jt.build`
    recorded: RecordedRun | None = None
    _state: tuple[int, TrainState] | None = None  # the newest that was made

    @classmethod
    def of(cls, source: "str | Path | Config", name: str, parts: JsonMapping) -> "Side":
        """Take the workdir of a run, or a config."""
        if isinstance(source, Config):
            return cls(name, source, parts)
        recorded = RecordedRun(Path(source).absolute())
        config = load_config(Path(source) / "config.json")
        if (said := recorded.run.get("own_parts")) and not parts:
            raise UserError(f"{source}", f"it was trained with parts of your own ({', '.join(said)})",
                            "call jt.bisect(..., parts=...) with them, as jt.build took them")
        return cls(name, change(config, {f"mesh.{axis}": recorded.run.get("mesh", {}).get(axis, 1) for axis in AXES} | {
            "mesh.auto": False}), parts, recorded)

    def __post_init__(self):
        if self.config.rl.prompts:
            raise UserError(self.name, "its batches are made of the answers of the model as it trains, so that no "
                            "step can be made again by itself", "compare runs on a corpus")

    @property
    def workdir(self) -> Path | None:
        """The folder of the run, if it was recorded."""
        return self.recorded.workdir if self.recorded else None

    @cached_property
    def run(self) -> Run:
        """The run on its own mesh."""
        count = int(np.prod([max(1, getattr(self.config.mesh, axis)) for axis in AXES]))
        if count > jax.device_count():
            raise UserError(self.name, f"its mesh has {count} devices, and there are {jax.device_count()} here",
                            f"set XLA_FLAGS=--xla_force_host_platform_device_count={count} and JAX_PLATFORMS=cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return api.build(self.config, devices=jax.devices()[:count], **self.parts)

    @property
    def placement(self) -> str:
        """Its mesh and layout as text; "": one device and one micro-batch."""
        several = self.run.mesh.size > 1 or self.config.train.accumulation > 1
        return f"{self.layout}" if several else ""

    @property
    def layout(self) -> Layout:
        """Its mesh, and how it lays a step out on it."""
        keys = {f"mesh.{axis}": size for axis, size in self.run.mesh.shape.items() if size > 1}
        return Layout(keys | {"train.accumulation": self.config.train.accumulation,
                              "optimizer.zero_stage": self.config.optimizer.zero_stage})

    @cached_property
    def on_one_device(self) -> Run:
        """The same run on one device, with the gradient among its metrics."""
        return Subject(self.config, self.parts).build(Layout({"train.accumulation": self.config.train.accumulation}))

    @cached_property
    def last(self) -> int:
        """The number of steps that can be compared."""
        return int(self.recorded.step) if self.recorded else self.config.train.steps

    @cached_property
    def lines(self) -> dict[int, dict[str, float]]:
        """The numbers that were recorded after each step."""
        assert self.recorded
        steps = self.recorded.steps
        columns = {name: steps[name] for name in ("step", *SERIES)
                   if len(steps[name]) and not np.isnan(steps[name]).all()}
        return {int(step): {name: float(column[at]) for name, column in columns.items() if name != "step"}
                for at, step in enumerate(columns["step"])}

    @cached_property
    def _batches(self) -> BatchSource:
        skipped = SkippedBatches.read(self.workdir) if self.workdir else None
        return remaining(self.run.batch_source, skipped or SkippedBatches())

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """Return the batch before this many steps, on the host."""
        return jax.device_get(self.run.batch(step, self._batches))

    @cached_property
    def start(self) -> Mapping[str, np.ndarray]:
        """The parameters before the first step, by name."""
        return dict(named(jax.device_get(self.run.init().params)))

    def state(self, step: int) -> TrainState:
        """Return the state after this many steps, from the newest checkpoint before it, on the host."""
        self._go_to(step)
        assert self._state
        return jax.device_get(self._state[1])

    def made_again(self, start: int, stop: int) -> list[dict[str, float]]:
        """Return the metrics of these steps, each made again."""
        self._go_to(start)
        return [self._step() for _ in range(start, stop)]

    def arrays(self) -> "dict[str, Shape]":
        """Return the shape and the dtype of each array of the state."""
        return shapes_of(self.on_one_device.abstract)

    def traced(self, state: TrainState, batch: PyTree) -> Trace:
        """Return the operations of a step on one device, in float64."""
        closed, restored = traced(self.on_one_device, state, batch)
        names = [told(name) for name, _ in named(restored([*range(len(closed.jaxpr.outvars))]))]
        layers = 0 if self.parts.get("model") is not None else getattr(self.config.model, "num_layers", 0)
        return trace(closed, jax.tree.leaves((state, batch)), names, layers, self.config.train.accumulation)

    def wrong_on_mesh(self, state: TrainState, batch: PyTree) -> tuple[str, list[str]] | None:
        """Return in what its mesh does not give the numbers of one device, by more than rounding; None: in nothing."""
        reference = measure(self.on_one_device, state, [batch], 0)
        on_mesh = Subject(self.config, self.parts).build(self.layout)
        found = compare(reference, record(on_mesh, state, [batch]), self.layout, on_mesh, reference.size, {}).finding
        return None if found is None else (f"{found}", [found.name, *found.others])

    def _go_to(self, step: int) -> None:
        begin = self.checkpoint(step)
        if self._state is None or not max(begin, 0) <= self._state[0] <= step:
            self._state = begin, self._loaded(begin) if begin else self.run.init()
        while self._state[0] < step:
            self._step()

    def _step(self) -> dict[str, float]:
        assert self._state
        step, state = self._state
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state, metrics = self.run.step(state, self.run.batch(step, self._batches))
        jax.block_until_ready(state)  # of many programs at once, CPU devices that share few cores may wait forever
        self._state = step + 1, state
        return {name: float(metrics[name]) for name in SERIES if name in metrics}

    def checkpoint(self, step: int) -> int:
        """Return the newest checkpoint of at most so many steps; 0: the run has to be made from its beginning."""
        if self.workdir is None:
            return 0
        folder = self.workdir / "checkpoints"
        return max((one for one in verify.steps(folder) if one <= step and verify.good(folder, one)), default=0)

    def _loaded(self, step: int) -> TrainState:
        assert self.workdir
        try:
            return restore.load(self.workdir / "checkpoints" / str(step), self.run.abstract)
        except restore.Damaged as damage:
            raise UserError(self.name, f"its checkpoint {step} cannot be read ({damage})",
                            "see jaxtrain checkpoint verify") from None

    def unrepeatable(self) -> str:
        """Return why its recorded steps cannot be made again by the step alone; "": they can."""
        said = self.recorded.run if self.recorded else {}
        if changes := [*said.get("config_changes", []), *said.get("data_changes", [])]:
            return f"{changes[0].get('key', 'its config')} was changed at step {changes[0].get('step')}"
        if self.config.diloco.count > 1:
            return "islands exchange updates between steps"
        between = [type(one).__name__ for one in self.run.extensions if any(
            getattr(type(one), hook) is not getattr(Extension, hook)
            for hook in ("begin", "after_step", "before_save"))]
        return f"{between[0]} changes the state between steps" if between else ""


def keys_that_differ(a: Config, b: Config) -> list[str]:
    """Return the keys of two configs that have other values, with these."""
    found = []
    for section in a.__dataclass_fields__:
        mine, theirs = getattr(a, section), getattr(b, section)
        names = getattr(mine, "__dataclass_fields__", None)
        if names is None or type(mine) is not type(theirs):
            found += [section] * (mine != theirs)
            continue
        found += [f"{section}.{name}: {getattr(mine, name)!r} and {getattr(theirs, name)!r}" for name in names
                  if getattr(mine, name) != getattr(theirs, name)]
    return found


def shapes_of(tree: PyTree) -> dict[str, Shape]:
    """Return the shape and the dtype of each array of a tree, by name."""
    return {name: (np.shape(x), f"{x.dtype}") for name, x in named(tree)}


def told(path: str) -> str:
    """Return what a result of a step is called, by its path in (state, metrics)."""
    part, _, rest = path.partition("/")
    kind, _, name = rest.partition("/")
    if part == "1":
        return {"loss": "the loss", "grad_norm": "the norm of the gradient", GRADIENTS: f"the gradient of {name}"}.get(
            kind, rest)
    return f"parameter {name} after the update" if kind == "params" else f"{kind} {name}".strip()
