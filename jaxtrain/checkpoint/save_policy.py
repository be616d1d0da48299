"""When to save: every N steps, or at the interval that loses the least time (`checkpoint.every=auto`).

A save takes time from training, a failure loses the work since the last save. Daly's formula (J. T. Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps", 2006) balances the two; it refines Young's sqrt(2
x C x M) for costs C that are not small against the mean time M between failures. C is measured: the seconds for which a
save blocks the loop, plus how much slower steps are while it is written. M comes from the goodput ledger.
"""

import contextlib
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxtrain.config.schema import CheckpointConfig
from jaxtrain.errors import say
from jaxtrain.observe import events
from jaxtrain.observe.goodput import duration
from jaxtrain.observe.ledger import Ledger

FIRST = 60.0  # seconds of work before the first save, while its cost, and whether it works, is unknown
LEAST, MOST = 10.0, 1800.0  # seconds of work between two saves
SPARE = 10  # saves are at least this many save durations apart: they never queue, and the disk is free in between
# 6.50 failures in a thousand node-days: A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning
# Research Clusters" (2025), RSC-1. Llama 3 405B had 3.8 (419 in 54 days on 16,384 GPUs, eight to a node).
PROCESS_MTBF = 1000 / 6.5 * 24 * 3600.0
_PLANS = itertools.count()  # all processes make the same plans, so a number identifies a plan everywhere


def daly(cost: float, mtbf: float) -> float:
    """Return the seconds of work between two saves that minimize the time lost to saves and failures together."""
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


class SavePolicy:
    """Decides after which steps to save; every process makes all calls, at the same steps, and gets the same answers.

    With `auto` process 0 decides and informs the others through the coordination service: at each agreed step it says
    what the next agreed step is, and whether to save there or only to decide again. So clocks and durations matter in
    one process only.
    """

    def __init__(self, config: CheckpointConfig, ledger: Ledger, writing: Callable[[], bool],
                 failed: Callable[[], bool], *, workdir: str | Path, start: int):
        """Set up the policy for a run that continues from step `start`.

        Args:
            writing: whether the last save is not on disk yet.
            failed: whether the last save failed.
        """
        self._ledger, self._writing, self._failed, self._workdir = ledger, writing, failed, workdir
        self._every = 0 if isinstance(config.every, str) else config.every
        self._auto = config.every == "auto"
        self._prior = config.mtbf_hours * 3600 or PROCESS_MTBF / jax.process_count()
        self._calm: deque[float] = deque(maxlen=200)  # seconds per step without a save in progress
        self._slow: list[float] = []  # seconds per step while a save is being written
        self._costs: deque[float] = deque(maxlen=5)
        self._durations: deque[float] = deque(maxlen=5)
        self._saving: float | None = None  # when the save being written began
        self._blocked: float | None = None  # seconds that the last save blocked the loop, until reported
        self._last_blocked = 0.0
        earlier = ledger.earlier
        self._failures, self._lived = earlier.failures, earlier.lived
        for one in reversed(earlier.incarnations):
            if one.save_cost is not None and one.save_duration is not None:
                self._costs.append(one.save_cost)
                self._durations.append(one.save_duration)
                break
        if earlier.incarnations and earlier.incarnations[-1].ended not in ("finished", "stopped"):
            self._failures += 1  # the run before this start
        self._said = 0.0
        self._start = start
        self._saved_at = self._planned_at = self._ledger.now()
        self._plan, self._planned = (start + 1, False), start
        ledger.on_step(self._stepped)  # cost is settled later by the thread that reports completed steps

    def due(self, done: int) -> bool:
        """Return whether to save after this step."""
        if not self._auto:
            return bool(self._every) and done % self._every == 0
        step, save = self._plan
        if done < step:
            return False
        if not save:
            self._agree(done)
        return save

    @contextlib.contextmanager
    def taking(self, done: int) -> Iterator[None]:
        """Wrap the call that saves: measures how long it blocks, and plans the next save."""
        self._settle()
        before = self._ledger.seconds("checkpoint")
        with self._ledger.book("checkpoint"):
            yield
        self._settle(written=True)  # a previous save still in progress has been waited for
        self._ledger.pin()
        self._blocked = self._last_blocked = self._ledger.seconds("checkpoint") - before
        self._saving = self._saved_at = self._ledger.now()
        if self._auto:
            self._agree(done)

    def pop_fields(self) -> dict[str, float]:
        """Return `checkpoint_blocked_s`, the seconds the last save blocked the loop, for the next line of metrics."""
        blocked, self._blocked = self._blocked, None
        return {} if blocked is None else {"checkpoint_blocked_s": blocked}

    # -------------------------------------------------------------------------------------------------- what it costs
    def _stepped(self, seconds: float) -> None:
        """Note that a step is complete (called on the metrics thread)."""
        (self._calm if self._saving is None else self._slow).append(seconds)
        self._settle()

    def _settle(self, written: bool = False) -> None:
        """Record the cost of a save once it is on disk."""
        if self._saving is None or (self._writing() and not written):
            return
        if self._failed():  # a failed save says nothing about the cost of one that succeeds
            self._saving, self._slow = None, []
            return
        took, slow = self._ledger.now() - self._saving, self._slow
        slower = sum(slow) - len(slow) * statistics.median(self._calm) if self._calm else 0.0
        cost = self._last_blocked + max(0.0, slower)
        self._saving, self._slow = None, []
        self._costs.append(cost)
        self._durations.append(self._last_blocked + took)
        self._ledger.note_save(statistics.median(self._costs), statistics.median(self._durations))

    @property
    def mtbf(self) -> float:
        """The estimated seconds between failures: the prior counts as one failure, plus those observed."""
        return (self._prior + self._lived) / (1 + self._failures)

    def seconds(self) -> float:
        """Return the seconds of work between two saves."""
        if not self._costs:
            return FIRST
        least = max(LEAST, SPARE * statistics.median(self._durations))
        return max(least, min(MOST, daly(statistics.median(self._costs), self.mtbf)))

    # --------------------------------------------------------------------------------------------------- the next step
    def _agree(self, done: int) -> None:
        if jax.process_index() == 0:
            self._plan = self._decide(done)
        client = jax._src.distributed.global_state.client
        if client is not None:  # there are other processes
            key = f"jaxtrain/saves/{next(_PLANS)}"
            if jax.process_index() == 0:
                client.key_value_set(key, f"{self._plan[0]} {int(self._plan[1])}")
            else:  # already there, or set once process 0 reaches this step
                step, save = client.blocking_key_value_get(key, 3_600_000).split()
                self._plan = int(step), save == "1"

    def _decide(self, done: int) -> tuple[int, bool]:
        """Return the next agreed step, and whether to save there.

        The measured pace is extrapolated only as far ahead as it has been observed.
        """
        now = self._ledger.now()
        pace = (now - self._planned_at) / max(1, done - self._planned)
        self._planned, self._planned_at = done, now
        wanted = self.seconds()
        ahead = max(1, round((self._saved_at + wanted - now) / max(pace, 1e-9)))
        known = done - self._start - 1  # the first step includes compilation and other waits
        if known and self._costs and abs(wanted - self._said) > 0.25 * self._said:
            self._tell(wanted, pace)
        return (done + ahead, True) if ahead <= known else (done + max(1, known), False)

    def _tell(self, wanted: float, pace: float) -> None:
        self._said = wanted
        cost, took = statistics.median(self._costs), statistics.median(self._durations)
        steps = max(1, round(wanted / max(pace, 1e-9)))
        say(f"checkpoint.every=auto: a save every {duration(wanted)} (about {steps:,} steps); one costs "
            f"{cost:.2g} s and is on disk after {took:.2g} s, a failure is expected every {duration(self.mtbf)}")
        events.record(self._workdir, "checkpoint_interval", seconds=wanted, steps=steps, save_cost_s=cost,
                      save_duration_s=took, mtbf_s=self.mtbf)
