"""The numbers of one device, in float64, and how far rounding may take others from them.

The step is run on one device in float64 (float64.py): that is the truth. It is then run a number of times as it is, in
float32 or whatever the config says, first from the initial parameters and then from parameters that are moved by about
their rounding; what an optimizer keeps in few bits is rounded otherwise between these steps. How far these runs are
from the truth is the error of rounding, of each element by itself, with all that amplifies it: a sum whose terms
cancel, a division by a small root in Adam, and steps that follow from others.

A correct run on a mesh adds in another order, which is one more draw from the same errors. It is within

    t * S * (1 + t * S / (|x| + S))  +  u * (p * g + 2 * |x|)

of the truth x. S is the error to expect at an element: sqrt(1 + 1/R) * sqrt(s^2 + m^2), where s is the root mean
square of the errors of R runs there, and m the median of s over the array. t is how many times larger an error can be
by chance: the quantile of Student's distribution of R degrees of freedom at `FALSE_ALARMS`, divided by how many numbers
the proof compares. The second factor matters where a number is no larger than its error, such as the square of a
gradient that is zero but for rounding: its error grows with the square of t. The last term is for where all runs agree
by chance: u is the unit of rounding, p how many partial sums the mesh makes (its devices x micro-batches), and g the
largest element of the array.

An update need not be continuous: Adam's first is about the sign of the gradient, and so are those of Lion and signSGD.
Where a gradient is within its own tolerance of zero, rounding decides the sign. The R runs may all have the same one by
chance, and a mesh the other. What the optimizer makes of such an element may be off by twice the largest update (or
number of its state) of the array.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.base.annotations import PyTree
from jaxtrain.proof import float64
from jaxtrain.proof.trial import (
    EXTRA,
    GRADIENT,
    OPTIMIZER,
    UPDATE,
    Quantities,
    Quantity,
    Record,
    named,
    quantities,
    real,
    record,
    traced,
)
from jaxtrain.run import Run
from jaxtrain.train_step.state import TrainState

REPLICAS = 16  # R
FALSE_ALARMS = 1e-6  # of all proofs of correct code


@dataclass(frozen=True)
class Reference:
    """The truth of each step, and the spread of rounding errors around it."""

    truth: list[Quantities]
    spread: list[Quantities]  # s, for each element
    dtypes: Quantities  # an empty array of the dtype in which each is kept
    unit: float  # u
    start: TrainState
    missing: str = ""  # the operation for which there is no float64; then the mean of all runs takes its place
    known: dict[float, list[Quantities]] = field(default_factory=dict)  # tolerances but for the partial sums, by t

    def tolerance(self, step: int, parts: int, compared: float) -> Quantities:
        """Return how far each element may be from the truth.

        Args:
            step: which step.
            parts: how many partial sums the layout makes.
            compared: how many numbers the whole proof compares.
        """
        t = _student(REPLICAS, FALSE_ALARMS / 2 / compared)
        if t not in self.known:
            self.known[t] = [{key: self._of(truth[key], s, self.dtypes[key].dtype, t) for key, s in spread.items()}
                             for truth, spread in zip(self.truth, self.spread, strict=True)]
        found = {key: self._with_sums(key, t, step, parts) for key in self.known[t][step]}
        for key, gradient in self._follows.items():
            found[key] = found[key] + self._of_signs(key, gradient, t, step, parts)
        return found

    def _with_sums(self, key: Quantity, t: float, step: int, parts: int) -> np.ndarray:
        allowed = self.known[t][step][key]
        return allowed if not _is_float(self.dtypes[key]) else (
            allowed + self.unit * parts * np.abs(self.truth[step][key]).max(initial=0))

    @functools.cached_property
    def _follows(self) -> dict[Quantity, Quantity]:
        """The gradient that each parameter, its average and the optimizer's state of it follow from."""
        gradients = [(key, x.shape) for key, x in self.truth[0].items() if key.kind == GRADIENT]
        return {key: gradient for key, x in self.truth[0].items() for gradient, shape in gradients
                if key.kind in (UPDATE, EXTRA, OPTIMIZER) and _is_float(self.dtypes[key]) and x.shape == shape
                and f"/{key.name}".endswith(f"/{gradient.name}")}

    def _of_signs(self, key: Quantity, gradient: Quantity, t: float, step: int, parts: int) -> np.ndarray:
        """Return how far another sign of the gradient, where rounding decides it, takes what follows from it."""
        allowed = np.zeros(self.truth[step][key].shape)
        for n in range(step + 1):
            size, s = np.abs(self.truth[n][gradient]), self.spread[n][gradient]
            unsure = (size <= self._with_sums(gradient, t, n, parts)) & ((size > 0) | (s > 0))  # zero has one sign
            if key.kind == OPTIMIZER:
                largest = np.abs(self.truth[step][key]).max(initial=0)
                allowed = np.where(unsure, 2 * largest, allowed)
            else:
                allowed += np.where(unsure, 2 * self._largest_update(gradient.name, n), 0)
        return allowed

    def _largest_update(self, name: str, step: int) -> float:
        now = self.truth[step][Quantity(UPDATE, name)]
        before = self.truth[step - 1][Quantity(UPDATE, name)] if step else _float(
            real(dict(named(self.start.params))[name]))
        return float(np.abs(now - before).max(initial=0))

    def _of(self, truth: np.ndarray, s: np.ndarray, dtype: np.dtype, t: float) -> np.ndarray:
        if not jnp.issubdtype(dtype, jnp.floating):  # exact, except for codes of rounded numbers, of which any may be
            return np.full(s.shape, 2 * s.max() + 1 if s.any() else 0.0)  # rounded to the next one
        size = np.abs(truth)
        kept = max(self.unit, float(jnp.finfo(dtype).eps) / 2)
        expected = np.sqrt((1 + 1 / REPLICAS) * (s**2 + (np.median(s) ** 2 if s.size else 0)))
        twice = t * expected / np.maximum(size + expected, np.finfo(np.float64).tiny)
        return t * expected * (1 + twice) + 2 * kept * size

    @property
    def size(self) -> int:
        """The number of numbers that all steps have."""
        return sum(x.size for step in self.truth for x in step.values())


def _is_float(x: np.ndarray) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _student(freedom: int, chance: float) -> float:
    from scipy.special import stdtrit

    return -float(stdtrit(freedom, chance))


def unit_of(precision: str) -> float:
    """Return the relative error of rounding in the dtype that a step computes in."""
    dtype = {"float32": jnp.float32, "float16": jnp.float16}.get(precision, jnp.bfloat16)
    return float(jnp.finfo(dtype).eps) / 2


def measure(run: Run, start: TrainState, batches: Sequence[PyTree], seed: int) -> Reference:
    """Return the numbers of one device and the errors of rounding around them; `run` is on one device."""
    unit = unit_of(run.sharded.settings.precision)
    rng = np.random.default_rng(seed)
    first = record(run, start, batches)
    try:
        truth, missing = _in_float64(run, start, batches), ""
    except float64.NoFloat64 as error:
        truth, missing = [], f"{error}"
    errors = [_Errors(step) for step in truth] or [_Errors(None) for _ in batches]
    for n in range(REPLICAS):
        one = first if n == 0 else record(run, _moved(start, unit, rng), batches,
                                          lambda state: _coarse(state, unit, rng))
        for seen, step in zip(errors, one.steps, strict=True):
            seen.add(step)
    return Reference(truth or [seen.mean for seen in errors], [seen.spread for seen in errors],
                     {key: np.empty(0, x.dtype) for key, x in first.steps[0].items()}, unit, start, missing)


class _Errors:
    """The errors of several runs of a step, of which none is kept: around the truth, or else around their mean."""

    def __init__(self, truth: Quantities | None):
        self.truth, self.mean, self.squares, self.count = truth, {}, {}, 0

    def add(self, step: Quantities) -> None:
        """Count one run."""
        self.count += 1
        for key, x in step.items():
            mean = self.mean.get(key, 0.0)
            delta = _float(x) - (mean if self.truth is None else self.truth[key])
            if self.truth is None:  # Welford's update
                self.mean[key] = mean + delta / self.count
                square = delta * (_float(x) - self.mean[key])
            else:
                square = delta**2
            self.squares[key] = self.squares.get(key, 0.0) + square

    @property
    def spread(self) -> Quantities:
        """The root mean square of the errors."""
        return {key: np.sqrt(x / self.count) for key, x in self.squares.items()}


def _float(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def _moved(start: TrainState, unit: float, rng: np.random.Generator) -> TrainState:
    """Return the state with parameters that are moved at random by up to a unit of rounding."""
    def move(x: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        # Rounding to the nearest would bring back half of them.
        return (x * (1 + rng.uniform(-2, 2, x.shape) * unit)).astype(x.dtype)
    return dataclasses.replace(start, params=jax.tree.map(move, start.params))


def _coarse(state: TrainState, unit: float, rng: np.random.Generator) -> TrainState:
    """Return a state whose optimizer keeps in few bits what may be rounded up or down, rounded otherwise at random.

    Which way a number near the middle of two is rounded differs from one order of sums to another, for few of them:
    runs alone would hardly meet the same ones.
    """
    def move(x: np.ndarray) -> np.ndarray:
        if x.dtype in (np.int8, np.uint8):
            least, most = np.iinfo(x.dtype).min, np.iinfo(x.dtype).max
            return np.clip(x.astype(np.int64) + rng.integers(-1, 2, x.shape), least, most).astype(x.dtype)
        if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).eps / 2 > unit:
            return (x * (1 + rng.uniform(-1, 1, x.shape) * float(jnp.finfo(x.dtype).eps))).astype(x.dtype)
        return x
    return dataclasses.replace(state, opt_state=jax.tree.map(move, state.opt_state))


def _in_float64(run: Run, start: TrainState, batches: Sequence[PyTree]) -> list[Quantities]:
    closed, restored = traced(run, start, batches[0])
    steps, state = [], start
    with jax.enable_x64(True):
        function = jax.jit(float64.in_float64(closed))
        for batch in batches:
            leaves = jax.device_get(function(*float64.widened(jax.tree.leaves((state, batch)))))
            state, metrics = restored(leaves)
            steps.append({key: _float(x) for key, x in quantities(state, metrics).items()})
    return steps


def differences(reference: Reference, got: Record, parts: int, compared: float) -> list[dict[Quantity, float]]:
    """Return how far each quantity of a run on a mesh is from the truth, as a multiple of what is allowed."""
    found = []
    for n, step in enumerate(got.steps):
        allowed, truth = reference.tolerance(n, parts, compared), reference.truth[n]
        found.append({key: _worst(step[key], truth[key], allowed[key]) for key in truth if key in step})
    return found


def _worst(got: np.ndarray, want: np.ndarray, allowed: np.ndarray) -> float:
    if got.shape != want.shape:
        return float("inf")
    with np.errstate(invalid="ignore", divide="ignore"):
        off = np.abs(_float(got) - want)
        off = np.where((_float(got) == want) | (np.isnan(_float(got)) & np.isnan(want)), 0, off)
        return float(np.nan_to_num(np.where(off == 0, 0, off / allowed), nan=np.inf, posinf=np.inf).max(initial=0))
