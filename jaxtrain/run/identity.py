"""The identity of a run, for config.json and run.json: which keys count, and what the config does not name."""

import contextlib
from typing import Any

import jax
from jax.sharding import AxisType

from jaxtrain.base import plug_ins
from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.observe.own_parts import describe, describe_data, describe_objective, describe_optimizer
from jaxtrain.run import Extension, Run, name_of
from jaxtrain.run.made_of_sections import configured
from jaxtrain.sharding import mesh_context


def settings(run: Run) -> dict[str, JsonObject]:
    """Return the part of the config that counts for a run, as config.json has it."""
    sections = run.config.to_dict()
    return sections if run.own is None else run.own.counted(sections, of_text=run.data is None)


def own_parts(run: Run, recorded: JsonMapping) -> JsonObject:
    """Return the description of what the config does not name, for run.json (observe/own_parts.py).

    `recorded`: what run.json says of the workdir's run, {} for a new one.
    """
    found = but_optimizer_and_data(run, recorded)
    if run.sharded.settings.schedule is None:
        found["optimizer"] = _optimizer(run)
    return found if run.data is None else found | {"data": describe_data(run.data)}


def _optimizer(run: Run) -> JsonObject:
    """Return the description of a user's optimizer, traced without a mesh, or, where it needs one, with one device."""
    try:
        return describe_optimizer(run.sharded.settings.optimizer, run.abstract.params)
    except Exception:  # such as a collective of a mesh axis, or a region whose mesh is that of the step
        with contextlib.suppress(Exception):  # it needs to know more of the devices than there is to know
            return optimizer_on_one_device(run)
        return {"state": "unknown", "update": {}}


def optimizer_on_one_device(run: Run) -> JsonObject:
    """Return the description of a user's optimizer, traced for one CPU device, whose mesh has the axes of the run's."""
    names = run.mesh.axis_names
    one = jax.sharding.AbstractMesh((1,) * len(names), names, axis_types=(AxisType.Auto,) * len(names))
    with mesh_context.use(one, run.sharded.rules, "cpu"):
        return describe_optimizer(run.sharded.settings.optimizer, run.abstract.params)


def but_optimizer_and_data(run: Run, recorded: JsonMapping) -> JsonObject:
    """Return the description of the model, the loss and the extensions that the config does not name."""
    found: dict[str, Any] = {}
    goal = describe_objective(run.objective, recorded.get("objective") or {})
    if run.own is not None:
        found |= {"model": {"class": name_of(run)}, "loss_fn": goal}
    elif goal != describe_objective(configured(run.config, _model(run)), {}):
        found["objective"] = goal
    if given := _given(run):
        found["extensions"] = [describe(one) for one in given]
    return found


def has_own_parts(run: Run) -> bool:
    """Return whether the model, the objective, the optimizer or an extension is not the config's."""
    return (run.own is not None or bool(_given(run)) or run.sharded.settings.schedule is None
            or describe_objective(run.objective, {}) != describe_objective(configured(run.config, _model(run)), {}))


def manifests(run: Run) -> dict[str, str]:
    """Return the hash of the data of each source; none for batches that were given to `build`."""
    return {} if run.data is not None else run.corpus.manifests


def _given(run: Run) -> list[Extension]:
    """Return the extensions that were given to `build`, and that neither jaxtrain nor a section of the config names."""
    named = tuple(map(type, run.config.plug_ins.values()))
    return [one for one in run.extensions
            if type(one).__module__.partition(".")[0] != "jaxtrain" and plug_ins.options_of(type(one)) not in named]


def _model(run: Run) -> Any:
    assert run.model is not None
    return run.model
