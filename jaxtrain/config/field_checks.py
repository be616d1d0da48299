"""Checks of one field of a config section, and fields derived from others."""

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any

from jaxtrain.errors import UserError, nearest

_MOST = "most"
LARGEST = 2**31 - 1  # of a whole number whose field declares no other bound: what an array's index holds


def at_most(default: int, most: int) -> Any:
    """Return a field of whole numbers with this default, of which none may be above `most`."""
    return dataclasses.field(default=default, metadata={_MOST: most})


@cache
def most(section: type) -> dict[str, int]:
    """Return the bound of each field that declares one, of a section's class; a base's counts where it has none."""
    return {name: field.metadata[_MOST] for cls in reversed(section.__mro__)
            for name, field in getattr(cls, "__dataclass_fields__", {}).items() if _MOST in field.metadata}


def bounded(section: Any, name: str) -> None:
    """Refuse a whole number beyond the bound that its field declares, before anything is counted or allocated by it."""
    within_bounds(type(section), name, {field.name: getattr(section, field.name)
                                        for field in dataclasses.fields(section)})


def within_bounds(cls: type, section: str, values: Mapping[str, Any]) -> None:
    """Refuse values of fields as `bounded` does, before they are those of a section."""
    for name, value in values.items():
        limit = most(cls).get(name, LARGEST)
        if isinstance(value, int) and not -LARGEST <= value <= limit:
            said = f"{value:,}" if abs(value) < 10**15 else f"a number of {value.bit_length()} bits"
            raise UserError(f"{section}.{name}", f"{said} is {'above' if value > 0 else 'below'} the limit",
                            f"give {limit:,} or less" if value > 0 else "give 0 or more")


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
