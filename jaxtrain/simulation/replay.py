"""Replays of real runs: the same failures on the virtual clock, and how far the two ledgers are apart."""

import dataclasses
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.config.schema import CheckpointConfig
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import user_json
from jaxtrain.launch.supervisor.slot_pool import SlotPool
from jaxtrain.launch.supervisor.supervisor import Settings
from jaxtrain.observe.events import events
from jaxtrain.observe.goodput import CATEGORIES, Account, account, incarnations
from jaxtrain.simulation.failure_trace import Failure, recorded
from jaxtrain.simulation.predictions import percentiles
from jaxtrain.simulation.run_durations import Durations
from jaxtrain.simulation.virtual_run import End, Setup, VirtualRun

_FORM = {"checkpoint": {"every": int, "local_checkpoint_every": int}}
SMALL = 0.01  # of the run's life: categories below it are too short to compare by ratio


@dataclass(frozen=True)
class Replay:
    """A run's own account, and that of its simulation."""

    measured: Account
    simulated: Sequence[Account]  # with times of failures that differ by up to half the time between two saves
    failures: int  # in the trace

    def rows(self) -> list[tuple[str, float, float]]:
        """Return the categories that either has, with its seconds and the simulated mean; and the last step."""
        found = [(name, self.measured.seconds[name], statistics.fmean(one.seconds[name] for one in self.simulated))
                 for name in CATEGORIES]
        return [*(row for row in found if row[1] or row[2]),
                ("last step", self.measured.step, statistics.fmean(one.step for one in self.simulated))]

    @property
    def ettr(self) -> tuple[float, float, float]:
        """The simulated ETTR: the 10th, 50th and 90th percentile."""
        return percentiles([one.ettr for one in self.simulated])

    @property
    def worst(self) -> float:
        """The largest relative difference among the categories that have a hundredth of the run's life or more."""
        return max(abs(b / a - 1) for _, a, b in self.rows()[:-1] if a >= SMALL * self.measured.life)

    @property
    def misplaced(self) -> float:
        """The largest difference of a category, as a share of the run's life."""
        return max(abs(b - a) for _, a, b in self.rows()[:-1]) / self.measured.life


class _Struck(VirtualRun):
    """A run each of whose attempts is struck so many seconds after it began, as an attempt of the real run was."""

    def __init__(self, setup: Setup, offsets: Sequence[Failure], durations: Sequence[Durations], seed: int):
        """`durations`: those of each attempt; the last ones go for all further attempts."""
        super().__init__(setup, offsets, seed)
        self._each = list(durations)

    def _attempt(self, pool: SlotPool) -> End:
        self.d = self._each.pop(0) if len(self._each) > 1 else self._each[0]
        if self._next < len(self._failures):
            offset = self._failures[self._next]
            self._failures[self._next] = dataclasses.replace(offset, at=self._clock.now + offset.at)
        return super()._attempt(pool)


def replay(workdir: str | Path, durations: Sequence[Durations], failures: Sequence[Failure] | None = None,
           rules: Settings | None = None, runs: int = 20, seed: int = 0) -> Replay:
    """Simulate a run with the failures that it had: each attempt fails as long after its beginning as the real one.

    The simulation lasts as long as the run did: what is compared is how that time was spent, and what step it reached.

    Whether a failure comes just before or just after a save is chance, in the real run too. So it is simulated `runs`
    times, with times of failures that differ by up to half the time between two saves.

    Args:
        durations: those of each attempt, or one for all.
        failures: in seconds since the run's first attempt; by default as its events tell of them.
        rules: of its supervisor; by default those of `jaxtrain supervise`.

    Raises:
        UserError: the workdir is not that of a run under the supervisor.
    """
    config = user_json(Path(workdir) / "config.json", _FORM, "--replay", "give the workdir of a run")
    starts = incarnations(workdir)
    slots = [event["slots"] for event in events(workdir) if event["kind"] == "attempt" and event.get("slots")]
    if config is None or not starts or not slots:
        raise UserError("--replay", f"{workdir} has no ledger of a run under the supervisor",
                        "give the workdir of a run that jaxtrain supervise has started")
    began = _first_attempt(workdir)
    checkpoint = CheckpointConfig(every=config["checkpoint"]["every"],
                                  local_checkpoint_every=config["checkpoint"]["local_checkpoint_every"])
    setup = Setup(max(map(len, slots)), durations[0], checkpoint, rules=rules or Settings(),
                  until=starts[-1].sign - began)
    trace = recorded(workdir) if failures is None else list(failures)
    attempts = [event["time"] - began for event in events(workdir) if event["kind"] == "attempt"]
    offsets = [dataclasses.replace(one, at=one.at - max(time for time in attempts if time <= one.at)) for one in trace]
    pace = statistics.median(one.step + one.data_wait for one in durations)
    apart = (checkpoint.local_checkpoint_every or checkpoint.every) * pace / 2
    dice = random.Random(seed)
    simulated = []
    for run in range(runs):
        struck = [dataclasses.replace(one, at=max(0.0, one.at + dice.uniform(-apart, apart))) for one in offsets]
        simulated.append(_Struck(setup, struck, durations, seed + run).run().account)
    return Replay(account(starts), simulated, len(trace))


def _first_attempt(workdir: str | Path) -> float:
    return next(event["time"] for event in events(workdir) if event["kind"] == "attempt")
