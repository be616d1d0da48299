"""`jt.bisect`: find the first step at which two runs part, and what in it is the cause.

The causes are looked for in the order in which they could have had an effect: initial values, batches, operations of
the step (compared in float64 on one device, where rounding explains nothing), the mesh, and what is recorded but not
what the step computes. If none is found, rounding is the cause.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.bisection import first_difference
from jaxtrain.bisection.first_difference import Difference
from jaxtrain.bisection.operations import Operation
from jaxtrain.bisection.sides import Side, keys_that_differ, shapes_of
from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError
from jaxtrain.proof.float64 import NoFloat64

SAME, INITIAL, BATCH, STATE, OPERATION, MESH, RECORD, ROUNDING, UNKNOWN = (
    "the same", "initial values", "batch", "state", "operation", "mesh", "record", "rounding", "unknown")
FEW = 64  # steps whose batches are compared where nothing else was found
JUMP = 30  # times larger than before: how the difference of two runs grows by no rounding
APART = 1e-4  # relative: what a step that is made again may be off on another machine


@dataclass(frozen=True)
class Parting:
    """The first step at which two runs part, and the cause."""

    cause: str
    step: int  # from 1: the first one that differs; 0: none, or their initial values do
    text: str
    keys: list[str] = field(default_factory=list)  # of the configs, that differ
    operations: list[JsonObject] = field(default_factory=list)  # of the first and of the second run
    results: list[str] = field(default_factory=list)  # what of the step differs

    def __str__(self) -> str:
        return "\n".join([self.text, *["in the configs differ " + "; ".join(self.keys)] * bool(self.keys)])

    __repr__ = __str__

    def as_json(self) -> JsonObject:
        """Return it as JSON."""
        return dataclasses.asdict(self)


def bisect(a: "str | Path | Config", b: "str | Path | Config", *, steps: int = 20,
           parts: tuple[JsonMapping, JsonMapping] = ({}, {}),
           report: Callable[[str], None] = lambda text: None) -> Parting:
    """Find where two runs part.

    Args:
        a: the workdir of a run, or a config.
        b: another one.
        steps: how many steps to make where one of them is a config, which has recorded none.
        parts: what else `jt.build` was given for each: model, loss_fn, optimizer, data, objective, extensions.
        report: called with a line of text at each stage.
    """
    sides = [Side.of(source, letter if isinstance(source, Config) else f"{source}", own)
             for source, letter, own in zip((a, b), "AB", parts, strict=True)]
    return bisect_sides(sides[0], sides[1], steps, report)


def bisect_sides(a: Side, b: Side, steps: int, report: Callable[[str], None]) -> Parting:
    """Find where two runs part; see `bisect`."""
    if steps < 1:
        raise UserError("steps", f"{steps} is too few", "give 1 or more")
    return _Search(a, b, report, steps).found()


@dataclass
class _Search:
    a: Side
    b: Side
    report: Callable[[str], None]
    steps: int

    def found(self) -> Parting:
        self.keys = keys_that_differ(self.a.config, self.b.config)
        if self.a.placement == self.b.placement:  # such as a size of -1
            self.keys = [key for key in self.keys if not key.startswith("mesh.")]
        self.unsure: list[str] = []
        before, parted, jump = self._parted()
        if not parted:
            return self._parting(SAME, 0, f"the runs have the same numbers, to the last bit, for {before} steps")
        self.report(f"the numbers differ from step {parted} on" + (
            f", and by far more than before at step {jump}" if jump else ""))
        return (self._initial() or self._batches(range(before, parted)) or self._by_operations(parted, jump)
                or self._by_mesh(parted) or self._by_record(before, parted, jump)
                or self._batches(range(min(self.last, FEW))) or self._unexplained(parted))

    def _unexplained(self, parted: int) -> Parting:
        if self.unsure:
            return self._parting(UNKNOWN, parted, f"the runs part at step {parted}; {_list(self.unsure)} may differ by "
                                 "more than rounding, which is too large a part of them even in float64",
                                 results=self.unsure)
        for side in (self.a, self.b):
            if side.recorded and (why := side.unrepeatable()):
                return self._parting(UNKNOWN, parted, f"the runs part at step {parted}; initial values, batches and "
                                     f"steps are the same, but {side.name} cannot be made again: {why}")
        return self._parting(ROUNDING, parted, f"the runs part at step {parted} by rounding only: initial values "
                             "and batches are the same, and in float64 so is every result of the step")

    @property
    def last(self) -> int:
        """The number of steps that are compared."""
        return min(side.last if side.recorded else min(self.steps, side.last) for side in (self.a, self.b))

    def _parting(self, cause: str, step: int, text: str, **more: list) -> Parting:
        return Parting(cause, step, text, self.keys, **more)

    # --------------------------------------------------------------------------------------------------- the step
    def _parted(self) -> tuple[int, int, int]:
        """Return the last step that is the same, the first one that is not, and one at which the difference jumps."""
        mine, theirs = self._lines()
        common = sorted(mine.keys() & theirs.keys())
        if not common:
            raise UserError(self.b.name, f"it and {self.a.name} have recorded no step in common",
                            "compare runs of the same steps")
        before, parted, jump, largest, most = 0, 0, 0, 1e-7, float(JUMP)
        for step in common:
            if not parted and _equal(mine[step], theirs[step]):
                before = step
                continue
            parted = parted or step
            away = _apart(mine[step], theirs[step])
            if step != parted and away > most * largest:
                jump, most = step, away / largest
            largest = max(largest, away)
        if parted - before > 1:  # not all steps were recorded
            pairs = zip(*(side.made_again(before, parted) for side in (self.a, self.b)), strict=True)
            parted = next((before + n for n, pair in enumerate(pairs, start=1) if not _equal(*pair)), parted)
            before = parted - 1
        return before, parted, jump

    def _lines(self) -> tuple[Mapping[int, Mapping[str, float]], ...]:
        """Return what is recorded after each step; steps are made of a config, which has recorded none."""
        if not (self.a.recorded and self.b.recorded):
            self.report(f"making {self.last} steps")
        return tuple(side.lines if side.recorded else dict(enumerate(side.made_again(0, self.last), start=1))
                     for side in (self.a, self.b))

    # ---------------------------------------------------------------------------------------------- initial values
    def _initial(self) -> Parting | None:
        mine, theirs = self.a.start, self.b.start
        if missing := sorted(mine.keys() ^ theirs.keys()):
            return self._parting(INITIAL, 0, f"the models have other parameters: {missing[0]} is in one of them only",
                                 results=missing)
        wrong = [name for name in mine if not np.array_equal(mine[name], theirs[name])]
        return self._parting(INITIAL, 0, f"the runs begin with other values of {_list(wrong)}",
                             results=wrong) if wrong else None

    # -------------------------------------------------------------------------------------------------------- batches
    def _batches(self, steps: Iterable[int]) -> Parting | None:
        for step in steps:
            mine, theirs = self.a.batch(step), self.b.batch(step)
            wrong = sorted(mine.keys() ^ theirs.keys()) or [
                name for name in mine if not np.array_equal(mine[name], theirs[name])]
            if wrong:
                return self._parting(BATCH, step + 1, f"the batch of step {step + 1} is another one: "
                                     f"{_where(mine.get(wrong[0]), theirs.get(wrong[0]), wrong[0])}; jaxtrain inspect "
                                     f"--step={step} shows it", results=wrong)
        return None

    # ----------------------------------------------------------------------------------------------------- operations
    def _by_operations(self, parted: int, jump: int) -> Parting | None:
        # The update before shows in the loss of a step; and a learning rate of 0 hides what an optimizer does.
        for step in dict.fromkeys([*[parted - 1] * (parted > 1), parted, *[jump] * bool(jump), self.last]):
            if other := self._batches([step - 1]):
                return other
            self.report(f"comparing the operations of step {step} in float64")
            state, batch = self.a.state(step - 1), self.a.batch(step - 1)
            mine, theirs = shapes_of(state), self.b.arrays()
            if wrong := sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)):
                return self._parting(STATE, step, f"the states of the runs have other arrays: {_list(wrong)}",
                                     results=wrong)
            try:
                traces = [side.traced(state, batch) for side in (self.a, self.b)]
            except NoFloat64 as error:
                return self._parting(UNKNOWN, parted, f"the runs part at step {parted}; {error} cannot be computed in "
                                     "float64, so that operations are not compared")
            if found := first_difference.difference(*traces):
                return self._of(found, step)
            self.unsure += [name for name in first_difference.unsure(*traces) if name not in self.unsure]
        return None

    def _of(self, found: Difference, step: int) -> Parting:
        sides = [(side, one) for side, one in zip((self.a, self.b), found.of, strict=True) if one]
        told = [f"  {side.name}: {f'{one.where}: ' if one.where else ''}{one}" for side, one in sides]
        return self._parting(OPERATION, step, "\n".join([
            f"the runs part in step {step}, where {_list(found.results)} differ{'s' * (len(found.results) == 1)}; the "
            "first operation that does:", *told]), operations=[_as_json(one) for one in found.of],
            results=found.results)

    # ----------------------------------------------------------------------------------------------------------- mesh
    def _by_mesh(self, parted: int) -> Parting | None:
        """Compare the step on both meshes with float64, by what rounding explains."""
        if not (self.a.placement or self.b.placement):
            return None
        self.report(f"comparing the meshes at step {parted}")
        state, batch = self.a.state(parted - 1), self.a.batch(parted - 1)
        for side in (self.a, self.b):
            if found := side.wrong_on_mesh(state, batch):
                return self._parting(MESH, parted, f"{side.name} does not compute the numbers of one device {found[0]}",
                                     results=found[1])
        return None

    # --------------------------------------------------------------------------------------------------------- record
    def _by_record(self, before: int, parted: int, jump: int) -> Parting | None:
        """Make the recorded steps again: what does not come out was not computed from what is there."""
        for step in dict.fromkeys([parted, *[jump] * bool(jump)]):
            for side in (self.a, self.b):
                if side.recorded is None or side.unrepeatable():
                    continue
                since = side.checkpoint(min(before, step - 1))
                self.report(f"making steps {since + 1} to {step} of {side.name} again")
                made = dict(enumerate(side.made_again(since, step), start=since + 1))
                for one in sorted(made.keys() & side.lines.keys()):
                    for name in ("loss", "grad_norm"):
                        then, now = side.lines[one].get(name, np.nan), made[one].get(name, np.nan)
                        if _apart({name: then}, {name: now}) > APART:
                            return self._parting(RECORD, one, f"{side.name} does not compute what it recorded at step "
                                                 f"{one}: {name} {then:.8g} is recorded, and {now:.8g} comes out of "
                                                 f"its state after step {since}; the record or the state was changed "
                                                 "by something else, such as a faulty device", results=[name])
        return None


def _apart(mine: Mapping[str, float], theirs: Mapping[str, float]) -> float:
    """Return the largest relative difference of two lines."""
    pairs = [(mine[name], theirs[name]) for name in mine.keys() & theirs.keys()]
    return max([abs(x - y) / max(abs(x), abs(y), 1e-30) if np.isfinite([x, y]).all() else float(
        not (x == y or (np.isnan(x) and np.isnan(y)))) for x, y in pairs], default=0.0)


def _equal(mine: Mapping[str, float], theirs: Mapping[str, float]) -> bool:
    return all(x == y or (np.isnan(x) and np.isnan(y)) for x, y in (
        (mine[name], theirs[name]) for name in mine.keys() & theirs.keys()))


def _where(mine: np.ndarray | None, theirs: np.ndarray | None, name: str) -> str:
    if mine is None or theirs is None:
        return f"only one of the runs has {name}"
    if mine.shape != theirs.shape:
        return f"its {name} have the shape {mine.shape}, and {theirs.shape}"
    at = np.argwhere(mine != theirs)
    rows = sorted({int(place[0]) for place in at})
    return (f"{name} differ in {len(rows)} of {len(mine)} rows, first in row {rows[0]} at position "
            f"{int(at[0][1]) if at.shape[1] > 1 else 0}")


def _list(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "")


def _as_json(one: Operation | None) -> JsonObject:
    return {} if one is None else {"name": one.name, "where": one.where, "source": one.source,
                                   "constants": list(one.constants), "stack": one.stack}
