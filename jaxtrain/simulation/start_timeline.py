"""The timeline of one start of a run without failures: what is done and booked by when, in closed form.

So that a run of months takes as long to simulate as it has failures, not steps.
"""

import math
from dataclasses import dataclass

from jaxtrain.checkpoint.due_steps import last_due
from jaxtrain.simulation.run_durations import Durations


@dataclass(frozen=True)
class Position:
    """The work of a start up to some moment: complete steps, and seconds by what they are booked as."""

    done: int
    steps: float  # of the complete steps
    partial: float = 0.0  # of the step in progress
    data_wait: float = 0.0
    checkpoint: float = 0.0


class Timeline:
    """The steps of one start, from `first` on, with saves every `every` steps and snapshots every `snapshots`."""

    def __init__(self, durations: Durations, pace: float, first: int, every: int, snapshots: int):
        """`pace`: how many times as long a step takes as with all machines."""
        d = self._durations = durations
        self.first, self.every, self.snapshots = first, every, snapshots
        self._step = d.step * pace
        between, short = (n * (self._step + d.data_wait) for n in (every, snapshots))
        # A save waits until the previous one is on disk, a snapshot until the previous one is stored.
        self.save_blocked = d.save_blocked + max(0.0, d.save_written - between) * bool(every)
        self.snapshot_blocked = d.snapshot_blocked + max(0.0, d.snapshot_stored - short) * bool(snapshots)
        self._both = math.lcm(every, snapshots)  # where both are due, the disk comes first; 0: never
        self._before = [last_due(first, interval) for interval in (every, snapshots, self._both)]

    def counts(self, done: int) -> tuple[int, int]:
        """Return how many saves and how many snapshots were due after the steps up to this one."""
        saves, taken, both = (((last_due(done, interval) - before) // interval if interval else 0) for interval, before
                              in zip((self.every, self.snapshots, self._both), self._before, strict=True))
        return saves, taken - both

    def completed(self, step: int) -> float:
        """Return when a step is complete, in seconds since the first one began."""
        return self._at(step, *self.counts(max(self.first, step - 1)))

    def saved(self, step: int) -> float:
        """Return when what is due after a step no longer holds up the loop."""
        return self._at(step, *self.counts(step))

    def _at(self, step: int, saves: int, taken: int) -> float:
        d = self._durations
        return d.opening + d.first_wait + (step - self.first) * (self._step + d.data_wait) + saves * (
            self.save_blocked + d.save_drag) + taken * self.snapshot_blocked

    def position(self, seconds: float, last: int) -> Position:
        """Return what is done so many seconds after the first step began."""
        d = self._durations
        low, high = self._around(seconds, last)
        while low < high:  # the last step that is complete by then
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.completed(middle) <= seconds else (low, middle - 1)
        before, after = self.counts(max(self.first, low - 1)), self.counts(low)
        began = low > self.first
        rest = seconds - (self.completed(low) if began else 0.0)
        blocked = min(rest, self.save_blocked * (after[0] > before[0]) + d.opening * (not began))
        wait = d.data_wait + d.first_wait * (not began)
        waited = min(rest - blocked, wait) if low < last else 0.0
        steps = (low - self.first) * self._step + before[0] * d.save_drag + before[1] * self.snapshot_blocked
        passed = (low - self.first) * d.data_wait + d.first_wait * began
        return Position(low, steps, max(0.0, rest - blocked - waited), passed + waited,
                        before[0] * self.save_blocked + d.opening * began + blocked)

    def _around(self, seconds: float, last: int) -> tuple[int, int]:
        """Return steps between which the last one lies that is complete by then."""
        d = self._durations
        short, save = self._step + d.data_wait, self.save_blocked + d.save_drag
        mean = short + (save / self.every if self.every else 0.0) + (
            self.snapshot_blocked / self.snapshots if self.snapshots else 0.0)
        guess = self.first + int((seconds - d.opening - d.first_wait) // mean)
        apart = 2 + math.ceil(2 * (save + self.snapshot_blocked) / short)
        return max(self.first, min(guess - apart, last)), max(self.first, min(guess + apart, last))

    def durable(self, position: Position, seconds: float, every: int, later: float) -> int:
        """Return the last step whose state, due every so many steps, was safe `later` seconds after it was taken.

        None of this start: 0.
        """
        step = last_due(position.done, every)
        while step > self.first and self.saved(step) + later > seconds:
            step -= every
        return step if step > self.first else 0
