"""Delta debugging: the smallest set of changes that still does what all of them together do.

The algorithm is `ddmin` of A. Zeller and R. Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE
Transactions on Software Engineering 28(2), 2002: halves are tried, then what halves leave, then ever smaller parts.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def smallest(every: Sequence[T], does: Callable[[frozenset[T]], bool]) -> list[T]:
    """Return a part of `every`, in its order, that does it and of which nothing can be left out.

    `does` must be true of all together. It is asked once for each set.
    """
    known: dict[frozenset[T], bool] = {}

    def asked(part: Sequence[T]) -> bool:
        key = frozenset(part)
        if key not in known:
            known[key] = does(key)
        return known[key]

    left, parts = list(every), 2
    while len(left) > 1:
        chunks = [left[len(left) * n // parts:len(left) * (n + 1) // parts] for n in range(parts)]
        others = [[one for one in left if one not in chunk] for chunk in chunks] if parts > 2 else []
        if (found := next((chunk for chunk in chunks if asked(chunk)), None)) is not None:
            left, parts = found, 2
        elif (found := next((other for other in others if asked(other)), None)) is not None:
            left, parts = found, max(parts - 1, 2)
        elif parts >= len(left):
            break
        else:
            parts = min(2 * parts, len(left))
    return left
