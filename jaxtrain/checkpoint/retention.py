"""Retention policy: which checkpoints may be deleted because enough good ones exist."""

from collections.abc import Iterable
from pathlib import Path

from jaxtrain.files.bounded_files import parsed, whole_lines


def dispensable(good: Iterable[int], others: Iterable[int], *, keep: int, keep_every: int = 0,
                best: int | None = None) -> list[int]:
    """Return which of these checkpointed steps to delete.

    Kept are the last `keep` good ones, forever every one whose step is a multiple of `keep_every` (0: none), and
    `best`. A checkpoint that is not known to be good is deleted once `keep` newer good ones exist, and is never a
    reason to delete a good one.
    """
    good = sorted(good)
    last = good[-keep:]
    kept = {*last, best, *(step for step in good if keep_every and step % keep_every == 0)}
    stale = [step for step in others if len(last) == keep and step < last[0]]
    return sorted([*(step for step in good if step not in kept), *stale])


def best_of(good: Iterable[int], metrics: Path, key: str) -> int | None:
    """Return the step whose line in metrics.jsonl has the lowest `key`, the newest if tied; None if no line has it."""
    found = {}
    starts = {f'{{"step": {step}, '.encode(): step for step in good}
    for line in whole_lines(metrics):
        step = starts.get(line[:line.find(b",") + 2])  # most lines are of steps without a checkpoint
        if step is not None and isinstance(value := parsed(line).get(key), int | float):
            found[step] = value
    return min(found, key=lambda step: (found[step], -step), default=None)
