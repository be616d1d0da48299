"""Config -> Run: the frozen record of everything a run is made of. Building allocates nothing."""

import sys
import warnings
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding

from jaxtrain import optim, precision, refusals, rule_checks, sharding
from jaxtrain.config import Config
from jaxtrain.data import stages as data_stages
from jaxtrain.errors import UserError, nearest
from jaxtrain.loss import cross_entropy
from jaxtrain.mesh import AXES, make_mesh
from jaxtrain.models import Compute, Decoder, make_model, moe
from jaxtrain.models.ahead import with_second_targets
from jaxtrain.models.attention import choose_backend
from jaxtrain.parallel.context import arrange
from jaxtrain.parallel.pipeline import Pipeline, count_microbatches, make_schedules
from jaxtrain.parallel.placement import Placement
from jaxtrain.parallel.schedules import Schedule
from jaxtrain.parallel.stage import Parts
from jaxtrain.sharding import AnyMesh, Rules
from jaxtrain.state import Layout, Skeleton, TrainState, abstract_state, initial_state, make_layout, with_shardings
from jaxtrain.step import make_step

BATCH_KEYS = {"tokens": np.int32, "targets": np.int32, "segments": np.int32, "positions": np.int32,
              "weights": np.float32}


@dataclass(frozen=True, eq=False)
class Run:
    """One training run: what it is, where it lives, and its compiled functions."""

    config: Config
    mesh: AnyMesh
    rules: Rules
    model: Skeleton
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    precision: str
    abstract: TrainState  # shapes, dtypes and shardings
    layout: Layout
    schedules: tuple[Schedule, Schedule] | None  # of the pipeline: for training, and for evaluation
    platform: str = ""  # that an abstract mesh stands for; "": the one here

    # ------------------------------------------------------------------------------------------------ the three calls
    def init(self, seed: int | None = None) -> TrainState:
        """The state at step 0, sharded from the first byte; the values do not depend on the mesh."""
        self._check_devices()
        return self.compiled_init(jax.random.key(self.config.train.seed if seed is None else seed))

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step. `state` is donated: use the returned one."""
        self._check_devices()
        return self.of_shape(np.shape(batch["tokens"])).compiled_step(state, self.place(batch))

    def batch(self, step: int) -> dict[str, jax.Array]:
        """The training batch of this step, placed on the mesh: a pure function of the data, the config and `step`."""
        self._check_devices()
        return self.placed(self.train_batches, step)

    # ------------------------------------------------------------------------------------------- the compiled functions
    @cached_property
    def compiled_init(self):
        """key -> TrainState."""
        # Integers and one product each (layers.bell): exact at any level, and on CPU four times as fast to compile.
        quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        return jax.jit(self._init, out_shardings=self.layout.state, compiler_options=quick)

    @cached_property
    def compiled_step(self) -> jax.stages.Compiled:
        """(state, batch) -> (state, metrics), compiled once, ahead of the first step."""
        self._check_devices()
        return self.lower().compile()

    @cached_property
    def compiled_eval(self) -> jax.stages.Compiled:
        """(params, batch) -> (summed loss, weight)."""
        with sharding.use(self.mesh, self.rules):
            return jax.jit(self._eval).lower(self.abstract.params, self.abstract_batch).compile()

    def of_shape(self, shape: tuple[int, ...]) -> "Run":
        """This run for batches of so many rows and tokens a row: same state, same mesh (`data.stages` asks for it)."""
        rows, seq_len = shape
        data = self.config.data
        if (rows, seq_len) == (data.global_batch_size, data.seq_len):
            return self
        if shape not in self._other_shapes:
            data = replace(data, global_batch_size=rows, seq_len=seq_len, stages=[], packing="concat", buckets=[])
            self._other_shapes[shape] = build(replace(self.config, data=data), mesh=self.mesh,
                                              platform=self.platform)
        return self._other_shapes[shape]

    def check_shapes(self, start: int, stop: int) -> None:
        """Refuse lengths of rows that these steps will have and that do not fit."""
        for rows, length in self.train_batches.shapes_of(start, stop):
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
        here = isinstance(self.mesh, jax.sharding.Mesh)
        return self.trace(on).lower(lowering_platforms=None if here else (self.platform or jax.default_backend(),))

    def trace(self, on: jax.sharding.Mesh | None = None) -> jax.stages.Traced:
        """The step as operations on arrays whose types say where they live."""
        def optimizer_of(axes):
            c = self.config
            return optim.make_optimizer(c.optimizer, self.schedule, axes, c.model.router_bias_rate)

        step = make_step(self.loss, self.optimizer, self.layout, accumulation=self.config.train.accumulation,
                         clip_norm=self.config.optimizer.clip_norm, precision=self.precision, schedule=self.schedule,
                         differentiate=self._pipelined if self.schedules else None,
                         describe=partial(moe.metrics, experts_per_token=self.config.model.experts_per_token),
                         spike_z=self.config.resilience.spike_z, skip_spikes=self.config.resilience.spikes != "record",
                         optimizer_of=optimizer_of)
        state = self.layout.state if on is None else jax.tree.map(
            lambda s: NamedSharding(on, s.spec, memory_kind=s.memory_kind), self.layout.state)
        with sharding.use(self.mesh, self.rules, self.platform), self._matmul_precision():
            jitted = jax.jit(step, donate_argnums=0, out_shardings=(state, None))
            return jitted.trace(self.abstract, self.abstract_batch)

    @property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of a batch."""
        shape = self.config.data.global_batch_size, self.config.data.seq_len
        where = self.layout.batch(2)
        return {key: jax.ShapeDtypeStruct(shape, dtype, sharding=where) for key, dtype in BATCH_KEYS.items()}

    def loss(self, params: Any, batch: Any) -> tuple[Any, ...]:
        """Summed loss and weight of a batch, and other sums if the model has any: what training minimises.

        To be traced under `sharding.use(run.mesh, run.rules)`. Pipelines have a gradient of their own: there this
        serves for looking, not for `jax.grad`.
        """
        total, penalty, weight, sums = self._loss(params, self._to_train_on(batch), self.config.train.z_loss)
        return (total + penalty, weight, sums) if sums else (total + penalty, weight)

    def module(self, state: TrainState) -> nnx.Module:
        """The model with this state's parameters, whole on one device: to be called eagerly, as `module(tokens)`."""
        return self.model.merge(jax.device_put(jax.device_get(state.params), jax.local_devices()[0]))

    # -------------------------------------------------------------------------------------------------------- the data
    @cached_property
    def corpus(self):
        """The tokenised text."""
        from jaxtrain.data import load_corpus

        corpus = load_corpus(self.config.data)
        if corpus.tokenizer.vocab_size > self.config.model.vocab_size:
            raise UserError("model.vocab_size", f"{self.config.model.vocab_size} is less than the tokenizer's "
                            f"{corpus.tokenizer.vocab_size}", f"set it to {corpus.tokenizer.vocab_size} or more")
        return corpus

    @cached_property
    def train_batches(self):
        """Training batches by step: shuffled, reshuffled each epoch, without end unless the sources have one."""
        from jaxtrain.data.batches import train_batches

        return train_batches(self.config.data, self.corpus)

    @cached_property
    def eval_batches(self):
        """Evaluation batches: every token of the split once, shuffled so that the first ones are a fair part.

        None where the data has no evaluation split.
        """
        from jaxtrain.data.batches import eval_batches

        return eval_batches(self.config.data, self.corpus)

    def evaluate(self, state: TrainState, batches: int | None = None) -> dict[str, float]:
        """Loss per token in nats, and per byte of text in bits, on the first `batches` of the evaluation split."""
        if self.eval_batches is None:
            raise UserError("data.source", "its evaluation split is empty", "prepare it with a larger --eval_fraction")
        all_of_them = self.eval_batches.num_batches or 0
        many = min(batches or all_of_them, all_of_them)
        sums = [self.compiled_eval(state.params, self.placed(self.eval_batches, n)) for n in range(many)]
        total, weight = np.sum(jax.device_get(sums), axis=0)
        nats = float(total / weight)
        text = self.corpus.eval
        if text.masked:  # how many bytes the learnt tokens stand for is not known
            return {"eval_loss": nats}
        predicted = text.num_tokens - text.num_documents  # the first token of a document follows nothing
        return {"eval_loss": nats, "eval_bits_per_byte": nats * predicted / text.num_bytes / float(np.log(2))}

    def place(self, batch: Any) -> Any:
        """Put a whole batch of numpy arrays on the mesh; what is there already stays."""
        if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch)):
            return batch
        return jax.tree.map(lambda x: jax.device_put(x, self.layout.batch(np.ndim(x))), batch)

    def placed(self, batches, step: int) -> dict[str, jax.Array]:
        """Each process reads only the rows that its own devices hold."""
        size, seq_len = batches.shape(step)
        target = self.layout.batch(2)
        if jax.process_count() == 1:
            return jax.device_put(batches[step], target)
        shape = (size, seq_len)
        held = {tuple(i.indices(n)[:2] for i, n in zip(index, shape, strict=True)): index
                for index in target.addressable_devices_indices_map(shape).values() if index is not None}
        rows = sorted({row for (first, last), _ in held for row in range(first, last)})
        local = batches.rows(step, rows)
        at = {row: i for i, row in enumerate(rows)}

        def piece(key, index):
            first, last, _ = index[0].indices(size)
            return local[key][at[first]: at[last - 1] + 1]

        return {key: jax.make_array_from_callback(shape, target, partial(piece, key)) for key in local}

    # ---------------------------------------------------------------------------------------------------------- report
    def report(self, file: Any = None) -> None:
        """Print what is placed where: path, shape, logical names, partition spec, bytes per device, and totals."""
        from jaxtrain.report import report

        lines = [report(self.abstract, self.layout), *([f"pipeline: {self.pipeline}"] if self.schedules else [])]
        print("\n".join(lines), file=file or sys.stdout)

    @property
    def pipeline(self) -> str:
        """The pipeline in words; nothing without one."""
        if not self.schedules:
            return ""
        s = self.schedules[0]
        return (f"{s.name}, {s.microbatches} micro-batches through {s.stages} stages x {s.chunks} chunks in {s.length} "
                f"ticks, {s.bubble_fraction:.0%} of them empty; {max(map(s.in_flight, range(s.stages)))} inputs held")

    # --------------------------------------------------------------------------------------------------------- innards
    def _check_devices(self) -> None:
        if not isinstance(self.mesh, jax.sharding.Mesh):
            raise UserError("devices", f"this run was built for {self.mesh.size} devices that are not here: it has "
                            "report() and lower() only", "build it without devices=")

    def _init(self, key: jax.Array) -> TrainState:
        params = _model(self.config, self.mesh, key)
        return initial_state(Skeleton.of(params).params(), self.optimizer, self.precision == "float16", history=True)

    def _eval(self, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        with self._matmul_precision():
            total, _, weight, _ = self._loss(precision.cast(params, self.precision), arrange(batch), 0.0)
            return total, weight

    def _to_train_on(self, batch: Any) -> Any:
        return arrange(with_second_targets(batch) if self.config.model.ahead_loss else batch)

    def _loss(self, params: Any, batch: Any, z_loss: float) -> tuple[jax.Array, jax.Array, jax.Array, dict]:
        weight = batch["weights"].sum()
        if self.schedules:
            total, penalty, sums = self._pipeline(z_loss).loss(params, batch)
            return total, penalty, weight, sums
        x_BTD, penalty, sums = self._middle(params, self._begin(params, batch), batch)
        return self._end(params, x_BTD, batch, z_loss), penalty, weight, sums

    def _pipelined(self, params: Any, batch: Any, scale: Any) -> Any:
        batch = self._to_train_on(batch)
        weight = batch["weights"].sum()
        pipeline = self._pipeline(self.config.train.z_loss)
        total, sums, grads = pipeline.gradient(params, batch, scale / jnp.maximum(weight, 1e-8))
        return (total, weight, *([sums] if sums else [])), grads

    def _pipeline(self, z_loss: float) -> Pipeline:
        assert self.schedules
        parts = Parts(stacks(self.model.params()), self._begin, self._middle, partial(self._end, z_loss=z_loss))
        at_rest = jax.tree.map(lambda s: s.spec, self.layout.gradients)
        return Pipeline(parts, *self.schedules, self.rules, self.layout.axes, at_rest)

    # The three parts of the loss, which a pipeline runs on different stages.
    def _begin(self, params: Any, batch: Any) -> jax.Array:
        """Embeddings."""
        return self.model.merge(params).begin(batch["tokens"], batch["positions"])

    def _middle(self, params: Any, x_BTD: jax.Array, batch: Any,
                real: Any = None) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """All layers that `params` holds -> activations, summed penalties, and what else is summed for metrics."""
        x_BTD, aux = self.model.merge(params).through(x_BTD, batch["segments"], batch["positions"], real)
        return x_BTD, _weighted(aux.pop("penalty", None), batch), aux

    def _end(self, params: Any, x_BTD: jax.Array, batch: Any, z_loss: float) -> jax.Array:
        """The summed loss of the head, and of looking ahead where the batch says at what."""
        model = self.model.merge(params)
        head_DV = model.head()
        entropy = partial(cross_entropy, z_loss=z_loss, chunks=self.config.train.loss_chunks)
        loss = entropy(model.finish(x_BTD), head_DV, batch["targets"], batch["weights"])
        if "second_targets" in batch:
            y_BTD, aux = model.look_ahead(x_BTD, batch["targets"], batch["segments"], batch["positions"])
            second = entropy(y_BTD, head_DV, batch["second_targets"], batch["second_weights"])
            loss += self.config.model.ahead_loss * second + _weighted(aux.get("penalty"), batch)
        return loss

    def _matmul_precision(self):
        # Accelerators round float32 matmuls to fewer bits unless told not to.
        return jax.default_matmul_precision("highest" if self.precision == "float32" else "default")


def build(config: Config, *, mesh: AnyMesh | None = None, devices: Any = None, platform: str = "") -> Run:
    """Resolve a config against devices (all of them; an integer for an abstract mesh) and check that it fits.

    `platform`: the kind of devices that an abstract mesh stands for: "cuda", "tpu" or "cpu".
    """
    devices = jax.devices() if devices is None else devices
    if config.mesh.auto and mesh is None:
        from jaxtrain.plan import here

        config = here.resolve(config, devices)
    m = config.mesh
    mesh = mesh or make_mesh(*(getattr(m, axis) for axis in AXES), devices=devices)
    unknown = [name for name in m.overrides if name not in sharding.CONFIG_KEYS]
    if unknown:
        raise UserError(f"mesh.overrides.{unknown[0]}", "no model speaks of this axis",
                        nearest(unknown[0], sharding.CONFIG_KEYS))
    rules = sharding.rules(m.rules, **m.overrides)
    rule_checks.agree(config, rules)
    stages, shards = mesh.shape["stage"], sharding.shards(rules.batch, mesh)
    microbatches = count_microbatches(config, stages, shards) if stages > 1 else 1
    refusals.check(config, mesh, rules, microbatches)
    kind = mesh.devices.flat[0].platform if isinstance(mesh, jax.sharding.Mesh) else platform or "abstract"
    compute = precision.resolve(config.train.precision, kind)
    choose_backend(config.train.attention, kind, jnp.dtype(precision.DTYPES[compute]), config.data.seq_len,
                   config.model.head_dim + config.model.rope_head_dim, sharding.shards(rules["seq"], mesh))

    if config.train.expert_exchange == "ragged" and kind == "cpu" and mesh.shape["expert"] > 1:
        raise UserError("train.expert_exchange", "XLA for CPU has no ragged all-to-all", "use auto")
    model = Skeleton.of(nnx.eval_shape(lambda: _model(config, mesh, jax.random.key(0))))
    axes = model.axes()
    rule_checks.are_used(config, axes)
    schedule = optim.make_schedule(config.optimizer, config.train.steps)
    optimizer = optim.make_optimizer(config.optimizer, schedule, axes, config.model.router_bias_rate)
    abstract = abstract_state(model.params(), optimizer, compute == "float16", history=True)
    schedules = None
    if stages > 1:
        schedules = make_schedules(config.pipeline, stages, microbatches)
        if not Placement.of(stacks(model.params()), schedules[0].position).even:
            rules = sharding.Rules({**rules.table, "layers": ()})  # spread otherwise in make_layout
    layout = make_layout(abstract, axes, rules, mesh, config.optimizer.zero_stage, pipeline=stages > 1,
                         offload=config.optimizer.offload)
    if schedules:
        _warn_of_waste(abstract.params, layout.state.params, schedules[0])
    rule_checks.activations_divide(config, rules, mesh)
    run = Run(config, mesh, rules, model, optimizer, schedule, compute, with_shardings(abstract, layout.state), layout,
              schedules, platform)
    for stage in data_stages.stages(config.data):  # refused now rather than when they begin
        try:
            run.of_shape((stage.batch, stage.seq_len))
        except UserError as error:
            raise UserError(error.key, f"from step {stage.start} on, {error.reason}", error.fix) from error
    return run


def _weighted(penalty_LB: jax.Array | None, batch: Any) -> jax.Array:
    """Rows' penalties, of one layer or several, summed by what the rows weigh."""
    return jnp.zeros(()) if penalty_LB is None else (penalty_LB * batch["weights"].sum(1)).sum()


def stacks(params: Any) -> dict[str, int]:
    """Which of the parameters are stacks of layers, in order, and how many layers each has."""
    return {key: len(jax.tree.leaves(params[key])[0]) for key in Decoder.STACKS if key in params}


def _warn_of_waste(params: Any, shardings: Any, schedule: Schedule) -> None:
    """Stages without layers; layers that do not divide over stages and are spread by no other dimension either."""
    stages, layers = schedule.stages, sum(stacks(params).values())
    if layers < stages * schedule.chunks:
        warnings.warn(f"mesh.stage: the model's {layers} layers leave {stages * schedule.chunks - layers} of {stages} "
                      f"stages x {schedule.chunks} chunks empty", stacklevel=3)
    both = [(leaf, where) for key in stacks(params) for leaf, where in zip(
        jax.tree.leaves(params[key]), jax.tree.leaves(shardings[key]), strict=True)]
    whole = [leaf for leaf, where in both if not any("stage" in sharding.axes_of(entry) for entry in where.spec)]
    share = sum(leaf.size for leaf in whole) / sum(leaf.size for leaf, _ in both)
    if share > 0.1:
        warnings.warn(f"mesh.stage: {stages} divides neither the layers nor another dimension of {share:.0%} of their "
                      f"parameters, so that every stage keeps all of these; choose a number that divides them",
                      stacklevel=3)


def _model(config: Config, mesh: AnyMesh, key: jax.Array) -> nnx.Module:
    t = config.train
    compute = Compute(t.attention, t.expert_exchange, t.remat, t.unroll, config.mesh.context_strategy)
    return make_model(config.model, compute, rngs=nnx.Rngs(params=key))
