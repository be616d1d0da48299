"""A run: the frozen record of everything that it is made of, and its compiled functions. `builder.py` makes one."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from flax import nnx

from jaxtrain import rule_checks, validation
from jaxtrain.base import arguments
from jaxtrain.config import data_stages
from jaxtrain.config.schema import Config
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.loading.batch_spec import Array, BatchSpec
from jaxtrain.data.loading.configured import configured_batches, configured_corpus
from jaxtrain.data.loading.loader import in_step
from jaxtrain.data.loading.placement import place_batch, placed_ahead
from jaxtrain.errors import UserError, tell
from jaxtrain.models import training_noise
from jaxtrain.models.decoder import Compute
from jaxtrain.models.make_model import make_model
from jaxtrain.objectives import Objective, configured
from jaxtrain.observe.own_parts import describe, describe_data, describe_optimizer
from jaxtrain.parallel.compression.compressed_gradients import CompressedGradients
from jaxtrain.parallel.pipeline.pipeline import Pipeline
from jaxtrain.parallel.schedules import Schedule
from jaxtrain.sharding import rules as sharding
from jaxtrain.sharding.rules import AnyMesh, Rules
from jaxtrain.sparsity.sparse_kernels import sparsity_of
from jaxtrain.train_step import given_params, optimizers, partition, precision, quantized_kernels
from jaxtrain.train_step.anomaly import History
from jaxtrain.train_step.gradients import StateGradient, make_gradient
from jaxtrain.train_step.optimizers import ema, outer
from jaxtrain.train_step.sharded_step import ShardedStep
from jaxtrain.train_step.state import (
    Extras,
    Layout,
    Skeleton,
    TrainState,
    initial_state,
)
from jaxtrain.train_step.step import Step, make_step

if TYPE_CHECKING:
    from jaxtrain.data.loading.grain_datasets.batch_dataset import BatchDataset


def extras_of(config: Config) -> Extras:
    """Return what a run's state has besides: recent losses, averaged parameters, the outer optimizer's state."""
    history: Extras = {"history": lambda params: History.empty()}
    average: Extras = {ema.NAME: ema.begin} if config.train.ema_decay else {}
    others: Extras = {outer.NAME: outer.begin(config.islands.kept)} if config.islands.count else {}
    return {**history, **average, **others}


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """One training run: what it is, where it lives, and its compiled functions."""

    config: Config
    mesh: AnyMesh
    rules: Rules
    model: Any  # the Skeleton of its module; None for a pytree of one's own
    objective: Objective
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule | None  # of the learning rate; None: the optimizer is not the config's
    precision: str
    abstract: TrainState  # shapes, dtypes and shardings
    layout: Layout
    schedules: tuple[Schedule, Schedule] | None  # of the pipeline: for training, and for evaluation
    platform: str = ""  # that an abstract mesh stands for; "": the one here
    extras: Extras = field(default_factory=dict)  # how to make those of its state
    data: BatchSource | None = None  # what it trains on in place of config.data
    load_initial: Callable[["Run"], Any] | None = None  # what loads the first parameters; None: they are random
    joined: Any = None  # what adds arrays to batches as they are placed (tuning/reference_sums.py); None: nothing does
    exchange: Any = None  # what changes the state after a step (islands/outer_exchange.py); None: nothing does

    # ------------------------------------------------------------------------------------------------ the three calls
    def init(self, seed: int | None = None, *, parts: Mapping[str, Any] | None = None,
             meanwhile: Callable[[], object] | None = None) -> TrainState:
        """The state at step 0, created already sharded; the values do not depend on the mesh.

        `parts`: what `own_parts` returned for the workdir of this run. `meanwhile`: called while what makes random
        values is compiled and runs, if it has not been compiled yet.
        """
        self.check_devices()
        if seed is not None:
            arguments.is_seed("seed", seed)
        beside = partition.like(self.abstract.frozen, self.objective.frozen_axes)
        parts = self.own_parts({}) if parts is None else parts
        loaded = self.objective.load_frozen(beside, parts.get("objective", {}))
        number = np.int64(self.config.train.seed if seed is None else seed)  # any that jax.random.key takes
        if self.load_initial is not None:
            state = self._around(self.load_initial(self), number)
        elif meanwhile is None:
            state = self.compiled_init(number)
        elif self._compiled_beside:
            state = self._compiled_beside[0](number)
        else:
            lowered = self.compiled_init.lower(number)

            def compile_and_run() -> TrainState:
                self._compiled_beside.append(lowered.compile())
                return self._compiled_beside[0](number)

            with ThreadPoolExecutor(1, "compile") as thread:
                made = thread.submit(compile_and_run)
                meanwhile()
            state = made.result()
        return state if loaded is None else replace(state, frozen=state.frozen | loaded)

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step. `state` is donated: use the returned one."""
        self.check_devices()
        return self.sharded.run(self.compiled(batch), state, self.place(batch))

    def value_and_grad(self, state: TrainState, batch: Any) -> tuple[jax.Array, Any]:
        """The mean loss of a batch, and its gradient with respect to `state.params`, as the step computes them."""
        self.check_devices()
        self.batch_spec.check(batch)
        return self.sharded.value_and_grad(state, batch)

    def with_params(self, params: Any) -> TrainState:
        """The state at step 0 around these parameters of the model, trained and frozen, as a nested dict of arrays."""
        abstract = self.abstract_model
        if not quantized_kernels.are_quantized(params):
            abstract = quantized_kernels.as_floats(abstract)
        return replace(self, load_initial=lambda _: given_params.placed(params, abstract)).init()

    @property
    def abstract_model(self) -> Any:
        """Shapes, dtypes and shardings of the model's parameters, trained and frozen, without the objective's."""
        return partition.without(self.abstract.all_params, self.objective.frozen_axes)

    def adopt(self, state: TrainState) -> TrainState:
        """Move a state that lives on another mesh to this run's."""
        self.check_devices()
        return self.sharded.adopt(state)

    def batch(self, step: int) -> dict[str, jax.Array]:
        """The training batch of this step, placed on the mesh: a pure function of the data, the config and `step`."""
        self.check_devices()
        arguments.is_seed("step", step)
        if step < 0:
            raise UserError("step", f"{step} is negative", "count steps from 0")
        return self.placed(self.batch_source, step)

    # ------------------------------------------------------------------------------------------- the compiled functions
    @cached_property
    def compiled_init(self):
        """seed -> TrainState."""
        # Integers and one product each (layers.bell): exact at any level, and on CPU four times as fast to compile.
        quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        return jax.jit(self._init, out_shardings=self.layout.state, compiler_options=quick)

    @cached_property
    def _compiled_beside(self) -> list[jax.stages.Compiled]:
        """The program of `compiled_init`, once it was compiled beside the step: a rollback to step 0 runs it again."""
        return []

    @cached_property
    def sharded(self) -> ShardedStep:
        """The part that compiles the step, places its batches and evaluates."""
        return ShardedStep(self._make_step, self._gradient, self._eval, self.abstract, self.layout, self.rules,
                           self.precision, self.config.train.accumulation, self.platform,
                           self.config.train.compiler_options,
                           self.config.train.deterministic or self.config.resilience.replay_every > 0)

    @cached_property
    def compiled_step(self) -> jax.stages.Compiled:
        """(state, batch) -> (state, metrics), compiled once, ahead of the first step."""
        self.check_devices()
        return self.sharded.compiled(self.abstract_batch)

    @cached_property
    def compiled_eval(self) -> jax.stages.Compiled:
        """(trained and frozen parameters, batch) -> (summed loss, weight)."""
        return self.sharded.compiled_evaluation(self.abstract_batch)

    def compiled(self, batch: Any) -> jax.stages.Compiled:
        """The step for batches of this shape: (state, placed batch) -> (state, metrics)."""
        rows, seq_len = self.batch_spec.check(batch)
        return self.of_shape((rows, seq_len)).compiled_step

    def compile_ahead(self, batches: BatchSource, start: int, stop: int) -> None:
        """Compile the step for every shape that the batches of these steps have."""
        for shape in batches.shapes_of(start, stop):
            self.of_shape(shape).compiled_step  # noqa: B018 (compiles)

    def of_shape(self, shape: tuple[int, ...]) -> "Run":
        """Return this run for batches of this many rows and tokens a row: same state, same mesh (for `data.stages`)."""
        rows, seq_len = shape
        data = self.config.data
        if (rows, seq_len) == (data.global_batch_size, data.seq_len):
            return self
        if shape not in self._other_shapes:
            if not self._declared(shape):
                raise UserError("batch", f"its shape is {rows} x {seq_len}, and the config declares "
                                f"{data.global_batch_size} x {data.seq_len}",
                                "give batches of that shape, or declare the other in data.stages")
            kept = data.packing in ("pairs", "answers") or not self.config.model.text
            data = replace(data, global_batch_size=rows, seq_len=seq_len, stages=[], buckets=[],
                           packing=data.packing if kept else "concat")
            config = replace(self.config, data=data)
            # The config's rules: this run's own may leave layers out, where stages have unequal numbers of them.
            rules = sharding.rules(config.mesh.rules, **config.mesh.overrides)
            schedules = validation.checked_schedules(config, self.mesh, rules, self.precision, self.platform)
            rule_checks.activations_divide(config, self.rules, self.mesh)
            self._other_shapes[shape] = replace(self, config=config, schedules=schedules)
        return self._other_shapes[shape]

    def _declared(self, shape: tuple[int, ...]) -> bool:
        """Whether the config says that batches of this shape come."""
        stages = {(stage.batch, stage.seq_len) for stage in data_stages.stages(self.config.data)}
        return shape in stages or (
            self.config.data.packing == "bucket"
            and shape in self.batch_source.shapes_of(0, max(1, self.config.train.steps)))

    def check_shapes(self, start: int, stop: int) -> None:
        """Refuse lengths of rows that these steps will have and that do not fit."""
        for rows, length in self.batch_source.shapes_of(start, stop):
            try:
                self.of_shape((rows, length))
            except UserError as error:
                if self.config.data.packing != "bucket":
                    raise
                raise UserError("data.buckets", f"with rows of {length} tokens {error.key} is refused: {error.reason}",
                                "give data.buckets other lengths") from error

    @cached_property
    def _other_shapes(self) -> dict[tuple[int, ...], "Run"]:
        return {}

    def lower(self, on: jax.sharding.Mesh | None = None) -> jax.stages.Lowered:
        """The step, traced and lowered for this mesh: no device memory is used, and none need exist.

        `on`: the devices to compile for, where the mesh of this run is abstract.
        """
        return self.sharded.lower(self.abstract_batch, on)

    def trace(self, on: jax.sharding.Mesh | None = None) -> jax.stages.Traced:
        """The step as operations on arrays whose types say where they live."""
        return self.sharded.trace(self.abstract_batch, on)

    @cached_property
    def _gradient(self) -> StateGradient:
        made = make_gradient(self.loss, self.layout, accumulation=self.config.train.accumulation,
                             precision=self.precision, dtypes=self._metadata("compute_dtype", self.abstract.all_params),
                             differentiate=self._pipeline(self.objective).gradient if self.schedules else None)
        if self.config.compression.method:
            made = CompressedGradients(self.config, self.layout, self.abstract.params,
                                       self._metadata("update", self.abstract.params)).of(made)
        return self._with_noise(made)

    def _with_noise(self, gradient: StateGradient) -> StateGradient:
        """Return the gradient with the random numbers of dropout and of noise on embeddings, if the config has any."""
        c, alpha = self.config, self.config.train.neftune_noise_alpha
        if not (alpha or c.lora.dropout):
            return gradient
        return lambda state, batch: gradient(state, training_noise.added_to(
            batch, c.train.seed, state.step, alpha, c.model.embed_dim))

    def _make_step(self) -> Step:
        def optimizer_of(axes, updates):
            c = self.config
            assert self.schedule, "an optimizer of one's own cannot be offloaded"
            made = optimizers.make_optimizer(c.optimizer, self.schedule, axes, c.model.growth)
            return optimizers.with_update_rules(made, updates, c.model.experts.bias_rate)

        return make_step(self._gradient, self.optimizer, self.layout, clip_norm=self.config.optimizer.clip_norm,
                         schedule=self.schedule, describe=self.objective.metrics,
                         updates=self._metadata("update", self.abstract.params),
                         spike_z=self.config.resilience.spike_z, skip_spikes=self.config.resilience.spikes != "record",
                         ema_decay=self.config.train.ema_decay,
                         optimizer_of=optimizer_of,
                         sparsity=sparsity_of(self.config, self.model, self.abstract.params, self.layout))

    @property
    def batch_spec(self) -> BatchSpec:
        """The arrays that every batch has."""
        below = dict.fromkeys(("tokens", "targets"), self.config.model.vocabulary)
        return BatchSpec(self.objective.batch_spec, type(self.objective).__name__, below=below)

    @property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of a batch."""
        data = self.config.data
        return self.batch_spec.abstract(data.global_batch_size, data.seq_len, self.layout.batch)

    def loss(self, params: Any, batch: Any) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Summed loss, weight and further sums of a batch: what training minimises.

        `params`: trained and frozen ones, `state.all_params`. To be traced under `sharding.use(run.mesh, run.rules)`.
        Pipelines have a gradient of their own: there this serves for looking, not for `jax.grad`.
        """
        return self._loss(self.objective, params, batch)

    def cast(self, params: Any) -> Any:
        """Trained and frozen parameters in the dtypes in which they compute."""
        return precision.cast(params, self.precision, self._metadata("compute_dtype", params))

    def module(self, state: TrainState, dtype: Any = None) -> nnx.Module:
        """The model with this state's parameters, whole on one device: to be called eagerly, as `module(tokens)`.

        Args:
            dtype: that of its parameters, such as `jnp.bfloat16`; None leaves each in its own.
        """
        return self.model.merge(given_params.on_one_device(given_params.of_state(state).all_params, dtype))

    # -------------------------------------------------------------------------------------------------------- the data
    @cached_property
    def corpus(self) -> Any:
        """The tokenised text, or the sequences that a model of another kind reads."""
        corpus = configured_corpus(self.config)
        if self.config.model.text and corpus.tokenizer.vocab_size > self.config.model.vocabulary:
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
        found = self._configured("train")
        if self.config.data.workers:
            from jaxtrain.data.loading.grain_datasets.workers import ForWorkers

            found = ForWorkers(self.config, self._arrays, found)
        return found

    @property
    def manifests(self) -> dict[str, str]:
        """The hash of the data of each source; none for batches that were given to `build`."""
        return {} if self.data is not None else self.corpus.manifests

    @cached_property
    def eval_batches(self):
        """Evaluation batches: every token of the split once, shuffled so that the first ones are a fair part.

        None where the data has no evaluation split, as batches that were given to `build`.
        """
        if self.data is not None:
            return None
        return self._configured("eval")

    def _configured(self, split: str) -> Any:
        """The batches of a split that the config describes."""
        return configured_batches(self.config, self.corpus, self._arrays, split)

    @property
    def _arrays(self) -> Mapping[str, Array]:
        """The arrays that rows of sequences are made for; those of text are known."""
        return {} if self.config.model.text else self.batch_spec.arrays

    def evaluate(self, state: TrainState, batches: int | None = None) -> dict[str, float]:
        """Loss per token in nats, its exponential, and bits per byte of text, on the first `batches` for evaluation."""
        if self.data is not None:
            raise UserError("data", "batches given by data= have no evaluation split",
                            "use run.sharded.evaluate(state, batch), which gives the summed loss and its weight")
        if self.eval_batches is None:
            raise UserError("data.source", "its evaluation split is empty", "prepare it with a larger --eval_fraction")
        all_of_them = self.eval_batches.num_batches or 0
        many = min(batches or all_of_them, all_of_them)
        nats, more = self._evaluated(state, many)
        found = {"eval_loss": nats}
        if ema.NAME in state.extras:
            found["eval_loss_ema"] = self._evaluated(state.averaged, many)[0]
        return found | self._evaluation_fields(nats, more)

    def _evaluation_fields(self, nats: float, more: list[Any]) -> dict[str, float]:
        """Return the metrics of an evaluation besides its loss, from that and the further sums of its batches."""
        if more:
            told = self.objective.evaluation.metrics(*more)
            return {f"eval_{name}": float(told[name]) for name in self.objective.evaluation_metrics}
        if not self.config.model.text:
            return {}
        text, found = self.corpus.eval, {"eval_perplexity": float(np.exp(min(nats, 700.0)))}
        if text.masked:  # how many bytes the learnt tokens stand for is not known
            return found
        predicted = text.num_tokens - text.num_documents  # the first token of a document follows nothing
        return found | {"eval_bits_per_byte": nats * predicted / text.num_bytes / float(np.log(2))}

    def _evaluated(self, state: TrainState, many: int) -> tuple[float, list[Any]]:
        """The mean loss of this many batches for evaluation, and their further sums."""
        sums, batches = [], self.eval_batches
        assert batches is not None
        for n in range(many):
            sums.append(self.compiled_eval(state.all_params, self.placed(batches, n)))
            jax.block_until_ready(sums[-2:-1])  # of many at once, CPU devices that share few cores may wait forever
        total, weight, *more = jax.tree.map(lambda *x: np.sum(x, axis=0), *jax.device_get(sums))
        return float(total / max(weight, 1e-8)), more

    @property
    def on_policy(self) -> bool:
        """Whether batches are made with the state: then `see` has to be called before each."""
        return hasattr(self.data, "see")

    def see(self, step: int, state: TrainState) -> None:
        """Show the state after this many steps to data that are made with it."""
        for part in (self.data, self.joined):
            if hasattr(part, "see"):
                part.see(step, state)

    def pop_fields(self) -> dict[str, float]:
        """Return and forget what exchanges, and data made with the state, have measured, for the line of a step."""
        return getattr(self.data, "pop_fields", dict)() | getattr(self.exchange, "pop_fields", dict)()

    def drawn(self, batches: BatchSource, start: int, stop: int) -> Any:
        """Return an iterator of the placed batches of these steps, which prepares the next ones ahead if it can."""
        if not self.on_policy:
            batches = batches if self.joined is None else self.joined.added_to(batches)
            return placed_ahead(batches, start, stop, self.layout.batch, self.batch_spec.check,
                                self.config.data.prefetch, self.config.data.workers)

        def place(step, batches):
            with jax.transfer_guard("allow"):
                return self.placed(batches, step)
        return in_step(batches, start, stop - start, place, getattr(self.data, "forget", None))

    def place(self, batch: Any) -> Any:
        """Spread a whole batch over the mesh, as every process gives it; what is there already stays."""
        return self.sharded.place(batch)

    def placed(self, batches: BatchSource, step: int) -> dict[str, jax.Array]:
        """The batch of a step on the mesh; each process reads only the rows that its own devices hold."""
        batches = batches if self.joined is None else self.joined.added_to(batches)
        return place_batch(batches, step, self.layout.batch, self.batch_spec.check)

    # ---------------------------------------------------------------------------------------------------------- report
    def report(self, file: Any = None) -> None:
        """Print what is placed where: path, shape, logical names, partition spec, bytes per device, and totals."""
        from jaxtrain.train_step.report import report

        lines = [report(self.abstract, self.layout), *([f"pipeline: {self.pipeline}"] if self.schedules else [])]
        tell("\n".join(lines), file=file)

    def __repr__(self) -> str:
        sizes = " ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items() if size > 1) or "one device"
        return f"{type(self).__name__}({self.name}, {sizes})"

    def _repr_html_(self) -> str:
        from jaxtrain.sharding.pictures import of_placement
        from jaxtrain.train_step.report import HEAD, placements, totals

        said = {"model": self.name, **totals(self.abstract, self.layout), "pipeline": self.pipeline}
        return of_placement(self.mesh, said, HEAD, placements(self.abstract, self.layout))

    @property
    def pipeline(self) -> str:
        """The pipeline in words; nothing without one."""
        if not self.schedules:
            return ""
        s = self.schedules[0]
        return (f"{s.name}, {s.microbatches} micro-batches through {s.stages} stages x {s.chunks} chunks in {s.length} "
                f"ticks, {s.bubble_fraction:.0%} of them empty; {max(map(s.in_flight, range(s.stages)))} inputs held")

    @property
    def own_model(self) -> bool:
        """Whether the model is not the config's, so that its arithmetic is not known."""
        return False

    @property
    def name(self) -> str:
        """The name of the model that is trained."""
        return self.config.model.name

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The part of the config that counts for this run, as config.json has it: all of it."""
        return self.config.to_dict()

    @property
    def has_own_parts(self) -> bool:
        """Whether the objective or the optimizer is not the config's."""
        return self.schedule is None or type(self.objective) is not type(configured(self.config, self.model))

    def own_parts(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """The description of what the config does not name, for run.json (observe/own_parts.py).

        `recorded`: what run.json says of the workdir's run, {} for a new one.
        """
        found: dict[str, Any] = {}
        goal = _identity(self.objective, recorded.get("objective") or {})
        if goal != _identity(configured(self.config, self.model), {}):
            found["objective"] = goal
        if self.schedule is None:
            found["optimizer"] = describe_optimizer(self.optimizer, self.abstract.params)
        return found if self.data is None else found | {"data": describe_data(self.data)}

    # --------------------------------------------------------------------------------------------------------- innards
    def check_devices(self) -> None:
        """Refuse to go on where the run was built for devices that are not here."""
        if not isinstance(self.mesh, jax.sharding.Mesh):
            raise UserError("devices", f"this run was built for {self.mesh.size} devices that are not here: it has "
                            "report() and lower() only", "build it without devices=")

    def _init(self, seed: jax.Array) -> TrainState:
        key = jax.random.key(seed)  # here, since to make it is a program too
        return self._state(self._random(key), key)

    def _around(self, params: Any, seed: np.int64) -> TrainState:
        """The state around these parameters; those that are not given, such as adapters, are random."""
        def whole(params, seed):
            key = jax.random.key(seed)
            params = quantized_kernels.quantized_like(self.abstract_model, params)
            return self._state(partition.merge(params, partition.without(self._random(key), params)), key)
        return jax.jit(whole, out_shardings=self.layout.state)(params, seed)

    def _random(self, key: jax.Array) -> Any:
        config = self.config
        model = make_model(config.model, Compute.of(config), config.lora, scalar_head=config.scalar_head,
                           rngs=nnx.Rngs(params=key))
        return Skeleton.of(model).params()

    def _state(self, params: Any, key: jax.Array) -> TrainState:
        frozen = partition.without(params, self.layout.axes) | self.objective.init_frozen(key, params)
        frozen = precision.frozen_dtype(frozen, self.config.train.frozen_dtype,
                                        self._metadata("compute_dtype", frozen))
        return initial_state(partition.like(params, self.layout.axes), self.optimizer, self.precision == "float16",
                             self.extras, frozen)

    def _eval(self, params: Any, batch: Any) -> tuple[Any, ...]:
        found = self._loss(self.objective.evaluation, self.cast(params), batch)
        return found if self.objective.evaluation_metrics else found[:2]

    def _loss(self, objective: Objective, params: Any, batch: Any) -> Any:
        return (self._pipeline(objective) if self.schedules else objective).loss(params, batch)

    def _metadata(self, key: str, params: Any) -> Any:
        """One entry of the metadata of these parameters, which are the model's or the objective's."""
        known = self.model.metadata(key, "") | self.objective.frozen_metadata(key)
        return partition.like(known, params)

    def _pipeline(self, objective: Objective) -> Pipeline:
        assert self.schedules and objective.pipeline_parts
        at_rest = jax.tree.map(lambda s: s.spec, self.layout.gradients)
        return Pipeline(objective.pipeline_parts, *self.schedules, self.rules, self.layout.axes,
                        self.layout.frozen_axes, at_rest)


def _identity(objective: Objective, recorded: Mapping[str, Any]) -> dict[str, Any]:
    # An objective that is not a NextToken may have been written without it.
    return objective.identity(recorded) if hasattr(objective, "identity") else describe(objective)
