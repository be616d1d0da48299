"""Mix sources by weight: which source and unit each place of the order draws, exact in every block and closed-form.

A block of BLOCK places has a fixed number of each source, its weight rounded by largest remainders, spread evenly, so
that any stretch of places follows the weights up to a few units. Nothing depends on earlier draws, so place 10^12 costs
as much as place 0.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.errors import UserError

BLOCK = 4096


@dataclass(frozen=True)
class Period:
    """A range of places from `start` on in which weights stay constant and no source ends."""

    start: int
    counts: tuple[int, ...]  # of each source in a block
    before: tuple[int, ...]  # units of each source drawn at earlier places


class Mixture:
    """A mixture of numbered sources; weights change at given places, and a source drops out at its limit."""

    def __init__(self, names: Sequence[str], weights: Sequence[tuple[int, Sequence[float]]],
                 limits: Sequence[float], seed: int):
        """`weights`: pairs (first place, weight of each source); `limits`: how many units each source may give."""
        self._names, self._limits, self._seed = names, limits, seed
        self.end: float = math.inf  # the first place at which no source is left
        self.periods: list[Period] = []
        before = (0,) * len(names)
        starts = [start for start, _ in weights]
        for (first, given), stop in zip(weights, [*starts[1:], math.inf], strict=True):
            start: float = first
            while start < stop and self.end == math.inf:
                left = [weight if before[i] < limits[i] else 0.0 for i, weight in enumerate(given)]
                if not any(left):
                    self.end = start
                    break
                period = Period(int(start), _counts(names, left), before)
                self.periods.append(period)
                start = min(stop, self._exhausted(period))
                if start < math.inf:
                    before = self._drawn(period, int(start))
        self._starts = np.array([period.start for period in self.periods])

    def locate(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each place, and the unit in that source's order, counted over all epochs."""
        sources, units = np.empty(len(places), np.int64), np.empty(len(places), np.int64)
        period_of = np.searchsorted(self._starts, places, "right") - 1
        for number in np.unique(period_of):
            period = self.periods[number]
            mine = np.flatnonzero(period_of == number)
            blocks, within = np.divmod(places[mine] - period.start, BLOCK)
            for block in np.unique(blocks):
                source, rank = self._block(period, int(block))
                some = blocks == block
                at = within[some]
                sources[mine[some]] = source[at]
                units[mine[some]] = (np.array(period.before)[source[at]] + rank[at]
                                     + np.array(period.counts)[source[at]] * block)
        return sources, units

    def find(self, source: int, units: np.ndarray) -> np.ndarray:
        """Return the place that draws each of these units of a source, counted over all epochs; -1: none does."""
        places = np.full(len(units), -1, np.int64)
        period_of = np.searchsorted([period.before[source] for period in self.periods], units, "right") - 1
        for number in np.unique(period_of):
            period = self.periods[number]
            if not (count := period.counts[source]):  # it is drawn no more
                continue
            mine = np.flatnonzero(period_of == number)
            blocks, ranks = np.divmod(units[mine] - period.before[source], count)
            for block in np.unique(blocks):
                within = np.flatnonzero(self._block(period, int(block))[0] == source)  # in the order of their ranks
                some = blocks == block
                places[mine[some]] = period.start + block * BLOCK + within[ranks[some]]
        return np.where(places < self.end, places, -1)

    def drawn(self, place: int) -> tuple[int, ...]:
        """Return how many units of each source are drawn before this place."""
        number = int(np.searchsorted(self._starts, place, "right")) - 1
        return self._drawn(self.periods[number], place)

    def _drawn(self, period: Period, place: int) -> tuple[int, ...]:
        blocks, within = divmod(place - period.start, BLOCK)
        source, _ = self._block(period, blocks)
        part = np.bincount(source[:within], minlength=len(self._names)).tolist()
        return tuple(b + c * blocks + p for b, c, p in zip(period.before, period.counts, part, strict=True))

    def _exhausted(self, period: Period) -> float:
        """Return the first place at which a source would exceed its limit."""
        found = math.inf
        for i, (limit, count, before) in enumerate(zip(self._limits, period.counts, period.before, strict=True)):
            if count and limit < math.inf:
                blocks, rest = divmod(int(limit) - before, count)
                source, rank = self._block(period, blocks)
                within = int(np.flatnonzero((source == i) & (rank == rest))[0])
                found = min(found, period.start + blocks * BLOCK + within)
        return found

    def _block(self, period: Period, number: int) -> tuple[np.ndarray, np.ndarray]:
        return _spread(period.counts, self._seed, period.start, number)


def _counts(names: Sequence[str], weights: Sequence[float]) -> tuple[int, ...]:
    """Return the number of places of each source in a block, by largest remainders."""
    total = math.fsum(weights)
    ideal = [weight / total * BLOCK for weight in weights]
    counts = [math.floor(share) for share in ideal]
    most_first = sorted(range(len(ideal)), key=lambda i: (counts[i] - ideal[i], i))
    for i in most_first[: BLOCK - sum(counts)]:
        counts[i] += 1
    for name, weight, count in zip(names, weights, counts, strict=True):
        if weight and not count:
            raise UserError(f"data.mixture.{name}.weight", f"{weight / total:.2g} of all rows is less than one of "
                            f"{BLOCK}", "give it more, or 0")
    return tuple(counts)


@functools.lru_cache(maxsize=64)
def _spread(counts: tuple[int, ...], seed: int, start: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each place in this block, its source and how many of that source come before it in the block.

    The block is divided into n equal parts for a source with n places; one place falls in each, at a hashed position.
    """
    source = np.repeat(np.arange(len(counts)), counts)
    rank = np.concatenate([np.arange(count) for count in counts])
    wished = (rank + _hashed(seed, start, number)) / np.repeat(counts, counts)
    order = np.argsort(wished, kind="stable")
    return source[order], rank[order]


def _hashed(*words: int) -> np.ndarray:
    """Return BLOCK numbers in [0, 1) hashed from the words by splitmix64, which no library update can change."""
    state = np.uint64(0)
    with np.errstate(over="ignore"):
        for word in words:
            state = _mix(np.array([state ^ np.uint64(word & 0xFFFFFFFFFFFFFFFF)]))[0]
        mixed = _mix(state + np.arange(BLOCK, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(11)) / 2.0**53


def _mix(z: np.ndarray) -> np.ndarray:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
