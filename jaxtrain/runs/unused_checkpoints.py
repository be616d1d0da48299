"""Find the checkpoints that a run no longer uses, after `restore-to` for example, and the batches that they have."""

import contextlib
import filecmp
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.checkpoint.commands import SET_ASIDE
from jaxtrain.checkpoint.step_folders import ABANDONED, DAMAGED
from jaxtrain.data.loading.skipped_batches import SkippedBatches
from jaxtrain.files.bounded_files import LARGE, read_json


@dataclass(frozen=True)
class UnusedCheckpoint:
    """A checkpoint that was renamed, by `restore-to`, by a rollback or because it is damaged."""

    name: str  # of its folder, such as 10.set_aside
    step: int
    skipped: SkippedBatches | None  # at that time; None: it cannot be read

    def may_have(self, batches: Sequence[int]) -> bool:
        """Return whether it was trained on one of these batches, or may have been."""
        if self.skipped is None:
            return bool(batches)
        reach = self.skipped.reach(self.step)
        return any(batch < reach and batch not in self.skipped.batches for batch in batches)


def turned_back(workdir: str | Path) -> bool:
    """Return whether `restore-to` was used since the run was last started, which cuts metrics.jsonl."""
    metrics = Path(workdir) / "metrics.jsonl"
    with contextlib.suppress(OSError):
        return any(filecmp.cmp(metrics, kept) for kept in metrics.parent.glob(f"{metrics.name}{SET_ASIDE}*"))
    return False


def unused_checkpoints(directory: Path) -> tuple[UnusedCheckpoint, ...]:
    """Return those in a folder of checkpoints, in the order of their steps."""
    found = []
    for ending in (SET_ASIDE, ABANDONED, DAMAGED):
        for folder in directory.glob(f"*{ending}*"):
            step = folder.name.partition(".")[0]
            if step.isdecimal() and step.isascii():
                found.append(UnusedCheckpoint(folder.name, int(step), _skipped(folder)))
    return tuple(sorted(found, key=lambda one: (one.step, one.name)))


def _skipped(folder: Path) -> SkippedBatches | None:
    try:
        return SkippedBatches.of(read_json(folder / "meta" / "metadata", dict, LARGE).get("skipped_batches", {}))
    except (OSError, ValueError, AttributeError):
        return None
