"""A run under the supervisor on a virtual clock: failures strike, the real rules decide, and the real ledger books.

What follows an attempt is decided by the supervisor's `RestartPolicy` and `SlotPool`, after how long a hang is noticed
by the watchdog's `hang_limit`, when saves are due and what survives by the rules of the checkpoints; the ledger is the
run's own, on this clock. Only the durations are inputs.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxtrain.checkpoint.local.partners import shift_of
from jaxtrain.config.schema import CheckpointConfig, ResilienceConfig
from jaxtrain.distributed import exit_codes
from jaxtrain.launch.supervisor.restart_policy import RestartPolicy, patience
from jaxtrain.launch.supervisor.slot_pool import SlotPool
from jaxtrain.launch.supervisor.supervisor import Settings
from jaxtrain.observe.events import record
from jaxtrain.observe.goodput import Account, Incarnation, account
from jaxtrain.observe.ledger import Ledger
from jaxtrain.resilience.watchdog import hang_limit
from jaxtrain.simulation.failure_trace import Failure
from jaxtrain.simulation.machine_room import MachineRoom
from jaxtrain.simulation.run_durations import Durations
from jaxtrain.simulation.start_timeline import Position, Timeline

_KILLED = -9
ENDLESS = 10**12  # steps of a run that is simulated for a time


@dataclass(frozen=True)
class Setup:
    """A run to simulate. Each slot is a machine with its processes, or a process of a run on one machine."""

    slots: int
    durations: Durations = field(default_factory=Durations)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    rules: Settings = field(default_factory=Settings)  # of the supervisor: the number of processes is that of slots
    least: int = 0  # the fewest slots to continue with; 0: all
    fits: Callable[[int], bool] = lambda count: True
    spares: int = 0
    last_step: int = ENDLESS
    until: float = math.inf  # seconds after which the simulation ends


@dataclass(frozen=True)
class Outcome:
    """The result of a simulated run."""

    starts: Sequence[Incarnation]
    failures: int  # that ended an attempt
    gave_up: int  # times that the supervisor did
    since: float  # the wall clock at the first attempt
    seconds: float  # from the first start to the end
    down: bool  # whether it did not run at the end

    @property
    def account(self) -> Account:
        """The ledger's account of it, with the time in which it was down at the end, which no later start books."""
        return account([*self.starts, *[Incarnation(began=self.since + self.seconds)] * self.down])


@dataclass
class _Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class End:
    """The end of an attempt."""

    finished: bool = False
    culprit: int | None = None
    resized: bool = False
    down: float = 0.0  # seconds for which the run stays down in any case


class VirtualRun:
    """One run with its failures; `run` simulates it."""

    def __init__(self, setup: Setup, failures: Sequence[Failure], seed: int = 0, workdir: str | Path | None = None,
                 since: float = 0.0):
        """`workdir`: where its ledger and events are written, if anywhere, dated from `since` on."""
        self.setup, self.d = setup, setup.durations
        self._failures, self._next = list(failures), 0
        self._dice, self._clock = random.Random(seed), _Clock()
        self._workdir, self._since = None if workdir is None else Path(workdir), since
        self._room = MachineRoom(setup.spares, self.d.swap, self.d.repair, self._dice)
        self._shift = shift_of([f"machine {slot}" for slot in range(setup.slots)])  # to the peer with the other copy
        self._starts: list[Incarnation] = []
        self._best = 0  # the highest step that was ever complete
        self._disk = self._mirror = self._memory = 0  # the step that each tier holds
        self._forgot: dict[int, float] = {}  # the slots that lost their part of the state in memory, and when
        self._struck = self._gave_up = 0
        self._down_since: float | None = None

    def run(self) -> Outcome:
        """Return what happens until the last step, or until the time is up."""
        policy, down = self._policy(), True
        while self._clock.now < self.setup.until:
            best, end = self._best, self._attempt(policy.pool)
            if end.finished:
                down = False
                break
            decided = policy.after(self._best > best, end.resized, end.culprit)
            if decided.lost:
                self._tell("process_lost", slot=end.culprit)
            self._tell("restart", failures=policy.failures, step=self._best)
            pause = decided.pause
            if not decided.again:
                self._tell("gave_up", attempts=policy.idle)
                self._gave_up += 1
                policy, pause = self._policy(), self.d.person
            self._clock.now += max(pause, end.down)
        seconds = min(self._clock.now, self.setup.until)
        return Outcome(self._starts, self._struck, self._gave_up, self._since, seconds, down)

    def _policy(self) -> RestartPolicy:
        setup, rules = self.setup, self.setup.rules
        pool = SlotPool(setup.slots, setup.least or setup.slots, setup.fits, rules.lost_after, rules.retry_lost,
                        self._clock)
        return RestartPolicy(pool, rules.max_restarts, rules.max_backoff, self._dice.uniform)

    # --------------------------------------------------------------------------------------------------- one attempt
    def _attempt(self, pool: SlotPool) -> End:
        """Start all slots, and go on to the end of the attempt."""
        slots = pool.wanted()
        self._tell("attempt", slots=slots, step=self._best)
        self._strike_the_idle()
        if missing := self._room.missing(slots, self._clock.now):
            back = max(self._room.back(slot) for slot in missing)
            if pool.elastic:  # a process of this host crashes at its start, where its device is gone
                self._clock.now += self.d.launch + self.d.init
                return End(culprit=missing[0])
            if back - self._clock.now > self.d.join:
                self._clock.now += self.d.launch + self.d.join
                return End()
            self._clock.now = back
        return self._trained(pool, slots, self._clock.now + self.d.launch)

    def _strike_the_idle(self) -> None:
        """Let what failed while nothing ran take its machine; processes that are not there cannot die."""
        while self._next < len(self._failures) and self._failures[self._next].at < self._clock.now:
            failure = self._failures[self._next]
            self._next += 1
            if failure.kind == "machine":
                self._lose(failure)

    def _trained(self, pool: SlotPool, slots: list[int], began: float) -> End:
        """Train from the newest state that there is until something ends it."""
        first = self._newest()
        restored = began + self.d.init + self.d.restore * bool(first)
        begin = restored + self.d.compile
        checkpoint = self.setup.checkpoint
        line = Timeline(self.d, self.setup.slots / len(slots), first, checkpoint.every,
                        checkpoint.local_checkpoint_every)
        last = self.setup.last_step
        finish = begin + line.completed(last) + self.d.save_blocked + self.d.finish if last < ENDLESS else math.inf
        resize = self._resize(pool, slots)
        failure = self._strike(slots, min(finish, resize, self.setup.until))
        at = failure.at if failure else min(finish, resize, self.setup.until)
        if at > begin and (at == resize or (failure and failure.kind == "stop")):  # the step in progress is completed
            at = begin + line.completed(line.position(at - begin, last).done + 1)
        position = line.position(at - begin, last) if at > begin else Position(first, 0.0)
        if self._down_since is not None and position.done > first:
            self._tell("recovered", at=begin + line.completed(first + 1), seconds=begin + line.completed(
                first + 1) - self._down_since, step=first + 1)
            self._down_since = None
        self._best = max(self._best, position.done)
        self._keep(line, position, begin, at)
        book = _Book(began, restored, begin, at, line, position, first)
        if failure is None:
            how = "finished" if at == finish else "stopped" if at >= resize else ""
            return self._ended(book, how, resized=how == "stopped")
        if failure.kind == "stop":
            return self._ended(book, "stopped", down=self.d.maintenance)
        return self._failed(book, failure, slots)

    def _resize(self, pool: SlotPool, slots: list[int]) -> float:
        """Return when the run continues with other slots, because those that were lost have rested."""
        if not pool.lost or len(slots) == self.setup.slots:
            return math.inf
        return max(self._clock.now, min(pool.lost.values()) + pool.rest)

    def _strike(self, slots: list[int], before: float) -> Failure | None:
        """Return the next failure before that time that ends an attempt with these slots."""
        while self._next < len(self._failures) and self._failures[self._next].at < before:
            failure = self._failures[self._next]
            self._next += 1
            if failure.kind == "machine" and self._room.back(failure.slot) > failure.at:
                continue  # it is lost already
            if failure.kind == "machine":
                self._lose(failure)
            if failure.slot in slots or failure.kind in ("stop", "storage"):
                self._struck += failure.kind != "stop"
                return failure
        return None

    def _lose(self, failure: Failure) -> None:
        if self._room.back(failure.slot) <= failure.at:
            self._room.lose(failure.slot, failure.at)
            self._forgot[failure.slot] = failure.at

    # ------------------------------------------------------------------------------------------------ what is kept
    def _keep(self, line: Timeline, position: Position, begin: float, at: float) -> None:
        """Note what the tiers hold at some moment of a start whose first step began at another."""
        checkpoint, d, seconds = self.setup.checkpoint, self.d, at - begin
        if step := line.durable(position, seconds, checkpoint.every, d.save_written):
            self._disk = step
        if checkpoint.mirror and (step := line.durable(position, seconds, checkpoint.every,
                                                       d.save_written + d.mirrored)):
            self._mirror = step
        if checkpoint.local_checkpoint_every and (step := line.durable(
                position, seconds, checkpoint.local_checkpoint_every, d.snapshot_stored)):
            self._memory = step
            self._forgot = {slot: lost for slot, lost in self._forgot.items() if lost >= at}

    def _newest(self) -> int:
        """Return the step to go on from: on disk, or in memory where that is newer and whole."""
        whole = not any((slot + self._shift) % self.setup.slots in self._forgot for slot in self._forgot)
        return max(self._disk, self._memory if whole else 0)

    # ------------------------------------------------------------------------------------------------ how it ends
    def _ended(self, book: "_Book", how: str, resized: bool = False, down: float = 0.0) -> End:
        """Book a start that ended by itself: it has saved, unless the simulation is over."""
        saved = self.d.save_blocked + self.d.save_written if how == "stopped" else 0.0
        if how:
            self._disk = book.position.done
        self._clock.now = book.at
        self._starts.append(self._booked(book, book.at, how, saved))
        self._clock.now = book.at + saved
        return End(finished=not saved, resized=resized, down=down)

    def _failed(self, book: "_Book", failure: Failure, slots: list[int]) -> End:
        """Book a start that a failure ended, until it is noticed and all processes are gone."""
        noticed = failure.at + self._unnoticed(failure, training=failure.at > book.begin)
        code = _KILLED if failure.kind in ("process", "bug", "storage") else exit_codes.RESTART
        others = min(self.d.others_end, patience([code], mute=False)) if len(slots) > 1 else 0.0
        if failure.kind == "storage":
            self._disk, self._memory = self._mirror, 0
        dies_with = failure.kind in ("process", "machine") and failure.slot == slots[0]  # process 0 writes the ledger
        sign = failure.at if dies_with else noticed + others
        opened = book.began + self.d.init
        if sign >= opened:
            written = opened + (sign - opened) // self.d.ledger * self.d.ledger
            written = max(written, book.restored) if sign >= book.restored else written
            self._starts.append(self._booked(book, written, "failed" if failure.kind == "storage" else ""))
        self._clock.now = noticed + others
        self._down_since = self._down_since or failure.at
        blamed = failure.slot if failure.kind in ("process", "machine") else None
        return End(culprit=blamed, down=self.d.fix if failure.kind == "bug" else 0.0)

    def _unnoticed(self, failure: Failure, training: bool) -> float:
        """Return for how many seconds nobody notices a failure."""
        if failure.kind == "machine":
            return self.d.silence
        if failure.kind != "hang":
            return 0.0
        steps = [self.d.step + self.d.data_wait] * 64
        return hang_limit(self.setup.resilience, "train" if training else "start", steps)

    # ------------------------------------------------------------------------------------------------- what is booked
    def _booked(self, book: "_Book", written: float, how: str, saved: float = 0.0) -> Incarnation:
        """Return the record of a start as its ledger wrote it last; the ledger itself books it, on the run's clock."""
        before, self._clock.now = self._clock.now, book.began
        last = self.setup.last_step
        ledger = Ledger(self._workdir or ".", every=0, now=self._clock, wall=lambda: self._since + self._clock.now)
        self._spend(ledger, "init", min(written, book.began + self.d.init))
        if self._workdir is not None:
            ledger.open(last)
        self._spend(ledger, "restore", min(written, book.restored))
        if written > book.restored or how:
            ledger.resumed(book.first)
        self._spend(ledger, "compile", min(written, book.begin))
        if written > book.begin:
            position = book.line.position(min(written, book.at) - book.begin, last)
            for category in ("data_wait", "checkpoint"):
                self._spend(ledger, category, self._clock.now + getattr(position, category))
            if position.done > book.first:
                ledger.dispatched(position.done)
                self._clock.now += position.steps
                ledger.completed(position.done)
            left = written - self._clock.now  # of a step in progress, or after the last one
            if how == "finished":
                self._spend(ledger, "checkpoint", written)
            else:
                ledger.dispatched(position.done + 1)
                self._clock.now += left
        if saved:
            ledger.resumed(book.position.done)
            self._spend(ledger, "checkpoint", self._clock.now + saved)
        ledger.write(how)
        found = dataclasses.replace(ledger.so_far(), last_step=last)
        self._clock.now = before
        return found

    def _spend(self, ledger: Ledger, category: str, until: float) -> None:
        with ledger.book(category):
            self._clock.now = max(self._clock.now, until)

    def _tell(self, kind: str, at: float | None = None, **fields: object) -> None:
        if self._workdir is not None:
            time = self._since + (self._clock.now if at is None else at)
            record(self._workdir, kind, **{"process": "supervisor", "time": time, **fields})


@dataclass(frozen=True)
class _Book:
    """The moments of one start, in seconds of the virtual clock."""

    began: float  # the ledger begins
    restored: float  # the state is there
    begin: float  # the first step begins
    at: float  # something ends it
    line: Timeline
    position: Position  # of the steps at that moment
    first: int
