"""`jt.build` and `jt.plan`, as a notebook or a script uses them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optax
from jax.sharding import AbstractMesh, Mesh

from jaxtrain import builder
from jaxtrain.base import arguments
from jaxtrain.config.schema import Config
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.errors import UserError
from jaxtrain.objectives import MakeObjective
from jaxtrain.pages.notebook_drawing import Drawing
from jaxtrain.parallel.schedules import drawing
from jaxtrain.parallel.schedules.schedule import Schedule
from jaxtrain.plan import preflight, search
from jaxtrain.plan import targets as accelerators
from jaxtrain.run import Extension, Run, for_run
from jaxtrain.run.made_of_sections import configured
from jaxtrain.run.own_model import Given
from jaxtrain.sharding import drawings
from jaxtrain.sharding.axis_rules import AnyMesh, Axes
from jaxtrain.sharding.mesh import training_devices


def build(config: Config, *, mesh: AnyMesh | None = None, devices: Any = None, platform: str = "",
          objective: MakeObjective = configured, optimizer: optax.GradientTransformation | None = None,
          data: BatchSource | None = None, model: Any = None, loss_fn: Callable[..., Any] | None = None,
          axes: Axes = None, gather: bool = True, with_key: bool = False,
          extensions: Sequence[Extension] = ()) -> Run:
    """Resolve a config against devices and check that it fits; nothing is allocated.

    Args:
        config: `mesh=auto` in it becomes the mesh that the planner expects to be fastest, and `train.epochs` a number
            of steps, for which the data are read.
        mesh: a mesh in place of the one that `config.mesh` describes.
        devices: by default all of `jax.devices()` less `rl.sampler_devices`; an integer stands for that many absent
            devices.
        platform: the kind of devices that an abstract mesh stands for: "cuda", "tpu" or "cpu".
        objective: a function that makes the objective from the config and the model without its numbers.
        optimizer: an optax transformation in place of the one that `config.optimizer` names.
        data: the source of batches in place of `config.data`, which still gives their shape.
        model: an NNX module or a pytree of parameters, or a function without arguments that returns either, in place
            of the model of the config. It needs `loss_fn` and `optimizer` too, and `data` or a config with data.source;
            the sections mesh, train, checkpoint and resilience of the config say how it is trained, and keys that
            nothing would read are refused.
        loss_fn: called with the model and a batch, as `make_train_step` has it; so are `axes` and `gather`.
        with_key: call `loss_fn(model, batch, key)` with a key for dropout that follows from train.seed and the step.
        extensions: objects of classes that derive from `jt.Extension`, besides what the config asks for.
    """
    arguments.is_config(config)
    arguments.is_function("objective", objective, "give a function of the config and the model, or leave it out")
    if not isinstance(platform, str):
        raise UserError("platform", f"it is {arguments.kind(platform)}", 'give "cuda", "tpu" or "cpu"')
    for name, flag in (("gather", gather), ("with_key", with_key)):
        arguments.is_bool(name, flag)
    if not all(isinstance(one, Extension) for one in extensions):
        raise UserError("extensions", "not all of them are extensions", "give objects of classes that derive from "
                        "jt.Extension")
    own = Given(model, loss_fn, axes, gather, with_key) if model is not None or loss_fn is not None else None
    if mesh is None:
        present = training_devices(config.rl.sampler_devices) if devices is None else devices
        config = preflight.resolve(config, present, own_parts=(
            own is not None or optimizer is not None or objective != configured or bool(extensions)))
    if own is not None and objective != configured:
        raise UserError("objective", "a model of your own is trained by its loss_fn", "leave one of them out")
    for key, given in (("axes", axes is not None), ("gather", not gather), ("with_key", with_key)):
        if given and own is None:
            raise UserError(key, "it is about a model of your own", "give model= and loss_fn= too, or leave it out")
    return for_run(builder.with_known_length(lambda config: builder.build(
        config, mesh=mesh, devices=devices, platform=platform, objective=objective, optimizer=optimizer, data=data,
        own=own, extended=extensions), config))


def show(what: Any, names: Sequence[Any] = ()) -> Drawing:
    """Draw a mesh, which devices hold which part of an array, or a pipeline schedule.

    A notebook shows the drawing; `.save("mesh.svg")` writes it into a file.

    Args:
        what: a mesh, an array or a shape with a sharding, or one of `run.schedules`. A run and a plan show themselves.
        names: of the array's dimensions, such as its logical axis names.
    """
    if isinstance(what, Mesh | AbstractMesh):
        return drawings.of_mesh(what)
    if isinstance(what, Schedule):
        return Drawing(drawing.svg(what), drawing.text(what), lambda: drawing.svg(what))
    if getattr(what, "sharding", None) is not None:
        return drawings.of_array(what, names)
    raise UserError("what", f"{type(what).__name__} cannot be drawn",
                    "give a mesh, an array that has a sharding, or a schedule of run.schedules")


class Plan(search.Found):
    """The layouts of a config on a target: a table when printed, and a page in a notebook."""

    def __repr__(self) -> str:
        return f"{self}"

    def _repr_html_(self) -> str:
        from jaxtrain.plan.report.html import in_notebook

        return in_notebook(self)


def plan(config: Config, target: str, *, targets: str | Path | None = None, precisions: Sequence[str] = ()) -> Plan:
    """Rank the layouts of a config on a target such as "h100x256", fastest first; print the result for a table.

    Args:
        config: the model, the data's shape and the training keys; its mesh is ignored.
        target: a kind of accelerator and how many of them.
        targets: a JSON file with accelerators of your own, or with what was measured of them.
        precisions: further values of `train.precision` to be ranked as well.
    """
    arguments.is_config(config)
    if not isinstance(target, str):
        raise UserError("target", f"it is {arguments.kind(target)}, not a target's name", 'give one such as "h100x8"')
    if isinstance(precisions, str):
        raise UserError("precisions", f"{precisions!r} is one text", f'give a list, as in ["{precisions}"]')
    return Plan(**vars(search.search(config, *accelerators.parse(target, targets), precisions=precisions)))
