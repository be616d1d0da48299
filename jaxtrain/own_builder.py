"""A run of a model and loss function of the user's: `build(config, model=..., loss_fn=..., optimizer=..., data=...)`.

The sections mesh, train, checkpoint and resilience of the config apply, and data where no `data=` is given. Keys of a
model or an optimizer from jaxtrain have no effect here, so a config that sets one is refused.
"""

from collections.abc import Sequence

import optax

from jaxtrain import extensions
from jaxtrain.base.narrow_formats import NARROW
from jaxtrain.config.schema import Config, DataConfig
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.errors import UserError
from jaxtrain.run import Extension, Parts, Run, shapes_of
from jaxtrain.run.own_model import Given, OwnModel, OwnObjective, refuse_vain_keys
from jaxtrain.sharding import axis_rules
from jaxtrain.sharding.axis_rules import AnyMesh
from jaxtrain.train_step.standalone import TrainStep, make_train_step
from jaxtrain.train_step.state import Layout, TrainState


def build(config: Config, own: Given, mesh: AnyMesh, optimizer: optax.GradientTransformation | None,
          data: BatchSource | None, extended: Sequence[Extension]) -> Run:
    """Check that nothing is missing and nothing set in vain, and lay the state out; nothing is allocated."""
    _check(config, own, optimizer, data)
    t, o = config.train, config.optimizer
    assert own.loss_fn and optimizer
    alone = make_train_step(
        own.loss_fn, optimizer, mesh=mesh, rules=axis_rules.rules(config.mesh.rules, **config.mesh.overrides),
        axes=own.axes, accumulation=t.accumulation, clip_norm=o.clip_norm, precision=t.precision,
        zero_stage=o.zero_stage, gather=own.gather, seed=t.seed if own.with_key else None)
    first = data.shape(0) if data is not None else (config.data.global_batch_size, config.data.seq_len)
    refuse_vain_keys(config, with_key=own.with_key, of_text=data is None, rows=first[0])
    classes, hooks = extensions.asked(config), []

    def hooks_of(abstract: TrainState, layout: Layout) -> Sequence[Extension]:
        hooks[:] = *extensions.made(classes, Parts(config, None, OwnObjective(step), None, abstract, layout)), *extended
        return tuple(hooks)

    step = TrainStep(alone.own, alone.settings, hooks_of)
    step.abstract(own.model)
    run = Run(config, step.skeleton, OwnObjective(step), step.sharded, extensions=tuple(hooks), data=data,
              own=OwnModel(step, own.model))
    shapes_of(run).allow(first)
    return run


def _check(config: Config, own: Given, optimizer: optax.GradientTransformation | None,
           data: BatchSource | None) -> None:
    """Refuse a model of the user's without all that has to come with it."""
    text = None if config.data == DataConfig() else config.data  # so that nobody trains on a default by mistake
    for name, part, fix in (
            ("model", own.model, "give an NNX module, a pytree of parameters, or a function that returns either"),
            ("loss_fn", own.loss_fn, "give a function of the model and a batch that returns the mean loss or "
             "jt.Weighted"),
            ("optimizer", optimizer, "pass an optax optimizer, such as optax.adamw(1e-3)"),
            ("data", text if data is None else data, "give a jt.BatchSource, such as jt.BatchFunction(function_of_the_"
             "step), or a Grain dataset, or name data.source in the config")):
        if part is None:
            raise UserError(name, "it is missing; with model= you must pass one too" if own.model is not None else
                            "it is missing", fix)
    if (kind := config.train.precision) in NARROW:
        raise UserError("train.precision", f"{kind} is the precision of products in jaxtrain's own layers",
                        "use bfloat16")
