"""The first wrong quantity of a layout: its kind, the parameter, and what the numbers say of the cause."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxtrain.proof import hints
from jaxtrain.proof.drawn_layouts import Layout
from jaxtrain.proof.reference import Reference, differences
from jaxtrain.proof.trial import (
    EXTRA,
    GRADIENT,
    KINDS,
    LOSS,
    NORM,
    OPTIMIZER,
    UPDATE,
    Quantity,
    Record,
    named,
    real,
)
from jaxtrain.run import Run

CLIP, COPIES, INITIAL = "clip", "copies", "initial value"  # further kinds of what can be wrong


@dataclass(frozen=True)
class Finding:
    """The first quantity of a layout that is not the one of one device."""

    layout: Layout
    step: int  # from 1
    kind: str
    name: str  # of the parameter or the metric that is furthest off
    error: float  # as a multiple of the tolerance
    hint: str
    others: tuple[str, ...] = ()  # further ones of this kind, the worst first

    def __str__(self) -> str:
        subject = {CLIP: "the clipping of the gradient is", COPIES: f"copies of {self.name} on several devices are",
                   INITIAL: f"the initial value of {self.name} is"}.get(
                       self.kind, f"{Quantity(self.kind, self.name)} is")
        more = f" (as {'is' if len(self.others) == 1 else 'are'} {_list(self.others)})" if self.others else ""
        return f"on {self.layout}: {subject} the first to be wrong, at step {self.step}{more}: {self.hint}"


@dataclass(frozen=True)
class Comparison:
    """The result for one layout."""

    layout: Layout
    worst: float  # the largest error, as a multiple of the tolerance
    where: str
    finding: Finding | None = None
    seconds: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)


def compare(reference: Reference, got: Record, layout: Layout, run: Run, compared: float,
            initial: dict[str, float]) -> Comparison:
    """Return how a layout compares with one device.

    `initial`: how far each initial value is off, as a multiple of what is allowed.
    """
    parts = layout.devices * layout.keys.get("train.accumulation", 1) * max(
        1, layout.keys.get("pipeline.microbatches", 1))
    off = differences(reference, got, parts, compared)
    worst, where = max([(error, f"{key}, step {n + 1}") for n, step in enumerate(off) for key, error in step.items()])
    wrong = {name: error for name, error in initial.items() if error > 1}
    if wrong:
        names = sorted(wrong, key=lambda name: -wrong[name])
        found = Finding(layout, 0, INITIAL, names[0], wrong[names[0]], "random numbers must not depend on the mesh: "
                        "draw them from one key for the whole array", tuple(names[1:]))
        return Comparison(layout, wrong[names[0]], f"initial value of {names[0]}", found)
    for n, errors in enumerate(off):
        if found := _first(reference, got, n, errors, layout, run):
            return Comparison(layout, max(worst, found.error), where, found)
    return Comparison(layout, worst, where)


def _first(reference: Reference, got: Record, n: int, errors: dict[Quantity, float], layout: Layout,
           run: Run) -> Finding | None:
    """Return the first quantity of a step that is wrong, in the order in which they follow from each other."""
    wrong = {key: error for key, error in errors.items() if error > 1}
    torn = got.torn[n]
    if not wrong and not torn:
        return None
    truth, seen = reference.truth[n], got.steps[n]
    kind = min((key.kind for key in wrong), key=KINDS.index) if wrong else COPIES
    if kind == COPIES:
        return Finding(layout, n + 1, COPIES, torn[0], float("inf"), "devices that should hold the same numbers "
                       f"do not; something that differs between them reaches it{hints.over(layout)}", tuple(torn[1:]))
    keys = sorted((key for key in wrong if key.kind == kind), key=lambda key: -wrong[key])
    first, others = keys[0], tuple(key.name for key in keys[1:])
    if kind == UPDATE and n == 0:  # what was added, not the sum
        began = {Quantity(UPDATE, name): real(x).astype(np.float64) for name, x in named(reference.start.params)}
        truth, seen = ({key: x - began[key] if key in began and x.shape == began[key].shape else x
                        for key, x in of.items()} for of in (truth, seen))
    told = _told(kind, first, truth, seen, layout, run)
    right = tuple(key.name for key in errors if key.kind == kind and key not in wrong)
    if kind == GRADIENT and right:
        told += f"; {_list(right)} {'is' if len(right) == 1 else 'are'} right"
    has_moments = any(key.kind == OPTIMIZER and x.ndim for key, x in truth.items())
    clips = kind == OPTIMIZER or (kind == UPDATE and not has_moments)
    if clips and n == 0 and (factor := _common_factor(truth, seen, keys)):
        told = hints.of_clip(factor, run, truth, layout)
        kind, others = CLIP, ()
    if torn:
        told += f"; copies of {torn[0]} on several devices differ, as they do behind a missing psum"
    return Finding(layout, n + 1, kind, first.name, wrong[first], told, others)


def _told(kind: str, key: Quantity, truth: dict[Quantity, np.ndarray], seen: dict[Quantity, np.ndarray],
          layout: Layout, run: Run) -> str:
    """Return what the numbers of a quantity say of the cause."""
    if kind == NORM:
        gradient = {one.name: x for one, x in truth.items() if one.kind == GRADIENT}
        return hints.of_norm(float(seen[key]), gradient, run, layout)
    if kind == LOSS:
        return hints.of_loss(float(seen[key]), float(truth[key]), layout)
    where = {GRADIENT: run.layout.gradients, UPDATE: run.layout.state.params, OPTIMIZER: run.layout.state.opt_state,
             EXTRA: run.layout.state.extras}.get(kind)
    sharding = dict(named(where)).get(key.name) if where is not None else None
    return hints.of_array(seen[key], truth[key], sharding, layout)


def _common_factor(truth: dict[Quantity, np.ndarray], seen: dict[Quantity, np.ndarray],
                   wrong: list[Quantity]) -> float:
    """Return the factor by which the optimizer's first moments (or all updates) are off, if it is one and the same.

    Second moments have its square. 0.0: there is none.
    """
    pairs = [(seen[key].astype(np.float64), truth[key]) for key in wrong
             if truth[key].ndim and seen[key].shape == truth[key].shape]
    factors = np.array([factor for got, want in pairs if (factor := hints.proportion(got, want)) is not None])
    if not len(factors) or len(factors) < 0.9 * len(pairs) or (factors <= 0).any():
        return 0.0
    base = factors[np.argmin(np.abs(np.log(factors)))]
    same = np.abs(factors / base - 1) < 0.01
    square = np.abs(factors / base**2 - 1) < 0.02
    return float(base) if (same | square).all() and abs(base - 1) > 1e-4 else 0.0


def _list(names: tuple[str, ...]) -> str:
    rest = len(names) - 2
    return ", ".join(names[:2]) + (f" and {rest} other{'s' * (rest > 1)}" if rest > 0 else "")
