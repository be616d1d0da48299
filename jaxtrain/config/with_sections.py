"""Call a function with the sections of a config that it names: `def of(cls, skeleton, *, train: TrainConfig)`."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError, nearest

Made = TypeVar("Made")


def with_sections(function: Callable[..., Made], config: Config, *args: Any) -> Made:
    """Call `function` with `args`, and with the sections that its keyword-only parameters name."""
    every = _sections(config)
    names = named(function)
    if unknown := [name for name in names if name not in every]:
        where = getattr(function, "__qualname__", "it")
        raise UserError(unknown[0], f"{where} asks for this section, and a config has none of that name",
                        nearest(unknown[0], every))
    return function(*args, **{name: every[name] for name in names})


def named(function: Callable[..., Any]) -> list[str]:
    """Return the keyword-only parameters of a function that have no default: the sections that it reads."""
    return [each.name for each in inspect.signature(function).parameters.values()
            if each.kind is each.KEYWORD_ONLY and each.default is each.empty]


def _sections(config: Config) -> dict[str, Any]:
    """Return every section by name, with those of other packages."""
    sections = dict(vars(config))
    return sections | sections.pop("extensions")
