"""The supervisor's decisions, apart from the waiting: whether to start again, after what pause, with which slots.

The supervisor follows them on the clock of this machine, a simulation (jaxtrain/simulation/) on a virtual one.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxtrain.distributed import exit_codes
from jaxtrain.launch.supervisor.slot_pool import SlotPool

OWN_END = 30.0  # seconds for the others to end by themselves after one ended deliberately
STACKS = 2.0  # seconds for the others to dump their stacks after one died
WORDS = 10.0  # seconds for the others to write their reports after one gave up


@dataclass(frozen=True)
class Decision:
    """The decision on what follows an attempt that did not finish the run."""

    again: bool  # whether to start again; False: give up
    pause: float = 0.0  # seconds to wait first
    lost: bool = False  # whether the slot that failed is left out for now


class RestartPolicy:
    """Decides what follows each attempt: starts again as long as there are new steps, and gives up otherwise."""

    def __init__(self, pool: SlotPool, max_restarts: int, max_backoff: float,
                 draw: Callable[[float, float], float] = random.uniform):
        """`draw` returns a number between two others, for the jitter of pauses."""
        self.pool, self._draw = pool, draw
        self._max_restarts, self._max_backoff = max_restarts, max_backoff
        self.failures = 0  # consecutive attempts without a new step and with the same processes
        self.idle = 0  # consecutive attempts without a new step, whatever processes they had

    def after(self, progress: bool, resized: bool = False, culprit: int | None = None) -> Decision:
        """Return what to do after an attempt.

        Args:
            progress: whether it completed a step that no attempt before it did.
            resized: whether it ended in order to continue with other slots.
            culprit: the slot that is to blame for its end.
        """
        self.idle = 0 if progress else self.idle + 1
        if resized and self.idle <= self.most_idle:
            self.failures = 0
            return Decision(again=True)
        self.failures = 0 if progress else self.failures + 1
        lost = culprit is not None and self.pool.died(culprit)
        if lost:
            self.failures = 0
        if self.failures > self._max_restarts or self.idle > self.most_idle:
            return Decision(again=False, lost=lost)
        pause = min(self._max_backoff, 2.0 ** (self.failures - 1)) * self._draw(0.5, 1.5) * bool(self.failures)
        return Decision(again=True, pause=pause, lost=lost)

    @property
    def most_idle(self) -> int:
        """The number of attempts in a row that may be without a new step while slots are left out and taken back."""
        return self._max_restarts + self.pool.slots * self.pool.lost_after


def patience(ended: Iterable[int | None], mute: bool) -> float:
    """Return how many seconds the other processes get to end by themselves, after the first ones have ended.

    Args:
        ended: the exit statuses of the first ones.
        mute: whether a process gives no sign of life, so that it is the reason why these gave up.
    """
    codes = list(ended)
    if all(code in (*exit_codes.FINAL, exit_codes.SAVED) for code in codes):
        return OWN_END
    return WORDS if all(code == exit_codes.RESTART for code in codes) and not mute else STACKS
