"""Parts of a run that are made of just those sections of its config which they read.

A part names the sections as keyword-only parameters: `def of(cls, skeleton, *, train: TrainConfig, data: DataConfig)`.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from jaxtrain.config.family import family
from jaxtrain.config.part_tables import OBJECTIVES
from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError, nearest
from jaxtrain.objectives import ASKED, MakeObjective, Objective
from jaxtrain.train_step.state import Skeleton

Made = TypeVar("Made")


def with_sections(function: Callable[..., Made], config: Config, *args: Any) -> Made:
    """Call `function` with `args`, and with the sections that its keyword-only parameters name."""
    every = dict(vars(config))
    every |= every.pop("plug_ins")
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
    """Return the objective that a config names or asks for, or that its family has."""
    asked = next((place for key, place in ASKED.items() if _asks(config, key)), "")
    place = family(config.model.name).objective or asked
    if config.train.objective or not place:
        name = config.train.objective or "next_token"
        made: Any = made_objective(OBJECTIVES.load(name).of, config, skeleton)
        options = config.plug_ins.get(name)
        return made if options is None else replace(made, options=options)
    module, _, name = place.partition(":")
    return made_objective(getattr(importlib.import_module(module), name).of, config, skeleton)


def _asks(config: Config, key: str) -> bool:
    key, _, wanted = key.partition("=")
    section, _, name = key.partition(".")
    value = getattr(getattr(config, section), name)
    return value == wanted if wanted else bool(value)


def _named(function: Callable[..., Any]) -> list[str]:
    """Return the keyword-only parameters of a function that have no default."""
    return [each.name for each in inspect.signature(function).parameters.values()
            if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
