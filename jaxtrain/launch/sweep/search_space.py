"""The search space of a sweep: the values that each key may take, and the points of a grid or a random search."""

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtrain.base.annotations import Json
from jaxtrain.errors import UserError, nearest

Point = dict[str, Any]  # a value for each key that is searched
_ATTEMPTS = 1000  # draws that were there before, until the others are taken in order
FIELDS = ("values", "low", "high", "log", "int")


@dataclass(frozen=True)
class Range:
    """The values of one key: some given ones, or the numbers between two."""

    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False  # as likely between 1 and 10 as between 10 and 100
    int: bool = False  # whole numbers, both ends included

    def at(self, part: float) -> Json:
        """Return the value at a part of the range, from 0 up to but not including 1."""
        if self.values:
            return self.values[math.floor(part * len(self.values))]
        low, high = self.low, self.high + self.int
        value = low * (high / low) ** part if self.log else low + (high - low) * part
        return min(math.floor(value), math.floor(self.high)) if self.int else min(value, self.high)

    def ends(self) -> tuple[Json, ...]:
        """Return the values that a config has to take if it takes all."""
        return self.values or ((int(self.low), int(self.high)) if self.int else (self.low, self.high))


def range_of(key: str, said: Json) -> Range:
    """Return what the sweep's file says of a key; every mistake is a UserError."""
    if isinstance(said, list):
        said = {"values": said}
    if not isinstance(said, dict):
        raise UserError(f"keys.{key}", f"{said!r} is one value", "put it under fixed, or give several: [1, 2], or "
                        "{low = 1, high = 2}")
    if unknown := next((name for name in said if name not in FIELDS), None):
        raise UserError(f"keys.{key}.{unknown}", "a range has no such key", nearest(unknown, FIELDS))
    if "values" in said:
        values = said["values"]
        if len(said) > 1:
            raise UserError(f"keys.{key}", "it has values and a range", "give one of them")
        if not isinstance(values, list) or not values:
            raise UserError(f"keys.{key}.values", f"{values!r} is not a list of values", "write them in [ ]")
        if len({repr(value) for value in values}) < len(values):
            raise UserError(f"keys.{key}.values", "a value is there twice", "leave one out")
        return Range(tuple(values))
    for name in ("low", "high"):
        if type(said.get(name)) not in (int, float) or not math.isfinite(said[name]):
            raise UserError(f"keys.{key}.{name}", "it is missing or not a number", "give low and high, or values")
    for name in ("log", "int"):
        if type(said.get(name, False)) is not bool:
            raise UserError(f"keys.{key}.{name}", f"{said[name]!r} is not true or false", "give one of them")
    made = Range(**said)
    if made.low >= made.high:
        raise UserError(f"keys.{key}", f"low={made.low} is not below high={made.high}", "exchange them")
    if made.log and made.low <= 0:
        raise UserError(f"keys.{key}.low", f"a logarithmic range cannot begin at {made.low}", "give more than 0")
    if made.int and (made.low != int(made.low) or made.high != int(made.high)):
        raise UserError(f"keys.{key}", "low and high are not whole numbers", "give whole ones, or leave int out")
    return made


def grid(ranges: Mapping[str, Range]) -> Iterator[Point]:
    """Yield all points, the last key changing fastest."""
    for values in itertools.product(*(one.values or range(int(one.low), int(one.high) + 1) for one in ranges.values())):
        yield dict(zip(ranges, values, strict=True))


def random_points(ranges: Mapping[str, Range], seed: int) -> Iterator[Point]:
    """Yield random points, each once, until there are no others; the n-th follows from the seed alone."""
    seen: set[str] = set()
    for number in itertools.count():
        for attempt in range(_ATTEMPTS):
            chance = random.Random(f"{seed}/{number}/{attempt}")
            point = {key: one.at(chance.random()) for key, one in ranges.items()}
            if repr(point) not in seen:
                break
        else:
            if size(ranges) < math.inf:
                yield from (point for point in grid(ranges) if repr(point) not in seen)
            return
        seen.add(repr(point))
        yield point


def size(ranges: Mapping[str, Range]) -> float:
    """Return how many points there are; infinitely many, where a key may be any number of a range."""
    return math.prod(len(one.values) if one.values else one.high - one.low + 1 if one.int else math.inf
                     for one in ranges.values())
