"""Checks of what is given to the public functions, so that a wrong type is one sentence and not a traceback."""

import inspect
import os
from typing import Any

from jaxtrain.errors import UserError

_SOURCE = ("__getitem__", "rows", "shape", "shapes_of", "tokens", "epochs")  # of a BatchSource


def kind(value: object) -> str:
    """Return what a value is, in words: its text, if it is short, or its type."""
    if value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= 40):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def is_config(value: object) -> None:
    """Refuse what is not a `Config`."""
    if not (hasattr(value, "mesh") and hasattr(value, "train")):
        raise UserError("config", f"it is {kind(value)}, not a config", 'make one by jt.load_config("configs/gpt.py") '
                        'or jt.make_config({"train": {"steps": 10}})')


def is_run(value: object) -> None:
    """Refuse what is not a `Run`."""
    if not hasattr(value, "value_and_grad"):
        raise UserError("run", f"it is {kind(value)}, not a run", "make one by jt.build or jt.load_model")


def is_optimizer(value: object) -> None:
    """Refuse what is not an optax transformation."""
    if isinstance(value, type) or not all(callable(getattr(value, name, None)) for name in ("init", "update")):
        raise UserError("optimizer", f"it is {kind(value)}, not an optax transformation",
                        "give one such as optax.adamw(1e-3)")


def is_batch_source(value: object) -> None:
    """Refuse what is not a `BatchSource`."""
    if not has_batches(value):
        how = "wrap it as" if callable(value) else "wrap a function that returns the batch of a step, as"
        raise UserError("data", f"it is {kind(value)}, not a jt.BatchSource or a Grain dataset",
                        f"{how} jt.BatchFunction(function)")


def has_batches(value: object) -> bool:
    """Return whether a value is a `BatchSource`."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in _SOURCE)


def is_function(name: str, value: object, fix: str, takes: int | None = None) -> None:
    """Refuse what cannot be called, or, if it is known, not with so many arguments."""
    if not callable(value):
        raise UserError(name, f"it is {kind(value)}, not a function", fix)
    if takes is not None:
        try:
            signature = inspect.signature(value)
        except (TypeError, ValueError):  # of a function in C
            return
        try:
            signature.bind(*[None] * takes)
        except TypeError as error:
            raise UserError(name, f"it cannot be called with {takes or 'no'} argument{'s' * (takes != 1)} ({error})",
                            fix) from None


def is_path(name: str, value: object, fix: str) -> None:
    """Refuse what is not a path."""
    if not isinstance(value, str | os.PathLike):
        raise UserError(name, f"it is {kind(value)}, not a path", fix)


def is_mapping(name: str, value: Any, fix: str) -> None:
    """Refuse what is not a mapping from text."""
    if not hasattr(value, "items"):
        raise UserError(name, f"it is {kind(value)}, not a mapping", fix)
    if wrong := [key for key in value if not isinstance(key, str)]:
        raise UserError(name, f"its key {wrong[0]!r} is not text", fix)


def is_bool(name: str, value: object) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise UserError(name, f"it is {kind(value)}", "give True or False")


def is_seed(name: str, value: object) -> None:
    """Refuse what is not a whole number."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UserError(name, f"it is {kind(value)}, not a whole number", "give one such as 0")
