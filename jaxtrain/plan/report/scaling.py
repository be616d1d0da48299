"""The best layout of a search on fewer and on more devices: only `data` or `fsdp` changes, whichever is then faster."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.plan.estimate import change, estimate
from jaxtrain.plan.report.table import Choice, Found

FACTORS = tuple(Fraction(one) for one in ("1/4", "1/2", "1", "2", "4"))
SAME, ALONG = "the same batch", "as many rows a device"


@dataclass(frozen=True)
class Point:
    """One count of devices: a layout, or why there is none."""

    devices: int
    batch: int  # rows of a step
    choice: Choice | None
    why: str = ""


def scaled(found: Found) -> dict[str, list[Point]]:
    """At a quarter, half, twice and four times as many devices, with the batch as it is and with one in proportion."""
    return {name: list(_points(found, name == ALONG)) for name in (SAME, ALONG)} if found.best else {}


def _points(found: Found, along: bool) -> Iterator[Point]:
    best, rows = found.best, found.config.data.global_batch_size
    assert best is not None
    for factor in FACTORS:
        devices, batch = found.devices * factor, rows * factor if along else Fraction(rows)
        if devices.denominator > 1 or batch.denominator > 1:
            continue
        if factor == 1:
            yield Point(found.devices, rows, best)
            continue
        fitting, whys = [], []
        for axis in ("mesh.data", "mesh.fsdp"):
            try:
                overrides = _changed(best.overrides, axis, factor, along)
                config = change(found.config, {**overrides, "mesh.auto": False, "data.global_batch_size": int(batch)})
                guess = estimate(config, found.target, int(devices))
            except UserError as error:
                whys.append(f"{error}")
                continue
            choice = Choice(overrides, guess)
            if guess.fits:
                fitting.append(choice)
            else:
                whys.append(f"{choice}: {found.why(choice)}")
        fastest = min(fitting, key=lambda choice: choice.estimate.seconds, default=None)
        yield Point(int(devices), int(batch), fastest, "" if fastest else "; ".join(dict.fromkeys(whys)))


def _changed(overrides: dict[str, Any], axis: str, factor: Fraction, along: bool) -> dict[str, Any]:
    """... by a factor along one axis; the parts of a batch that stays become more or fewer, as long as they can."""
    size = overrides.get(axis, 1) * factor
    if size.denominator > 1:
        raise UserError(axis, f"{overrides.get(axis, 1)} cannot be multiplied by {factor}", "use another number")
    changed = {**overrides, axis: int(size)}
    if changed.get("mesh.data", 1) > 1:  # copies of a model need no copies of the optimizer
        changed["optimizer.zero_stage"] = max(1, changed.get("optimizer.zero_stage", 0))
    parts = changed.get("train.accumulation", 1) / factor
    if not along and changed.get("mesh.stage", 1) == 1:
        changed["train.accumulation"] = int(max(1, parts))
    return changed
