"""A run: the frozen record of all that it is made of, and the protocol of what extends it. `builder.py` makes one."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TextIO, cast

import jax
import numpy as np
import optax
from flax import nnx
from jax.typing import DTypeLike

from jaxtrain.base import arguments
from jaxtrain.base.annotations import JsonMapping, PyTree
from jaxtrain.config.schema import Config
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.loading.batch_spec import Array
from jaxtrain.data.loading.configured import configured_batches, configured_corpus
from jaxtrain.data.loading.placement import place_batch
from jaxtrain.data.loading.skipped_batches import SkippedBatches
from jaxtrain.errors import UserError, tell
from jaxtrain.models.decoder import Compute
from jaxtrain.models.make_model import make_model
from jaxtrain.objectives import Objective
from jaxtrain.observe.own_parts import describe_objective
from jaxtrain.run.model_loss import ModelLoss, Schedules
from jaxtrain.run.shapes import DeclaredShapes, Shapes
from jaxtrain.run.validation import Refusal
from jaxtrain.sharding.axis_rules import AnyMesh
from jaxtrain.train_step import given_params, partition, precision
from jaxtrain.train_step.hooks import StepHooks, extras_of
from jaxtrain.train_step.sharded_step import ShardedStep, on_mesh
from jaxtrain.train_step.state import GivenBatch, Layout, Metrics, Params, Skeleton, TrainState, initial_state

if TYPE_CHECKING:  # few runs need them
    from jaxtrain.data.loading.grain_datasets.batch_dataset import BatchDataset
    from jaxtrain.run.own_model import OwnModel

INIT, REPLICAS = "init", "replica hashes"  # keys in `ShardedStep.programs`, for what makes the first state, and hashes


@dataclass(frozen=True)
class Parts:
    """The parts of a run that its extensions are made from; the state and its layout are still without theirs."""

    config: Config
    model: Skeleton | None
    objective: Objective
    schedule: optax.Schedule | None  # of the learning rate; None: the optimizer is not the config's
    abstract: TrainState
    layout: Layout
    updates: Any = None  # the name of each trained parameter's own update rule, or ""


class Extension(StepHooks):
    """An optional capability of a run: a class derives from this and defines the hooks that it needs (docs/extend.md).

    The hooks of `StepHooks` are traced with the step; these here are called on the host.
    """

    section: ClassVar[type | None] = None  # of a config, for one of another package: a dataclass with bounds on fields
    refusals: ClassVar[Sequence[Refusal]] = ()  # combinations of keys that cannot work with it
    state_words: ClassVar[str] = ""  # what the planner calls its part of the state
    planned: ClassVar[str] = ""  # "module:function" of what the planner has to say of it besides

    @classmethod
    def layout_options(cls, config: Config, *, own_optimizer: bool, pipeline: bool) -> Mapping[str, bool]:
        """Return arguments of `make_layout` that it asks for; it may refuse the config."""
        return {}

    @classmethod
    def of(cls, parts: Parts) -> "Extension | None":
        """Return the extension of a run that is made of these parts; None: its config asks for nothing."""
        return cls()

    def for_run(self, run: "Run", workdir: Path | None) -> "Extension":
        """Return what extends this run, once it is built; in a loop once more, with its workdir."""
        return self

    # -------------------------------------------------------------------------------------------- before the first step
    def accepted(self, abstract: Params, params: Params) -> Params:
        """Return the shapes that parameters which are given to the run may have, of those that the model has."""
        return abstract

    def kept(self, abstract: Params, params: Params) -> Params:
        """Return given parameters as the run keeps them; it is traced."""
        return params

    def initial_params(self, run: "Run") -> Params | None:
        """Return the parameters to begin with, or some of them; None: they are random."""
        return None

    def begins_with(self, run: "Run") -> JsonMapping:
        """Return what run.json says of these parameters. Every process calls it."""
        return {}

    def keep_files(self, run: "Run", workdir: Path) -> str:
        """Keep in the workdir of a new run what it needs of where it began; return what to say of that."""
        return ""

    # ----------------------------------------------------------------------------------------------------- batches
    @property
    def data(self) -> BatchSource | None:
        """Batches in place of the config's; None: it has none."""
        return None

    def added_to(self, batches: BatchSource) -> BatchSource:
        """Return batches, for training or for evaluation, with what this adds to them as they are placed."""
        return batches

    def prepare(self, state: TrainState | None, begun: "Begun") -> None:
        """Make what batches need of the state at step 0. `state`: that; None in a run that resumes."""

    def see(self, step: int, state: TrainState) -> None:
        """Take the state after this many steps, before the next batch is drawn."""

    # -------------------------------------------------------------------------------------------------------- the loop
    keeps: ClassVar[bool] = False  # whether it keeps things that were made with the state before the first step

    def begin(self, step: int, state: TrainState, loop: "Loop") -> TrainState:
        """Return the state that the loop begins with. Like the next two, it may raise `Stopped`."""
        return state

    def after_step(self, step: int, state: TrainState, loop: "Loop") -> TrainState:
        """Return the state to go on with after a step."""
        return state

    def before_save(self, step: int, state: TrainState, loop: "Loop") -> TrainState:
        """Return the state to be saved after a step, and to go on with."""
        return state

    def ended(self, loop: "Loop") -> None:
        """Clean up after the last step, whose checkpoint is on disk."""

    def pop_fields(self) -> Mapping[str, float]:
        """Return, and forget, what was measured since the last call, for the line of a step in metrics.jsonl."""
        return {}

    def evaluated(self, state: TrainState) -> Mapping[str, TrainState]:
        """Return further states whose loss an evaluation reports, by the name of the metric."""
        return {}


class Stopped(Exception):
    """Raised by an extension that waits for something, in a run that is to stop."""


@dataclass(frozen=True)
class Loop:
    """The loop that an extension's hooks are called in."""

    workdir: Path
    last: int  # the last step
    stopping: Callable[[int], bool]  # whether the run is asked to stop, after this step
    phase: Callable[[str], AbstractContextManager[Any]]  # for work that is not a step, by what its time counts as


@dataclass(frozen=True)
class Begun:
    """The beginning of a run or of its resumption, for `Extension.prepare`."""

    start: int = 0  # the steps that are made already
    skipped: SkippedBatches = field(default_factory=SkippedBatches)  # batches that rollbacks leave out
    parts: Mapping[str, Any] = field(default_factory=dict)  # as `Run.init` takes them
    about: Mapping[str, Any] | None = None  # what run.json says of the parameters that the run began with
    phase: Callable[[str], AbstractContextManager[Any]] = nullcontext  # tells the watchdog that the run goes on


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """One training run: what it is, where it lives, and its compiled functions."""

    config: Config
    model: Skeleton | None  # the module without its numbers; None for a pytree of one's own
    objective: Objective
    sharded: ShardedStep  # what compiles the step, places its batches and evaluates
    schedules: Schedules | None = None  # of the pipeline, for training and for evaluation
    extensions: tuple[Extension, ...] = ()
    data: BatchSource | None = None  # what it trains on in place of config.data
    own: "OwnModel | None" = None  # the model of its user's, in place of the config's

    @property
    def mesh(self) -> AnyMesh:
        """The mesh that the state and the batches lie on."""
        return self.layout.mesh

    @property
    def layout(self) -> Layout:
        """The shardings of the state, the gradients and the batch."""
        return self.sharded.layout

    @property
    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        return self.sharded.abstract

    # ------------------------------------------------------------------------------------------------ the three calls
    def init(self, seed: int | None = None, *, parts: Mapping[str, PyTree] | None = None,
             meanwhile: Callable[[], object] | None = None) -> TrainState:
        """The state at step 0, created already sharded; the values do not depend on the mesh.

        `parts`: what `identity.own_parts` returned for the workdir of this run. `meanwhile`: called while what makes
        random values is compiled and runs, if it has not been compiled yet.
        """
        self.sharded.check_devices()
        if self.own is not None:
            if seed is not None:
                raise UserError("seed", "the initial values are those of the model that this run was built with",
                                "draw them with another key there")
            return self.own.init()
        if seed is not None:
            arguments.is_seed("seed", seed)
        found = (extension.initial_params(self) for extension in self.extensions)
        return self._begun(next((params for params in found if params is not None), None), seed, parts, meanwhile)

    def step(self, state: TrainState, batch: GivenBatch) -> tuple[TrainState, Metrics]:
        """One optimizer step. `state` is donated: use the returned one."""
        return self.sharded.run(compiled_step(self, batch), state, self.sharded.place(batch))

    def batch(self, step: int, batches: BatchSource | None = None) -> dict[str, jax.Array]:
        """The training batch of this step, placed on the mesh: a pure function of the data, the config and `step`.

        Each process reads only the rows that its own devices hold. `batches`: others than those for training.
        """
        self.sharded.check_devices()
        arguments.is_seed("step", step)
        if step < 0:
            raise UserError("step", f"{step} is negative", "count steps from 0")
        batches = self.batch_source if batches is None else batches
        for extension in self.extensions:
            batches = extension.added_to(batches)
        return place_batch(batches, step, self.layout.batch, self._shapes.spec.check)

    def see(self, step: int, state: TrainState) -> None:
        """Show the state after this many steps to what makes batches with it, before the next batch is drawn."""
        for part in (self.data, *self.extensions):
            if hasattr(part, "see"):
                part.see(step, state)

    # ---------------------------------------------------------------------------------- further uses of a state
    def value_and_grad(self, state: TrainState, batch: GivenBatch) -> tuple[jax.Array, Params]:
        """The mean loss of a batch, and its gradient with respect to `state.params`, as the step computes them."""
        self.sharded.check_devices()
        self._shapes.spec.check(batch)
        return self.sharded.value_and_grad(state, batch)

    def with_params(self, params: Params) -> TrainState:
        """The state at step 0 around these parameters of the model, trained and frozen, as a nested dict of arrays."""
        self.sharded.check_devices()
        abstract = abstract_model(self)
        for extension in self.extensions:
            abstract = extension.accepted(abstract, params)
        return self._begun(given_params.placed(params, abstract))

    def module(self, state: TrainState, dtype: DTypeLike | None = None) -> Any:
        """The model with this state's parameters, whole on one device: to be called eagerly, as `module(tokens)`.

        Args:
            dtype: that of its parameters, such as `jnp.bfloat16`; None leaves each in its own.
        """
        params = given_params.on_one_device(given_params.of_state(state).all_params, dtype)
        if self.own is not None:
            return self.own.restore(params)
        assert self.model is not None
        return self.model.merge(params)

    def evaluate(self, state: TrainState, batches: int | None = None) -> dict[str, float]:
        """Loss per token in nats, its exponential, and bits per byte of text, on the first `batches` for evaluation."""
        if self.data is not None:
            raise UserError("data", "batches given by data= have no evaluation split",
                            "use run.sharded.evaluate(state, batch), which gives the summed loss and its weight")
        if self.eval_batches is None:
            raise UserError("data.source", "its evaluation split is empty", "prepare it with a larger --eval_fraction")
        all_of_them = self.eval_batches.num_batches or 0
        many = min(batches or all_of_them, all_of_them)
        nats, more = self._evaluated(state, self.eval_batches, many)
        found = {"eval_loss": nats}
        for extension in self.extensions:
            for name, other in extension.evaluated(state).items():
                found[name] = self._evaluated(other, self.eval_batches, many)[0]
        return found | self._evaluation_fields(nats, more)

    # ------------------------------------------------------------------------------------------- compiled programs
    def lower(self, on: jax.sharding.Mesh | None = None) -> jax.stages.Lowered:
        """The step, traced and lowered for this mesh: no device memory is used, and none need exist.

        `on`: the devices to compile for, where the mesh of this run is abstract.
        """
        return self.sharded.lower(self._shapes.abstract(), on)

    @cached_property
    def _shapes(self) -> Shapes:
        def batches() -> BatchSource:
            return self.batch_source

        if self.own is not None:
            return self.own.shapes(batches)
        return DeclaredShapes(self.config, self.layout, cast(ModelLoss, self.sharded.computation), batches)

    def lower_init(self, on: jax.sharding.Mesh | None = None) -> jax.stages.Lowered:
        """The program that makes the state at step 0 from a seed, traced and lowered as the step in `lower` is."""
        jitted = self._jitted_init if on is None else self._init_on(on)
        return jitted.trace(np.int64(0)).lower(lowering_platforms=self.sharded.platforms)

    @cached_property
    def _jitted_init(self) -> jax.stages.Wrapped:
        """seed -> TrainState."""
        return self._init_on(None)

    def _init_on(self, on: jax.sharding.Mesh | None) -> jax.stages.Wrapped:
        # Integers and one product each (layers.bell): exact at any level, and on CPU four times as fast to compile.
        kind = (self.sharded.platforms or (jax.default_backend(),))[0]
        quick = {"xla_backend_optimization_level": 0} if kind == "cpu" else None
        return jax.jit(self._init, out_shardings=on_mesh(on, self.layout.state), compiler_options=quick)

    # -------------------------------------------------------------------------------------------------------- the data
    @cached_property
    def corpus(self) -> Any:
        """The tokenised text, or the sequences that a model of another kind reads."""
        corpus = configured_corpus(self.config.model, self.config.data)
        if self.own is None and self.config.model.text and (
                corpus.tokenizer.vocab_size > self.config.model.vocabulary):
            raise UserError("model.vocab_size", f"{self.config.model.vocabulary} is less than the tokenizer's "
                            f"{corpus.tokenizer.vocab_size}", f"set it to {corpus.tokenizer.vocab_size} or more")
        return corpus

    @cached_property
    def train_batches(self) -> "BatchDataset":
        """Training batches by step, as a `grain.MapDataset` to be sliced, mapped and chained; imports Grain."""
        from jaxtrain.data.loading.grain_datasets.batch_dataset import BatchDataset

        return BatchDataset(self.batch_source)

    @cached_property
    def batch_source(self) -> BatchSource:
        """Training batches by step: those given to `build`, or the config's, which have no end unless it says so."""
        if self.data is not None:
            return self.data
        found, c = self._configured("train"), self.config
        if c.data.workers:
            from jaxtrain.data.loading.grain_datasets.workers import ForWorkers

            found = ForWorkers(c.model, c.data, c.diloco, self._arrays, found)
        return found

    @cached_property
    def eval_batches(self) -> BatchSource | None:
        """Evaluation batches: every token of the split once, shuffled so that the first ones are a fair part.

        None where the data has no evaluation split, as batches that were given to `build`.
        """
        return self._configured("eval") if self.data is None else None

    def _configured(self, split: str) -> Any:
        """The batches of a split that the config describes."""
        c = self.config
        return configured_batches(c.model, c.data, c.diloco, self.corpus, self._arrays, split)

    @property
    def _arrays(self) -> Mapping[str, Array]:
        """The arrays that rows of sequences are made for; those of text are known."""
        return {} if self.config.model.text else self._shapes.spec.arrays

    # ---------------------------------------------------------------------------------------------------------- report
    def report(self, file: TextIO | None = None) -> None:
        """Print what is placed where: path, shape, logical names, partition spec, bytes per device, and totals."""
        from jaxtrain.train_step.report import report

        pipeline = [f"pipeline: {self.schedules[0].summary}"] if self.schedules else []
        tell("\n".join([report(self.abstract, self.layout), *pipeline]), file=file)

    def __repr__(self) -> str:
        sizes = " ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items() if size > 1) or "one device"
        return f"Run({name_of(self)}, {sizes})"

    def _repr_html_(self) -> str:
        from jaxtrain.sharding.drawings import of_placement
        from jaxtrain.train_step.report import HEAD, placements, totals

        said = {"model": name_of(self), **totals(self.abstract, self.layout),
                "pipeline": self.schedules[0].summary if self.schedules else ""}
        return of_placement(self.mesh, said, HEAD, placements(self.abstract, self.layout))

    # --------------------------------------------------------------------------------------------------------- innards
    def _begun(self, given: Params | None, seed: int | None = None, parts: Mapping[str, PyTree] | None = None,
               meanwhile: Callable[[], object] | None = None) -> TrainState:
        """The state at step 0 around these parameters, where they are given; the others are random."""
        goal = self.objective
        identity = describe_objective(goal, {}) if parts is None else parts.get("objective", {})
        loaded = goal.load_frozen(partition.like(self.abstract.frozen, goal.frozen_axes), identity)
        number = np.int64(self.config.train.seed if seed is None else seed)  # any that jax.random.key takes
        if given is not None:
            state = jax.jit(self._around, out_shardings=self.layout.state)(given, number)
        elif INIT in (programs := self.sharded.programs):  # a rollback to step 0 runs it again
            state = programs[INIT](number)
        elif meanwhile is None:
            state = self._jitted_init(number)
        else:
            lowered = self.lower_init()

            def compile_and_run() -> TrainState:
                programs[INIT] = lowered.compile()
                return programs[INIT](number)

            with ThreadPoolExecutor(1, "compile") as thread:
                made = thread.submit(compile_and_run)
                meanwhile()
            state = made.result()
        return state if loaded is None else replace(state, frozen=state.frozen | loaded)

    def _init(self, seed: jax.Array) -> TrainState:
        key = jax.random.key(seed)  # here, since to make it is a program too
        return self._state(self._random(key), key)

    def _around(self, params: Params, seed: jax.Array) -> TrainState:
        key, abstract = jax.random.key(seed), abstract_model(self)
        for extension in self.extensions:
            params = extension.kept(abstract, params)
        return self._state(partition.merge(params, partition.without(self._random(key), params)), key)

    def _random(self, key: jax.Array) -> Params:
        c = self.config
        model = make_model(c.model, Compute.of(c.model, c.train, c.mesh), c.lora, scalar_head=c.scalar_head,
                           rngs=nnx.Rngs(params=key))
        return Skeleton.of(model).params()

    def _state(self, params: Params, key: jax.Array) -> TrainState:
        c, goal = self.sharded.settings, self.objective
        frozen = partition.without(params, self.layout.axes) | goal.init_frozen(key, params)
        frozen = precision.frozen_dtype(frozen, self.config.train.frozen_dtype,
                                        partition.like(self.sharded.computation.dtypes, frozen))
        return initial_state(partition.like(params, self.layout.axes), c.optimizer, c.precision == "float16",
                             extras_of(self.sharded.hooks), frozen)

    def _evaluated(self, state: TrainState, batches: BatchSource, many: int) -> tuple[float, list[Metrics]]:
        """The mean loss of this many batches for evaluation, and their further sums."""
        sums, program = [], self.sharded.compiled_evaluation(self._shapes.abstract(batches))
        for n in range(many):
            sums.append(program(state.all_params, self.batch(n, batches)))
            jax.block_until_ready(sums[-2:-1])  # of many at once, CPU devices that share few cores may wait forever
        total, weight, *more = jax.tree.map(lambda *x: np.sum(x, axis=0), *jax.device_get(sums))
        return float(total / max(weight, 1e-8)), more

    def _evaluation_fields(self, nats: float, more: list[Metrics]) -> dict[str, float]:
        """Return the metrics of an evaluation besides its loss, from that and the further sums of its batches."""
        if more:
            told = self.objective.evaluation.metrics(*more)
            return {f"eval_{name}": float(told[name]) for name in self.objective.evaluation_metrics or told}
        if not self.config.model.text:
            return {}
        text, found = self.corpus.eval, {"eval_perplexity": float(np.exp(min(nats, 700.0)))}
        if text.masked:  # how many bytes the learnt tokens stand for is not known
            return found
        predicted = text.num_tokens - text.num_documents  # the first token of a document follows nothing
        return found | {"eval_bits_per_byte": nats * predicted / text.num_bytes / float(np.log(2))}


def shapes_of(run: Run) -> Shapes:
    """Return the arrays and the shapes that a run's batches have."""
    return run._shapes


def compiled_step(run: Run, batch: GivenBatch | None = None) -> jax.stages.Compiled:
    """Return the step for batches of this shape, or of the config's: (state, placed batch) -> (state, metrics)."""
    run.sharded.check_devices()
    batch = run._shapes.abstract() if batch is None else batch
    run._shapes.allow(run._shapes.spec.check(batch))
    return run.sharded.compiled(batch)


def name_of(run: Run) -> str:
    """Return the name of the model that a run trains."""
    return run.config.model.name if run.own is None else run.own.name


def abstract_model(run: Run) -> Params:
    """Return shapes, dtypes and shardings of a run's model, trained and frozen, without the objective's parameters."""
    return partition.without(run.abstract.all_params, run.objective.frozen_axes)


def for_run(run: Run, workdir: Path | None = None) -> Run:
    """Return the run with its extensions ready for it; in a loop, with its workdir.

    Each is given the run with those before it ready: one that begins the run anew has the parameters to begin with.
    """
    ready = run
    for at, extension in enumerate(run.extensions):
        made = extension.for_run(ready, workdir)
        if made == extension:
            continue
        data = made.data if made.data is not None else ready.data
        before, ready = ready, replace(ready, data=data, extensions=(
            *ready.extensions[:at], made, *ready.extensions[at + 1:]))
        vars(ready).update({name: found for name, found in vars(before).items() if name == "corpus"})
    return ready
