"""The values that a field of a config section may have, declared with its default; and fields derived from others."""

import dataclasses
from functools import cache
from typing import Any

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.errors import UserError, nearest

_LIMITS = "limits"
LARGEST = 2**31 - 1  # of a whole number whose field declares no other bound: what an array's index holds


@dataclasses.dataclass(frozen=True)
class Limits:
    """The values that a field may have; for a list, its entries."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] = ()
    of_steps: bool = False  # a number of steps, which a config may also give as a fraction of those of the run
    fix: str = ""  # what to do about another value, where that is not clear from the limits

    def check(self, key: str, value: Any) -> None:
        """Refuse another value."""
        if isinstance(value, int):
            limit = LARGEST if self.most is None else self.most
            if not -LARGEST <= value <= limit:
                said = f"{value:,}" if abs(value) < 10**15 else f"a number of {value.bit_length()} bits"
                raise UserError(key, f"{said} is {'above' if value > 0 else 'below'} the limit",
                                f"give {limit:,} or less" if value > 0 else "give 0 or more")
        for each in (value if isinstance(value, list) else [value]) if self.choices else ():
            one_of(key, each, self.choices)
        if isinstance(value, int | float) and not self._hold(value):
            raise UserError(key, f"{value} {self._reason}", self.fix or self._fix)

    def _hold(self, value: float) -> bool:
        return ((self.least is None or value >= self.least) and (self.above is None or value > self.above)
                and (self.most is None or value <= self.most) and (self.below is None or value < self.below))

    @property
    def _reason(self) -> str:
        if self.below is not None or isinstance(self.most, float):
            low = f"({self.above:g}" if self.least is None else f"[{self.least:g}"
            return f"is not in {low}, " + (f"{self.most:g}]" if self.below is None else f"{self.below:g})")
        if self.above is not None:
            return f"is not above {self.above:g}" if self.above else "is not positive"
        return f"is below {self.least:,}" if self.least else "is negative"

    @property
    def _fix(self) -> str:
        return f"give {self.least:,} or more" if self.above is None else f"give a number above {self.above:g}"


def number(default: float, **limits: Any) -> Any:
    """Return a field of numbers with this default, of which all have to be within `Limits`."""
    return dataclasses.field(default=default, metadata={_LIMITS: limits})


def at_most(default: int, most: int, **limits: Any) -> Any:
    """Return a field of whole numbers with this default, of which none may be above `most`."""
    return number(default, most=most, **limits)


def choice(default: Any, *choices: Any) -> Any:
    """Return a field with this default, whose value has to be one of these."""
    return dataclasses.field(default=default, metadata=each_of(*choices))


def each_of(*choices: str) -> dict[str, Any]:
    """Return the metadata of a field of lists, of which each entry has to be one of these."""
    return {_LIMITS: {"choices": choices}}


@cache
def limits(section: type) -> dict[str, Limits]:
    """Return the limits of each field of a section's class that declares some; a base's count where it does not."""
    found: dict[str, dict[str, Any]] = {}
    for cls in reversed(section.__mro__):
        for name, field in getattr(cls, "__dataclass_fields__", {}).items():
            found[name] = found.get(name, {}) | field.metadata.get(_LIMITS, {})
    return {name: Limits(**declared) for name, declared in found.items() if declared}


def most(section: type) -> dict[str, int]:
    """Return the bound of each field of whole numbers that declares one."""
    return {name: declared.most for name, declared in limits(section).items() if isinstance(declared.most, int)}


def bounded(section: Any, name: str) -> None:
    """Refuse values beyond the limits that fields declare, before anything is counted or allocated by them."""
    within_bounds(type(section), name, {field.name: getattr(section, field.name)
                                        for field in dataclasses.fields(section)})


def within_bounds(cls: type, section: str, values: JsonMapping) -> None:
    """Refuse values of fields as `bounded` does, before they are those of a section."""
    for name, value in values.items():
        limits(cls).get(name, _OF_ANY).check(f"{section}.{name}", value)


def one_of(key: str, value: object, allowed: tuple) -> None:
    """Refuse a value that is not one of those allowed."""
    if value not in allowed:
        fix = nearest(value, allowed) if isinstance(value, str) else f"known: {', '.join(map(str, allowed))}"
        raise UserError(key, f"{value!r} is not supported", fix)


def derive(section: Any, name: str, value: object) -> None:
    """Set a field that was left 0 to the value that follows from the others."""
    if not getattr(section, name):
        object.__setattr__(section, name, value)


_OF_ANY = Limits()
