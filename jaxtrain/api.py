"""`jt.build` and `jt.plan`, as a notebook or a script uses them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from jaxtrain import run
from jaxtrain.config.schema import Config
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.objectives import MakeObjective, NextToken
from jaxtrain.plan import preflight, search
from jaxtrain.plan import targets as accelerators
from jaxtrain.sharding.rules import AnyMesh


def build(config: Config, *, mesh: AnyMesh | None = None, devices: Any = None, platform: str = "",
          objective: MakeObjective = NextToken.of, optimizer: optax.GradientTransformation | None = None,
          data: BatchSource | None = None) -> run.Run:
    """Resolve a config against devices and check that it fits; nothing is allocated.

    Args:
        config: `mesh=auto` in it becomes the mesh that the planner expects to be fastest.
        mesh: a mesh in place of the one that `config.mesh` describes.
        devices: all of `jax.devices()` by default; an integer stands for so many that are not here.
        platform: the kind of devices that an abstract mesh stands for: "cuda", "tpu" or "cpu".
        objective: what the run minimises, made from the config and the model without its numbers.
        optimizer: an optax transformation in place of the one that `config.optimizer` names.
        data: what yields the batch of each step, in place of `config.data`, which still says their shape.
    """
    if mesh is None:
        config = preflight.resolve(config, jax.devices() if devices is None else devices,
                                   own_parts=optimizer is not None or objective != NextToken.of)
    return run.build(config, mesh=mesh, devices=devices, platform=platform, objective=objective, optimizer=optimizer,
                     data=data)


def plan(config: Config, target: str, *, targets: str | Path | None = None,
         precisions: Sequence[str] = ()) -> search.Found:
    """Rank the layouts of a config on a target such as "h100x256", fastest first; print the result for a table.

    Args:
        config: the model, the data's shape and the training keys; its mesh is left out of account.
        target: a kind of accelerator and how many of them.
        targets: a JSON file with accelerators of your own, or with what was measured of them.
        precisions: further values of `train.precision` to be ranked as well.
    """
    return search.search(config, *accelerators.parse(target, targets), precisions=precisions)
