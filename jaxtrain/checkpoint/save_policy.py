"""When to save: every so many steps, or as often as it pays (`checkpoint.every=auto`).

A save takes time from training, a failure takes the work since the last save. Daly's formula (J. T. Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps", 2006), which refines Young's sqrt(2 x C x M) for
costs C that are not small against the mean time M between failures, balances the two. C is measured: the seconds for
which a save blocks the loop, and by how much steps are slower while it is written. M is what the ledger has seen.
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

FIRST = 60.0  # seconds of work to the first save, when nobody knows yet what one costs, or whether it works
LEAST, MOST = 10.0, 1800.0  # seconds of work between two saves
SPARE = 10  # times the duration of a save lie between two: they never queue, and disks have other things to do
# 6.50 failures in a thousand node-days: A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning
# Research Clusters" (2025), RSC-1. Llama 3 405B had 3.8 (419 in 54 days on 16,384 GPUs, eight to a node).
PROCESS_MTBF = 1000 / 6.5 * 24 * 3600.0
_PLANS = itertools.count()  # all processes make all plans, so a number names the same plan everywhere


def daly(cost: float, mtbf: float) -> float:
    """Seconds of work between two saves that lose the least, for saves and failures together."""
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


class SavePolicy:
    """Says after which steps to save. Every process makes all calls, at the same steps, and gets the same answers.

    With `auto` process 0 decides and tells the others through the coordination service: at each agreed step what the
    next agreed step is, and whether to save there or only to decide anew. So clocks and seconds matter in one process.
    """

    def __init__(self, config: CheckpointConfig, ledger: Ledger, writing: Callable[[], bool],
                 failed: Callable[[], bool], *, workdir: str | Path, start: int):
        """For a run that goes on from step `start`. `writing`, `failed`: whether the last save is not on disk yet, and
        whether it never came there.
        """
        self._ledger, self._writing, self._failed, self._workdir = ledger, writing, failed, workdir
        self._every = 0 if isinstance(config.every, str) else config.every
        self._auto = config.every == "auto"
        self._prior = config.mtbf_hours * 3600 or PROCESS_MTBF / jax.process_count()
        self._calm: deque[float] = deque(maxlen=200)  # seconds of steps
        self._slow: list[float] = []  # of those beside which a save is written
        self._costs: deque[float] = deque(maxlen=5)
        self._durations: deque[float] = deque(maxlen=5)
        self._saving: float | None = None  # since when a save is written
        self._blocked: float | None = None  # seconds of the last save, until told
        self._last_blocked = 0.0
        earlier = ledger.earlier
        self._failures, self._lived = earlier.failures, earlier.lived
        for one in reversed(earlier.incarnations):
            if one.save_cost is not None and one.save_duration is not None:
                self._costs.append(one.save_cost)
                self._durations.append(one.save_duration)
                break
        if earlier.incarnations and earlier.incarnations[-1].ended not in ("finished", "stopped"):
            self._failures += 1  # the last one before this start
        self._said = 0.0
        self._start = start
        self._saved_at = self._planned_at = self._ledger.now()
        self._plan, self._planned = (start + 1, False), start
        ledger.on_step(self._stepped)  # whoever says how many steps may want to know what a save costs, later

    def due(self, done: int) -> bool:
        """Whether to save after this step."""
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
        """Around the call that saves: measures for how long it blocks, and plans the next one."""
        self._settle()
        before = self._ledger.seconds("checkpoint")
        with self._ledger.book("checkpoint"):
            yield
        self._settle(written=True)  # if there was one on its way still, this one has waited for it
        self._ledger.pin()
        self._blocked = self._last_blocked = self._ledger.seconds("checkpoint") - before
        self._saving = self._saved_at = self._ledger.now()
        if self._auto:
            self._agree(done)

    def pop_fields(self) -> dict[str, float]:
        """For the next line of metrics: `checkpoint_blocked_s`, the seconds for which a save just held up the loop."""
        blocked, self._blocked = self._blocked, None
        return {} if blocked is None else {"checkpoint_blocked_s": blocked}

    # -------------------------------------------------------------------------------------------------- what it costs
    def _stepped(self, seconds: float) -> None:
        """A step is complete. (On the thread of the metrics.)"""
        (self._calm if self._saving is None else self._slow).append(seconds)
        self._settle()

    def _settle(self, written: bool = False) -> None:
        """If the save is on disk by now, what it cost is known."""
        if self._saving is None or (self._writing() and not written):
            return
        if self._failed():  # it says nothing of what one costs that succeeds
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
        """Seconds between failures: the prior counts as one failure, then what was seen does."""
        return (self._prior + self._lived) / (1 + self._failures)

    def seconds(self) -> float:
        """Of work between two saves."""
        if not self._costs:
            return FIRST
        least = max(LEAST, SPARE * statistics.median(self._durations))
        return max(least, min(MOST, daly(statistics.median(self._costs), self.mtbf)))

    # --------------------------------------------------------------------------------------------------- the next step
    def _agree(self, done: int) -> None:
        if jax.process_index() == 0:
            self._plan = self._decide(done)
        client = jax._src.distributed.global_state.client
        if client is not None:  # there are others
            key = f"jaxtrain/saves/{next(_PLANS)}"
            if jax.process_index() == 0:
                client.key_value_set(key, f"{self._plan[0]} {int(self._plan[1])}")
            else:  # it is there already, or will be when process 0 has made this step
                step, save = client.blocking_key_value_get(key, 3_600_000).split()
                self._plan = int(step), save == "1"

    def _decide(self, done: int) -> tuple[int, bool]:
        """The next agreed step, and whether to save there. A pace is believed for as long as it has been seen."""
        now = self._ledger.now()
        pace = (now - self._planned_at) / max(1, done - self._planned)
        self._planned, self._planned_at = done, now
        wanted = self.seconds()
        ahead = max(1, round((self._saved_at + wanted - now) / max(pace, 1e-9)))
        known = done - self._start - 1  # the first step has much to wait for
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
