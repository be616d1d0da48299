"""Parts of a run that are made of just those sections of its config which they read.

A part names the sections as keyword-only parameters: `def of(cls, skeleton, *, train: TrainConfig, data: DataConfig)`.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError, nearest
from jaxtrain.objectives import MakeObjective, Objective, objective_of
from jaxtrain.train_step.state import Skeleton

Made = TypeVar("Made")


def with_sections(function: Callable[..., Made], config: Config, *args: Any) -> Made:
    """Call `function` with `args`, and with the sections that its keyword-only parameters name."""
    every = dict(vars(config))
    every |= every.pop("extensions")
    names = _named(function)
    if unknown := [name for name in names if name not in every]:
        where = getattr(function, "__qualname__", "it")
        raise UserError(unknown[0], f"{where} asks for this section, and a config has none of that name",
                        nearest(unknown[0], every))
    return function(*args, **{name: every[name] for name in names})


def made_objective(make: MakeObjective, config: Config, skeleton: Skeleton) -> Objective:
    """Return the objective that `make` returns, which takes sections by name, or the whole config and the model."""
    return with_sections(make, config, skeleton) if _named(make) else make(config, skeleton)


def configured(config: Config, skeleton: Skeleton) -> Objective:
    """Return the objective that a config names, or that its family has."""
    return made_objective(with_sections(objective_of, config), config, skeleton)


def _named(function: Callable[..., Any]) -> list[str]:
    """Return the keyword-only parameters of a function that have no default."""
    return [each.name for each in inspect.signature(function).parameters.values()
            if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
