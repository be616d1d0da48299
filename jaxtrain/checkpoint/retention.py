"""Retention policy: which checkpoints may be deleted because enough good ones exist."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from jaxtrain.checkpoint import step_folders, verify
from jaxtrain.errors import say
from jaxtrain.files.bounded_files import parsed, whole_lines

HIGHEST = "highest:"  # before a metric in `checkpoint.best`


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


def best_of(good: Iterable[int], workdir: Path, key: str) -> int | None:
    """Return the step whose metrics, of a run or of its watcher, have the lowest `key`; None if no line has it.

    Of equal ones it is the newest. `key`: highest:METRIC for the highest one of a metric.
    """
    found: dict[int, float] = {}
    name, sign = key.removeprefix(HIGHEST), -1 if key.startswith(HIGHEST) else 1
    starts = {f'{{"step": {step}, '.encode(): step for step in good}
    for line in _lines(workdir):
        step = starts.get(line[:line.find(b",") + 2])  # most lines are of steps without a checkpoint
        if step is not None and isinstance(value := parsed(line).get(name), int | float):
            found[step] = sign * value
    return min(found, key=lambda step: (found[step], -step), default=None)


def _could_have(workdir: Path, key: str, first: int) -> bool:
    """Return whether a metric could have been there by now: one of evaluations not before one after step `first`."""
    if not key.removeprefix(HIGHEST).startswith("eval_"):
        return True
    with contextlib.suppress(OSError, ValueError):
        return any(b'"eval_' in line and parsed(line, {"step": int})["step"] >= first for line in _lines(workdir))
    return False


def _lines(workdir: Path) -> Iterator[bytes]:
    logs = [workdir / "metrics.jsonl", workdir / "evaluations" / "metrics.jsonl"]
    return itertools.chain.from_iterable(map(whole_lines, filter(Path.exists, logs)))


class Retention:
    """The retention policy of one directory of checkpoints."""

    def __init__(self, directory: Path, keep: int, keep_every: int, best: str):
        self._directory, self._keep, self._keep_every, self._best = directory, keep, keep_every, best
        self._best_missing = False  # whether that was said
        self._deleting = threading.Lock()

    def keeping(self, good: list[int]) -> list[int]:
        """Return which of these good steps are kept."""
        gone = self._dispensable(good, [])
        return [step for step in good if step not in gone]

    def delete(self, under_way: Callable[[], Collection[int]], pinned: Callable[[], Collection[int]]) -> None:
        """Delete what may go; folders are renamed first, so that none is half deleted under its name.

        Args:
            under_way: returns the steps that are being saved.
            pinned: returns the steps that are being copied; they are deleted next time.
        """
        with self._deleting:  # a failed save frees space while the previous one is being finished
            steps = verify.steps(self._directory)
            good = [step for step in steps if verify.good(self._directory, step)]
            saving = under_way()
            others = [step for step in steps if step not in good and step not in saving]
            gone, copied = self._dispensable(good, others), pinned()
            for step in gone:
                if step not in copied:
                    step_folders.delete(self._directory / str(step))
            for entry in self._directory.glob(f"*{step_folders.ABANDONED}*"):
                if good and int(entry.name.partition(".")[0]) < good[-1]:
                    step_folders.delete(entry)
            step_folders.delete_rest(self._directory)

    def _dispensable(self, good: list[int], others: list[int]) -> list[int]:
        return dispensable(good, others, keep=self._keep, keep_every=self._keep_every, best=self._best_of(good))

    def _best_of(self, good: list[int]) -> int | None:
        found = None
        if self._best:
            with contextlib.suppress(OSError, ValueError):
                found = best_of(good, self._directory.parent, self._best)
            missing = found is None and bool(good) and _could_have(self._directory.parent, self._best, min(good))
            if missing and not self._best_missing:
                say(f"checkpoint.best: neither metrics.jsonl nor evaluations/metrics.jsonl has {self._best!r} at the "
                    "steps of checkpoints, so none is kept for it so far; is that the name of a metric, and are "
                    "checkpoints saved where it is evaluated?")
            self._best_missing = missing
        return found
