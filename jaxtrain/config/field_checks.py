"""Checks of one field of a config section, and fields derived from others."""

from typing import Any

from jaxtrain.errors import UserError, nearest


def one_of(key: str, value: Any, allowed: tuple) -> None:
    """Refuse a value that is not one of those allowed."""
    if value not in allowed:
        fix = nearest(value, allowed) if isinstance(value, str) else f"known: {', '.join(map(str, allowed))}"
        raise UserError(key, f"{value!r} is not supported", fix)


def positive(section: Any, name: str, keys: str) -> None:
    """Refuse a number that is not above 0, for each of the space-separated keys."""
    for key in keys.split():
        if not getattr(section, key) > 0:
            raise UserError(f"{name}.{key}", f"{getattr(section, key)} is not positive", "give a number above 0")


def not_negative(section: Any, name: str, keys: str) -> None:
    """Refuse a number below 0, for each of the space-separated keys."""
    for key in keys.split():
        if not getattr(section, key) >= 0:
            raise UserError(f"{name}.{key}", f"{getattr(section, key)} is negative", "give 0 or more")


def derive(section: Any, name: str, value: Any) -> None:
    """Set a field that was left 0 to the value that follows from the others."""
    if not getattr(section, name):
        object.__setattr__(section, name, value)
