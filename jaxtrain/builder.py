"""Config -> Run: resolve a config against devices and check that it fits. Building allocates nothing."""

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import optax
from flax import nnx

from jaxtrain import extensions
from jaxtrain.base import arguments
from jaxtrain.config import data_stages
from jaxtrain.config.load import with_steps
from jaxtrain.config.remat_policies import AUTO
from jaxtrain.config.schema import Config
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.loading.grain_datasets.given_datasets import as_batch_source
from jaxtrain.errors import UserError, nearest
from jaxtrain.models.decoder import Compute
from jaxtrain.models.make_model import make_model
from jaxtrain.models.trained_parameters import is_frozen
from jaxtrain.objectives import MakeObjective, Objective
from jaxtrain.run import Extension, Parts, Run, rule_checks, shapes_of, validation
from jaxtrain.run.made_of_sections import configured, made_objective
from jaxtrain.run.model_loss import ModelLoss, Schedules
from jaxtrain.sharding import axis_rules, mesh_context
from jaxtrain.sharding.axis_rules import AnyMesh, Rules
from jaxtrain.sharding.mesh import AXES, check_mesh, make_mesh, training_devices
from jaxtrain.train_step import optimizers, partition, precision
from jaxtrain.train_step.settings import StepSettings
from jaxtrain.train_step.sharded_step import ShardedStep
from jaxtrain.train_step.state import Params, Skeleton, TrainState, abstract_state, make_layout

if TYPE_CHECKING:
    from jaxtrain.parallel.schedules import Schedule
    from jaxtrain.run.own_model import Given


def build(config: Config, *, mesh: AnyMesh | None = None, devices: Any = None, platform: str = "",
          objective: MakeObjective = configured, optimizer: optax.GradientTransformation | None = None,
          data: BatchSource | None = None, own: "Given | None" = None, extended: Sequence[Extension] = ()) -> Run:
    """Resolve a config against devices (all of them; an integer for an abstract mesh) and check that it fits.

    Args:
        platform: the kind of devices that an abstract mesh stands for: "cuda", "tpu" or "cpu"; "cuda:9" also says
            their compute capability.
        objective: what the run minimises, made from the config and the model without its numbers.
        optimizer: an optax transformation in place of the one that `config.optimizer` names.
        data: what yields the batch of each step, in place of `config.data`, which still says their shape.
        own: the user's model and loss function, in place of the config's.
        extended: extensions besides those that the config asks for.
    """
    data = data if data is None else as_batch_source(data)
    devices = training_devices(config.rl.sampler_devices) if devices is None else devices
    if own is not None:
        from jaxtrain import own_builder

        return own_builder.build(config, own, mesh or _mesh(config, devices), optimizer, data, extended)
    _check_given(config, mesh, optimizer, data)
    mesh = mesh or _mesh(config, devices)
    rules, classes = _rules(config), extensions.asked(config)
    kind = mesh_context.platform_of(mesh, platform)
    compute = precision.resolve(config.train.precision, kind)

    def checked(config: Config, rules: Rules) -> Schedules | None:
        refusals = [row for one in classes for row in one.refusals]
        return validation.checked_schedules(config, mesh, rules, compute, platform, refusals)

    schedules = checked(config, rules)
    how = Compute.of(config.model, config.train, config.mesh, kind, pipeline=schedules is not None)
    model = Skeleton.of(nnx.eval_shape(
        lambda: make_model(config.model, how, config.lora, scalar_head=config.scalar_head,
                           rngs=nnx.Rngs(params=jax.random.key(0)))))
    rule_checks.are_used(config, model.axes())
    frozen = is_frozen(config.model, config.train, config.lora, model.axes())
    axes, frozen_axes = partition.split(model.axes(), frozen)
    goal = made_objective(objective, config, model)
    options = {key: value for one in classes for key, value in one.layout_options(
        config, own_optimizer=optimizer is not None, pipeline=schedules is not None).items()}
    schedule = None
    if optimizer is None:
        c = config.optimizer
        schedule = optimizers.make_schedule(c, config.train.steps, config.plug_ins.get(c.schedule))
        optimizer = optimizers.make_optimizer(c, schedule, axes, config.model.growth, config.plug_ins.get(c.name))
    optimizer = optimizers.with_update_rules(optimizer, partition.like(model.metadata("update", ""), axes),
                                             config.model.experts.bias_rate)
    abstract = _abstract(config, model, goal, frozen, optimizer, compute)
    if config.train.frozen_dtype and not abstract.frozen:
        raise UserError("train.frozen_dtype", "nothing is frozen", "leave it out, or set lora.rank or train.freeze")
    base = rules  # the run's own may leave layers out, where stages have unequal numbers of them
    if schedules:
        rules = _pipeline_rules(rules, goal, schedules[0])
    layout = make_layout(abstract, axes, rules, mesh, config.optimizer.zero_stage, pipeline=schedules is not None,
                         frozen_axes=frozen_axes | goal.frozen_axes, **options)

    def check_shape(config: Config) -> Schedules | None:
        found = checked(config, base)
        rule_checks.activations_divide(config, rules, mesh)
        return found

    computation = ModelLoss(config, model, goal, compute, abstract, layout, schedules, check_shape)
    parts = Parts(config, model, goal, schedule, abstract, layout, computation.updates)
    hooks = (*extensions.made(classes, parts), *extended)
    if schedules:
        _warn_of_waste(goal, abstract.all_params, layout.state.all_params, schedules[0])
    rule_checks.activations_divide(config, rules, mesh)
    t = config.train
    settings = StepSettings(
        optimizer=optimizer, mesh=mesh, rules=rules, schedule=schedule, precision=compute,
        wide_layers=(t.layers_at_start_in_bf16, t.layers_at_end_in_bf16), accumulation=t.accumulation,
        clip_norm=config.optimizer.clip_norm, platform=platform, compiler_options=t.compiler_options,
        deterministic=t.deterministic or config.resilience.replay_every > 0,
        hang_limit=config.resilience.longest_hang)
    sharded = ShardedStep.of(settings, computation, abstract, layout, hooks)
    run = Run(config, model, goal, sharded, schedules, hooks, data)
    _check_data_stages(run)
    return run


def check_length(config: Config) -> None:
    """Refuse a run without a length."""
    if not (config.train.steps or config.train.epochs):
        raise UserError("train.steps", "a run of 0 steps trains nothing", "give 1 or more")


def with_known_length(build: Callable[[Config], Run], config: Config) -> Run:
    """Return the run that `build` makes of a config, with the steps that its `train.epochs` take, if it gives them.

    Then the data are read and tokenized here.
    """
    check_length(config)
    if not config.train.epochs:
        return build(config)
    from jaxtrain.data.loading import epochs

    counted = build(config)  # for its batches alone
    run = build(with_steps(config, epochs.steps_in(counted.batch_source, config.train.epochs)))
    vars(run).update({name: found for name, found in vars(counted).items() if name in ("corpus", "batch_source")})
    return run


def _check_given(config: Config, mesh: AnyMesh | None, optimizer: Any, data: BatchSource | None) -> None:
    """Refuse config keys that cannot be honored with what was given in place of the config's own."""
    if optimizer is not None:
        arguments.is_optimizer(optimizer)
    check_mesh(mesh)
    if data is not None:
        for key, asked in (("train.sample_tokens", config.train.sample_tokens), ("train.eval_every",
                           config.train.eval_every), ("checkpoint.best", "eval_" in config.checkpoint.best)):
            if asked:
                raise UserError(key, "batches given by data= have no tokenizer and no evaluation split", "leave it out")
    if config.train.remat == AUTO and mesh is not None:
        raise UserError("train.remat", "the planner chooses it for the mesh of the config, not for one given by mesh=",
                        "name a policy, such as full")
    if (chosen := "auto" if config.mesh.auto else "hsdp" if config.mesh.hsdp else "") and mesh is None:
        raise UserError(f"mesh.{chosen}", "no mesh was chosen", "call jt.build, which does")


def _mesh(config: Config, devices: Any) -> AnyMesh:
    return make_mesh(*(getattr(config.mesh, axis) for axis in AXES), devices=devices)


def _rules(config: Config) -> Rules:
    unknown = [name for name in config.mesh.overrides if name not in axis_rules.CONFIG_KEYS]
    if unknown:
        raise UserError(f"mesh.overrides.{unknown[0]}", "no model has this logical axis",
                        nearest(unknown[0], axis_rules.CONFIG_KEYS))
    rules = axis_rules.rules(config.mesh.rules, **config.mesh.overrides)
    rule_checks.agree(config, rules)
    return rules


def _abstract(config: Config, model: Skeleton, goal: Objective, is_frozen: Callable[[str], bool],
              optimizer: optax.GradientTransformation, compute: str) -> TrainState:
    params, frozen = partition.split(model.params(), is_frozen)
    frozen |= jax.eval_shape(lambda seed, params: goal.init_frozen(jax.random.key(seed), params), 0, model.params())
    own_dtype = model.metadata("compute_dtype", "") | goal.frozen_metadata("compute_dtype")
    frozen = precision.frozen_dtype(frozen, config.train.frozen_dtype, partition.like(own_dtype, frozen))
    return abstract_state(params, optimizer, compute == "float16", frozen)


def _pipeline_rules(rules: Rules, goal: Objective, schedule: "Schedule") -> Rules:
    if goal.pipeline_parts is None:
        raise UserError("mesh.stage", f"{type(goal).__name__} cannot be cut into stages", "set mesh.stage=1")
    if goal.pipeline_parts.placement(schedule.position).even:
        return rules
    return Rules({**rules.table, "layers": ()})  # spread otherwise in make_layout


def _check_data_stages(run: Run) -> None:
    """Refuse stages that cannot be trained now rather than when they begin."""
    for stage in data_stages.stages(run.config.data):
        try:
            shapes_of(run).allow((stage.batch, stage.seq_len))
        except UserError as error:
            raise UserError(error.key, f"from step {stage.start} on, {error.reason}", error.fix) from error


def _warn_of_waste(goal: Objective, params: Params, shardings: Any, schedule: "Schedule") -> None:
    """Stages without layers; layers that do not divide over stages and are spread by no other dimension either."""
    parts = goal.pipeline_parts
    assert parts
    stages, layers = schedule.stages, (max if parts.side_by_side else sum)(parts.stacks.values())
    if layers < stages * schedule.chunks:
        warnings.warn(f"mesh.stage: the model's {layers} layers leave {stages * schedule.chunks - layers} of {stages} "
                      f"stages x {schedule.chunks} chunks empty", stacklevel=3)
    both = [(leaf, where) for key in parts.stacks for leaf, where in zip(
        jax.tree.leaves(parts.lift(params)[key]), jax.tree.leaves(parts.lift(shardings)[key]), strict=True)]
    whole = [leaf for leaf, where in both if not any("stage" in axis_rules.axes_of(entry) for entry in where.spec)]
    share = sum(leaf.size for leaf in whole) / sum(leaf.size for leaf, _ in both)
    if share > 0.1:
        warnings.warn(f"mesh.stage: {stages} divides neither the layers nor another dimension of {share:.0%} of their "
                      f"parameters, so that every stage keeps all of these; choose a number that divides them",
                      stacklevel=3)
