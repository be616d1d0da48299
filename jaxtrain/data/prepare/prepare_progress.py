"""The words that tell how far a preparation is."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from jaxtrain.data.formats.inputs import total_size
from jaxtrain.data.prepare.tasks import Task


class Progress:
    """Share, rate and time left of the tasks in `ours`; tasks done before count only towards the share.

    With a number of `workers`, also how many of them are busy: all, until fewer tasks than workers are left. An
    engine of one's own does not tell.
    """

    def __init__(self, what: str, tasks: Sequence[Task], ours: Sequence[int], missing: Sequence[int],
                 say: Callable[[str], None], workers: Any = 1):
        self.what, self.say, self.of = what, say, len(ours)
        self.sizes = {number: total_size([tasks[number]]) for number in ours}
        self.total, self.left = sum(self.sizes.values()), sum(self.sizes[number] for number in missing)
        self.tasks, self.before = len(ours) - len(missing), self.left
        self.started = time.monotonic()
        self.workers = workers if isinstance(workers, int) else 0
        if missing:
            say(f"{what}: {self.tasks:,} of {self.of:,} tasks{self._busy()}")

    def add(self, number: int) -> None:
        """Count a task as done."""
        self.tasks += 1
        self.left -= self.sizes[number]
        rate = max(1, self.before - self.left) / max(1e-9, time.monotonic() - self.started)
        self.say(f"{self.what}: {self.tasks:,} of {self.of:,} tasks, {1 - self.left / max(1, self.total):.1%}, "
                 f"{rate / 1e6:.2f} MB/s{self._busy()}, {timedelta(seconds=round(self.left / rate))} left")

    def _busy(self) -> str:
        left = self.of - self.tasks
        return f", {min(self.workers, left):,} of {self.workers:,} workers busy" if self.workers and left else ""
