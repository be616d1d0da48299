"""The save policy: every `checkpoint.every` steps, and one piece of advice where another interval would lose less time.

A save takes time from training, a failure loses the work since the last save. Daly's formula (J. T. Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps", 2006) balances the two; it refines Young's sqrt(2
x C x M) for costs C that are not small against the mean time M between failures. C is measured: the seconds for which a
save blocks the loop, plus how much slower steps are while it is written. M is a prior, corrected by the goodput ledger.
"""

import contextlib
import math
from collections.abc import Callable, Iterator

import jax

from jaxtrain.checkpoint.due_steps import is_due
from jaxtrain.config.schema import CheckpointConfig
from jaxtrain.errors import say
from jaxtrain.observe.ledger import Ledger

MOST = 1800.0  # seconds of work between two saves that are advised at most, however rare failures are
# 6.50 failures in a thousand node-days: A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning
# Research Clusters" (2025), RSC-1. Llama 3 405B had 3.8 (419 in 54 days on 16,384 GPUs, eight to a node).
PROCESS_MTBF = 1000 / 6.5 * 24 * 3600.0
_STEPS = 10  # a save that comes after fewer steps is not measured: the first steps of a run are not like the others
_LONG = 600.0  # seconds that a run has to last before anything is said
_MUCH = 0.01  # the share of the time that can be saved before anything is said


def daly(cost: float, mtbf: float) -> float:
    """Return the seconds of work between two saves that minimize the time lost to saves and failures together."""
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def lost(work: float, cost: float, mtbf: float) -> float:
    """Return the share of the time lost to saves and failures with so many seconds of work between two saves."""
    exponent = (work + cost) / mtbf
    return 1 - work / mtbf * math.exp(-exponent) / -math.expm1(-exponent)


class SavePolicy:
    """Decides after which steps to save, and measures what that costs; every process makes all calls."""

    def __init__(self, config: CheckpointConfig, ledger: Ledger, writing: Callable[[], bool],
                 failed: Callable[[], bool]):
        """Set up the policy for a run that continues from where the ledger is.

        Args:
            writing: whether the last save is not on disk yet.
            failed: whether the last save failed.
        """
        self._every, self._ledger, self._writing, self._failed = config.every, ledger, writing, failed
        self._prior = config.mtbf_hours * 3600 or PROCESS_MTBF / jax.process_count()
        self._first = ledger.reached[0]
        self._calm = ledger.reached  # step and seconds of steps when the last save was on disk
        self._pace = 0.0  # seconds per step without a save in progress
        self._saving: tuple[int, float] | None = None  # step and seconds of steps when the save being written began
        self._ended = self._first, ledger.now()  # step and time when the last save no longer blocked the loop
        self._work = 0.0  # seconds per step between saves, with all that the loop waits for
        self._blocked = 0.0  # seconds that the last save blocked the loop
        self._fields: dict[str, float] = {}
        self._advised = jax.process_index() != 0

    def due(self, done: int) -> bool:
        """Return whether to save after this step."""
        if not self._writing():
            self._settle()
        return is_due(done, self._every)

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """Wrap the call that saves, and measure how long it blocks; no step is in flight."""
        step, seconds = self._ledger.reached
        if self._saving is None and step > self._calm[0]:
            self._pace = (seconds - self._calm[1]) / (step - self._calm[0])
        self._settle()  # a previous save still in progress is waited for
        began = self._ledger.now()
        self._work = (began - self._ended[1]) / max(1, step - self._ended[0])
        with self._ledger.book("checkpoint"):
            yield
        self._saving, self._ended = (step, seconds), (step, self._ledger.now())
        self._blocked = self._ended[1] - began
        self._fields = {"checkpoint_blocked_s": self._blocked}

    def pop_fields(self) -> dict[str, float]:
        """Return `checkpoint_blocked_s`, the seconds the last save blocked the loop, for the next line of metrics."""
        fields, self._fields = self._fields, {}
        return fields

    def _settle(self) -> None:
        """Take the cost of a save that is on disk, and give advice if it is due."""
        if self._saving is None:
            return
        step, seconds = self._saving
        self._saving, self._calm = None, self._ledger.reached
        if self._advised or self._failed() or step - self._first < _STEPS:
            return
        slower = self._calm[1] - seconds - (self._calm[0] - step) * self._pace
        self._advise(self._blocked + max(0.0, slower))

    def _advise(self, cost: float) -> None:
        """Print the interval that would lose the least time if the configured one loses much more."""
        life = self._ledger.account()
        if life.lived < _LONG:
            return
        mtbf = (self._prior + life.lived) / (1 + life.failures)  # the prior counts as one failure
        steps = float(f"{min(MOST, daly(cost, mtbf)) / self._work:.2g}")  # more digits would promise too much
        best = max(1, min(life.incarnations[-1].last_step, round(steps)))
        now, then = (lost(steps * self._work, cost, mtbf) for steps in (self._every, best))
        if now - then > _MUCH:
            self._advised = True
            say(f"hint: saves and failures cost {now:.1%} of the time; checkpoint.every={best} (now {self._every}) "
                f"would cost {then:.1%}")
