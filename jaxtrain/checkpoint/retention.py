"""Which checkpoints may go: none but those that enough good ones have made dispensable."""

import json
from collections.abc import Iterable
from pathlib import Path


def dispensable(good: Iterable[int], others: Iterable[int], *, keep: int, keep_every: int = 0,
                best: int | None = None) -> list[int]:
    """Of the steps that have checkpoints, those to delete.

    What is kept: the last `keep` good ones, for ever every one whose step `keep_every` divides (0: none), and `best`.
    A checkpoint that is not known to be good goes when `keep` newer ones are, and never makes a good one dispensable.
    """
    good = sorted(good)
    last = good[-keep:]
    kept = {*last, best, *(step for step in good if keep_every and step % keep_every == 0)}
    stale = [step for step in others if len(last) == keep and step < last[0]]
    return sorted([*(step for step in good if step not in kept), *stale])


def best_of(good: Iterable[int], metrics: Path, key: str) -> int | None:
    """The step whose line in metrics.jsonl has the lowest `key`, the newest of equals; None if no line has it."""
    found = {}
    starts = {f'{{"step": {step}, '.encode(): step for step in good}
    with open(metrics, "rb") as lines:
        for line in lines:
            step = starts.get(line[:line.find(b",") + 2])  # most lines are of steps that nobody saved
            if step is None or not line.endswith(b"\n"):
                continue
            if isinstance(value := json.loads(line).get(key), int | float):
                found[step] = value
    return min(found, key=lambda step: (found[step], -step), default=None)
