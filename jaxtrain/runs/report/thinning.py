"""Thin a curve of any length to a few thousand points that keep its extremes, and average it over equal stretches."""

import itertools

import numpy as np


def extremes(values: np.ndarray, points: int) -> np.ndarray:
    """Return where to draw a curve: everywhere, or at the least and the greatest of each of `points` / 2 stretches.

    Places without a finite value are not among them.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) <= points:
        return finite
    drawn = {finite[0], finite[-1]}
    for first, end in itertools.pairwise(_edges(len(finite), points)):
        stretch = values[finite[first:end]]
        drawn |= {finite[first + np.argmin(stretch)], finite[first + np.argmax(stretch)]}
    return np.array(sorted(drawn))


def averages(values: np.ndarray, points: int) -> np.ndarray:
    """Return the means of `points` / 2 equal stretches, or all values if there are no more; NaN counts nowhere."""
    if len(values) <= points:
        return values
    edges = _edges(len(values), points)
    finite = np.isfinite(values)
    counts = np.add.reduceat(finite, edges[:-1], dtype=float)
    with np.errstate(invalid="ignore"):
        return np.add.reduceat(np.where(finite, values, 0.0), edges[:-1]) / counts


def _edges(count: int, points: int) -> np.ndarray:
    return np.linspace(0, count, points // 2 + 1).astype(int)
