"""What keeps a run alive, or ends it well."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtrain.resilience.interrupt import Interrupt

_HOME = {"Interrupt": "interrupt"}

__all__ = ["Interrupt"]


def __getattr__(name: str):  # when first used: the supervisor lives in here too, and does without JAX
    if name not in _HOME:
        raise AttributeError(f"module 'jaxtrain.resilience' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"jaxtrain.resilience.{_HOME[name]}"), name)
    return value
