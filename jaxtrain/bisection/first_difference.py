"""The operation at which two traced steps part, found by following values back from a result that differs.

Programs may compute the same in other ways: what counts is whether a value is among those of the other program. From a
result that is not, the way leads back over values that are not, to an operation whose inputs all are.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxtrain.bisection.operations import Operation, Trace, Value, allowed_by


@dataclass(frozen=True)
class Difference:
    """The results and the operation in which two steps part."""

    results: list[str]  # those that differ
    of: tuple[Operation | None, Operation | None]  # in each program; None: all that leads to them is in the other one


def difference(a: Trace, b: Trace) -> Difference | None:
    """Return where two steps part; None: they compute the same."""
    names = [name for name in a.results if name in b.results]
    results = sorted([name for name in names if not _same(a.results[name], b.results[name])], key=_order)
    if not results:
        return None
    known = _Known(a), _Known(b)
    return Difference(results, (_first([a.results[name] for name in results], known[1]),
                                _first([b.results[name] for name in results], known[0])))


def _order(name: str) -> int:
    """Return the order in which results follow from each other: the loss, gradients, and what becomes of them."""
    return 0 if name == "the loss" else 1 if name.startswith("the gradient") else 2


def _same(one: Value, other: Value) -> bool:
    return one.size == other.size and one.is_as(other.norm, other.sums, other.rounding)


def unsure(a: Trace, b: Trace) -> list[str]:
    """Return results that differ by more than a part in a thousand, of which rounding in float64 may be a part.

    Those that are nothing next to others of their kind are left out: gradients whose terms cancel.
    """
    largest: dict[int, float] = defaultdict(float)
    for name, value in a.results.items():
        largest[_order(name)] = max(largest[_order(name)], value.norm)
    return [name for name, one in a.results.items()
            if name in b.results and max(one.rounding, b.results[name].rounding) >= 1e-5
            and one.norm > 1e-9 * largest[_order(name)]
            and np.abs(one.sums - b.results[name].sums).max() > 4e-3 * max(one.norm, b.results[name].norm)]


class _Known:
    """The values of a program."""

    def __init__(self, program: Trace):
        of_size: dict[int, list[np.ndarray]] = defaultdict(list)
        for value in _values(program):
            of_size[value.size].append(value.sums)
        self._sums = {size: np.stack(sums) for size, sums in of_size.items()}

    def __contains__(self, value: Value) -> bool:
        if value.size not in self._sums:
            return False
        away = np.abs(self._sums[value.size] - value.sums).max(1)
        return bool((away <= 4 * allowed_by(value.rounding) * value.norm).any())


def _values(program: Trace) -> Iterator[Value]:
    yield from program.given
    for _, values in program.operations:
        yield from values


def _first(results: list[Value], known: _Known) -> Operation | None:
    """Return the earliest operation behind results that has an unknown value, and only known ones as inputs."""
    first, seen, waiting = None, set(), [*results]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or value.maker is None or value in known:
            continue
        seen.add(id(value))
        unknown = [one for one in value.maker.inputs if one not in known]
        # An unknown constant is the operation's own.
        if not any(one.maker for one in unknown) and (first is None or value.maker.number < first.number):
            first = value.maker
        waiting += unknown
    return first
