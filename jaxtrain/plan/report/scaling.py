"""Scale the best layout of a search to fewer and to more devices, by `data` or `fsdp`, whichever is then faster."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from jaxtrain.base.annotations import JsonObject
from jaxtrain.errors import UserError
from jaxtrain.plan.estimate import change, estimate
from jaxtrain.plan.report.table import Choice, Found

FACTORS = tuple(Fraction(one) for one in ("1/4", "1/2", "1", "2", "4"))
SAME, ALONG = "the same batch", "as many rows a device"


@dataclass(frozen=True)
class Point:
    """One number of devices: a layout, or the reason why there is none."""

    devices: int
    batch: int  # rows of a step
    choice: Choice | None
    why: str = ""


def scaled(found: Found) -> dict[str, list[Point]]:
    """Return the layout at a quarter to four times as many devices, with the same and with a proportional batch."""
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


def _changed(overrides: JsonObject, axis: str, factor: Fraction, along: bool) -> JsonObject:
    """Multiply one axis of a layout by a factor; if the batch stays, adapt gradient accumulation as far as possible."""
    size = overrides.get(axis, 1) * factor
    if size.denominator > 1:
        raise UserError(axis, f"{overrides.get(axis, 1)} cannot be multiplied by {factor}", "use another number")
    changed = {**overrides, axis: int(size)}
    if changed.get("mesh.data", 1) > 1:  # several copies of a model need only one of the optimizer
        changed["optimizer.zero_stage"] = max(1, changed.get("optimizer.zero_stage", 0))
    parts = changed.get("train.accumulation", 1) / factor
    if not along and changed.get("mesh.stage", 1) == 1:
        changed["train.accumulation"] = int(max(1, parts))
    return changed
