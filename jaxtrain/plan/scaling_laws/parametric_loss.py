"""A scaling law: the loss of a model of N parameters after D tokens, E + A / N^alpha + B / D^beta, fitted to runs.

It is fitted as approach 3 of Hoffmann et al. (arXiv 2203.15556) does it: the Huber loss between logarithms is minimised
from a grid of starts, of which the best are tried; by BFGS, which finds the minima that L-BFGS does. For bands the runs
are drawn again, with replacement.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from jaxtrain.errors import UserError

HUBER = 1e-3  # the difference of logarithms from which one counts less than its square
LEAST = 6  # runs: the law has five constants
SIZES = 3  # different ones, of models and of data, below which a power cannot be told from the rest
STARTS = 8  # of the grid
BAND = (5.0, 95.0)  # percentiles of the samples
# Of log A, log B, log E, alpha and beta, as in the paper.
GRID = ((0, 5, 10, 15, 20, 25), (0, 5, 10, 15, 20, 25), (-1, -0.5, 0, 0.5, 1), (0, 0.5, 1, 1.5, 2), (0, 0.5, 1, 1.5, 2))


@dataclass(frozen=True)
class Point:
    """One finished run."""

    parameters: float  # that each token is multiplied by
    tokens: float
    loss: float
    name: str = ""


@dataclass(frozen=True)
class Law:
    """The constants of E + A / N^alpha + B / D^beta."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss of a model of this many parameters after this many tokens."""
        with np.errstate(over="ignore", invalid="ignore"):  # laws of samples may have any powers
            return float(self.E + self.A * np.float64(parameters)**-self.alpha
                         + self.B * np.float64(tokens)**-self.beta)

    def optimum(self, flops: float) -> tuple[float, float]:
        """Return the parameters and the tokens of the least loss that 6 N D = `flops` can reach."""
        if not (self.alpha > 0 and self.beta > 0 and self.A > 0 and self.B > 0):
            return math.nan, math.nan
        half = math.log(flops / 6) / 2
        balance = math.log(self.alpha / self.beta) + math.log(self.A) - math.log(self.B)
        more = (balance + (self.beta - self.alpha) * half) / (self.alpha + self.beta)
        try:
            return math.exp(half + more), math.exp(half - more)
        except OverflowError:
            return math.nan, math.nan


@dataclass(frozen=True)
class Fit:
    """The law that fits some runs best, and those that fit samples of them."""

    law: Law
    samples: Sequence[Law]
    points: Sequence[Point]
    lost: int = 0  # samples that no law with constants that are numbers fits

    def band(self, value) -> tuple[float, float]:
        """Return the percentiles of what a function makes of the sampled laws.

        A sample that says nothing could have said anything: it counts as low below and as high above, so that bands
        are wide or have no end where many samples are such.
        """
        values = [x for law in self.samples if math.isfinite(x := value(law))]
        unknown = np.full(self.lost + len(self.samples) - len(values), math.inf)
        if not values:
            return -math.inf, math.inf
        low = np.percentile([*values, *-unknown], BAND[0], method="lower")
        high = np.percentile([*values, *unknown], BAND[1], method="higher")
        return float(low), float(high)

    def beyond(self, parameters: float, tokens: float) -> float:
        """Return how many times as large as in any of the runs the model or the data are; at most 1: they are not."""
        return max(parameters / max(point.parameters for point in self.points),
                   tokens / max(point.tokens for point in self.points))


def fit(points: Sequence[Point], samples: int = 200, seed: int = 0) -> Fit:
    """Return the law of these runs, and as many laws of samples of them, drawn by this seed."""
    check(points)
    table = np.log([[point.parameters, point.tokens, point.loss] for point in points])
    # Sizes relative to their geometric mean, where A and alpha do not do the same.
    middle = np.array([*table[:, :2].mean(0), 0])
    table = table - middle
    best = _fitted(table, _starts(table, middle))
    rng, laws = np.random.default_rng(seed), []
    for _ in range(samples):
        rows = table[rng.integers(len(table), size=len(table))]
        told = min(len(np.unique(rows[:, i])) for i in (0, 1)) > 1  # else a power has no value
        laws.append(_law(_fitted(rows, [best]), middle) if told else None)
    if (law := _law(best, middle)) is None:
        raise UserError("RUNS", "no law with constants that are numbers fits them: their differences are mostly noise",
                        "add runs, of sizes and numbers of tokens that are further apart")
    return Fit(law, [sample for sample in laws if sample is not None], tuple(points), laws.count(None))


def check(points: Sequence[Point]) -> None:
    """Refuse runs that cannot tell the constants of a law apart."""
    if len(points) < LEAST:
        raise UserError("RUNS", f"{len(points)} finished runs are too few for the five constants of a scaling law",
                        f"give {LEAST} or more, of {SIZES} sizes and {SIZES} numbers of tokens")
    for what, values in (("size", {point.parameters for point in points}),
                         ("number of tokens", {point.tokens for point in points})):
        if len(values) < SIZES:
            said = f"all {len(points)} have one {what}" if len(values) == 1 else f"there are only two of a {what}"
            raise UserError("RUNS", f"{said}, and a power of it cannot be told from that",
                            f"add runs, to have {SIZES} or more")


def _law(x: np.ndarray, middle: np.ndarray) -> Law | None:
    """Return the law with these constants; None: they are beyond all numbers."""
    a, b, e, alpha, beta = map(float, x)
    try:
        return Law(math.exp(e), math.exp(a + alpha * middle[0]), math.exp(b + beta * middle[1]), alpha, beta)
    except OverflowError:
        return None


def _objective(x: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the Huber loss, in units of its threshold squared so that the optimizer sees numbers near 1; its slope.

    `x`: log A, log B, log E, alpha and beta in its last dimension.
    """
    a, b, e, alpha, beta = np.moveaxis(x, -1, 0)[..., None]
    terms = np.stack([a - alpha * table[:, 0], b - beta * table[:, 1], e + 0 * table[:, 0]])
    top = terms.max(0)
    total = top + np.log(np.exp(terms - top).sum(0))
    errors = (total - table[:, 2]) / HUBER
    small = np.abs(errors) <= 1
    value = np.where(small, errors**2 / 2, np.abs(errors) - 0.5).sum(-1)
    pull = np.where(small, errors, np.sign(errors)) / HUBER
    a, b, e = np.exp(terms - total) * pull
    slope = np.stack([part.sum(-1) for part in (a, b, e, -a * table[:, 0], -b * table[:, 1])], -1)
    return value, slope


def _starts(table: np.ndarray, middle: np.ndarray) -> list[np.ndarray]:
    """Return the points of the grid where the loss is least."""
    grid = np.array(list(itertools.product(*GRID)), float)
    grid[:, :2] -= grid[:, 3:] * middle[:2]
    return list(grid[np.argsort(_objective(grid, table)[0], kind="stable")[:STARTS]])


def _fitted(table: np.ndarray, starts: Sequence[np.ndarray]) -> np.ndarray:
    found = [minimize(_objective, start, args=(table,), method="BFGS", jac=True, options={"gtol": 1e-3})
             for start in starts]
    return min(found, key=lambda one: one.fun).x
