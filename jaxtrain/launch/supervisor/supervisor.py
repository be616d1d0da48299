"""The supervisor of one host's processes: it starts them as one run, and again when one dies or hangs."""

import contextlib
import fcntl
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain import errors
from jaxtrain.distributed import child_processes, exit_codes
from jaxtrain.distributed.authentication import make_secret
from jaxtrain.distributed.child_processes import Child
from jaxtrain.errors import UserError
from jaxtrain.launch.supervisor import failure_report
from jaxtrain.launch.supervisor.progress_file import Steps
from jaxtrain.launch.supervisor.restart_policy import OWN_END, RestartPolicy, patience
from jaxtrain.launch.supervisor.slot_pool import Order, SlotPool
from jaxtrain.observe.events import record

_TICK = 0.2  # seconds between polls; a death is noticed at once
_JUMP = 5.0  # seconds by which a clock is set at once instead of slewed
_FRESH = 300.0  # seconds within which such a jump may end a process
_ROOM = 2**20  # bytes that a start needs for its logs and records
_MUTE = 5.0  # seconds of silence after which a process is the likely reason why others gave up


@dataclass(frozen=True)
class Settings:
    """The processes of this host and the rules of their restarts; each field is a flag of `jaxtrain supervise`."""

    processes: int = 1
    min_processes: int = 1
    max_restarts: int = 5
    max_backoff: float = 60.0
    silent: float = 300.0
    lost_after: int = 2
    retry_lost: float = 600.0
    coordinator: str | None = None
    nodes: int = 1
    node_rank: int = 0
    program: Sequence[str] | None = None  # instead of jaxtrain.main


class End:
    """The outcome of an attempt."""

    def __init__(self, team: list[Child], silent: Child | None, mute: Child | None, resized: str, jumped: float = 0.0):
        failures = filter(None, [failure_report.first(team)])
        silent = silent or (mute if all(map(failure_report.follows, failures)) else None)
        self.resized = resized  # why the run is to change its size, if that ended the attempt
        self.logs = team[0].log.parent
        self.done = all(child.code == exit_codes.DONE for child in team)
        self.since = min(child.died or 0.0 for child in team)
        self.culprit = silent or failure_report.first(team)
        # The child whose slot is to blame: not one that only followed, or ended deliberately.
        self.lost = self.culprit if self.culprit and (silent or not failure_report.follows(self.culprit)) else None
        hanging = next((child for child in team if child.cut_off), team[0])
        self.why = (f"process {silent.rank} gave no sign of life" if silent else self.culprit.words() if self.culprit
                    else f"process {hanging.rank} did not end with the others")
        if jumped and self.culprit and self.culprit.code == -signal.SIGABRT and not self.lost:
            # JAX's own service, which uses that clock, ended all processes.
            self.why = f"the wall clock was set by {jumped:+.0f} s, and JAX took that for processes that fell silent"
        error = failure_report.reason(self.culprit) if self.culprit and not silent else ""
        self.told = f"{self.why}: {error}" if error and not jumped else self.why
        self.verdict = failure_report.verdict(self.culprit, self.why if silent else "") if self.culprit else self.why


def _secret(path: Path) -> dict[str, str]:
    """Return the variable that names the file with the run's secret, if the file system can keep one."""
    with contextlib.suppress(OSError):
        make_secret(path)
        if not path.stat().st_mode & 0o077:
            return {"JAXTRAIN_SECRET_FILE": str(path)}
    return {}


class Supervisor:
    """The supervisor of one host's processes."""

    def __init__(self, settings: Settings, rest: Sequence[str], workdir: Path):
        """Supervise `jaxtrain train` with the flags `rest`, whose workdir is this."""
        self.settings, self.rest, self.workdir = settings, rest, workdir.absolute()
        self._logs = self.workdir / "logs" / (f"node-{settings.node_rank}" if settings.nodes > 1 else "")
        self.shares = child_processes.shares(os.environ, settings.processes)
        self.staff = SlotPool(settings.processes, settings.min_processes, self._fits, settings.lost_after,
                              settings.retry_lost)
        self.order = Order(self.workdir / "processes", settings.min_processes, settings.processes, say)
        self.steps = Steps(self.workdir / "metrics.jsonl")
        self.asked: int | None = None  # the signal that asked the run to end
        self._at_once = False  # a second Ctrl-C arrived
        self._signals: list[int] = []  # received but not yet forwarded
        self._asking: subprocess.Popen | None = None
        self._fitting: set[int] | None = None

    # ----------------------------------------------------------------------------------------------- attempt by attempt
    def run(self) -> int:
        """Run attempts until there is a reason to end; returns the exit status."""
        policy = RestartPolicy(self.staff, self.settings.max_restarts, self.settings.max_backoff)
        down: tuple[float, str] | None = None  # since when the run has been down, and why
        while True:
            if not self._room():
                return self._asked_status(exit_codes.SAVED)
            best, end = self.steps.best, self._attempt(down)
            code = (end.culprit.code if end.culprit else 0) or 0
            if end.done:
                return exit_codes.DONE
            if self.asked:
                if code not in (0, exit_codes.SAVED, exit_codes.INTERRUPTED):
                    say(end.verdict)
                return self._asked_status(code)
            if code and code in exit_codes.FINAL:
                self._record("ended", code=code, why=end.verdict.partition("\n")[0])
                say(end.verdict)
                return code
            down = end.since, end.resized or end.why
            decided = policy.after(self.steps.best > best, bool(end.resized),
                                   end.lost.slot if end.lost else None)
            if end.resized and decided.again:
                continue
            if end.lost and decided.lost:
                say(f"process {end.lost.rank} keeps crashing: the run continues without it, and adds it again in "
                    f"{self.settings.retry_lost:.0f} s, or when a number is written to {self.workdir / 'processes'}")
                self._record("process_lost", slot=end.lost.slot)
            self._record("restart", why=end.why, failures=policy.failures, step=self.steps.newest)
            if not decided.again:
                say(f"gave up: {policy.idle} attempts in a row without a new step")
                say(end.verdict)
                self._record("gave_up", attempts=policy.idle, why=end.why)
                return exit_codes.STOPPED
            pause = decided.pause
            say(f"{end.told}; starting again" + (f" in {pause:.1f} s" if pause else "") + f"; logs: {end.logs}")
            self._sleep(pause)
            if self.asked:
                return self._asked_status(exit_codes.SAVED)

    def _asked_status(self, code: int) -> int:
        """Return the exit status after a signal; what was saved is saved, whatever failed during shutdown."""
        if code in (exit_codes.MISTAKE, exit_codes.STOPPED):
            return code
        return exit_codes.INTERRUPTED if self.asked == signal.SIGINT else exit_codes.SAVED

    def _attempt(self, down: tuple[float, str] | None) -> "End":
        """Start all processes and watch them until they end."""
        slots, logs = self.staff.wanted(), _next_folder(self._logs)
        coordinator = self.settings.coordinator or f"127.0.0.1:{_free_port()}"
        self.steps.look()
        self.steps.begin()
        self._record("attempt", attempt=int(logs.name), slots=slots, step=self.steps.newest)
        team: list[Child] = []
        silent = mute = None
        wait, resized, clocks, jumped, jumped_at = 0.0, "", time.time() - time.monotonic(), 0.0, 0.0
        try:
            for i, slot in enumerate(slots):
                team.append(self._start(i, slot, len(slots), coordinator, logs))
            shown = _Tail(team[0].log)
            while any(child.died is None for child in team):
                self._wait()
                shown.pump()
                if abs(jump := time.time() - time.monotonic() - clocks) > _JUMP:
                    clocks, jumped, jumped_at = clocks + jump, jump, time.monotonic()
                self.steps.look()
                if self.steps.again and self.staff.elastic:
                    self._ask_what_fits()
                if down and self.steps.again:
                    self._recovered(*down)
                    down = None
                for child in team:
                    child.look()
                if self._at_once:
                    break
                while self._signals:
                    number = self._signals.pop(0)
                    for child in team:
                        child.send(number)
                if ended := [child for child in team if child.died is not None]:
                    if not wait:  # the first of them
                        mute = self._silent(team, _MUTE)
                        wait = patience((child.code for child in ended), mute is not None)
                        if wait != OWN_END:
                            for child in team:
                                child.dump_stacks()
                    if time.monotonic() - min(child.died or 0.0 for child in ended) > wait:
                        break
                elif quiet := self._silent(team, self.settings.silent):
                    silent = quiet
                    silent.kill()
                elif not resized and not self.asked and (resized := self._resize(slots)):
                    say(f"{resized}: saving first")
                    for child in team:
                        child.send(signal.SIGTERM)
            shown.pump()
        finally:
            for child in team:
                child.kill()
                child.line.close()
        return End(team, silent, mute, resized, jumped if time.monotonic() - jumped_at < _FRESH else 0.0)

    def _start(self, i: int, slot: int, count: int, coordinator: str, logs: Path) -> Child:
        rank = self.settings.node_rank * self.settings.processes + i
        total = count * self.settings.nodes
        where = [f"--coordinator={coordinator}", f"--num_processes={total}", f"--process_id={rank}"]
        elastic = ["--config.resilience.elastic=true"] if self.staff.elastic else []
        program = self.settings.program or [sys.executable, "-m", "jaxtrain.main"]
        environment = {**os.environ, **self.shares[slot], "JAXTRAIN_FULL_PROCESSES": str(self.settings.processes)}
        environment.pop("JAXTRAIN_STARTS_FILE", None)  # the starts are counted here
        given = os.environ.keys() & {"JAXTRAIN_SECRET", "JAXTRAIN_SECRET_FILE"}
        if self.settings.processes * self.settings.nodes > 1 and not given:
            environment |= _secret(self.workdir / "secret")
        command = [*program, *elastic, *self.rest, *(where if total > 1 else [])]
        return child_processes.start(command, rank, slot, logs / f"process-{rank}.log", environment)

    # -------------------------------------------------------------------------------------------------- what is noticed
    def _silent(self, team: list[Child], seconds: float) -> Child | None:
        """Return a running child that has been silent for so long, or None (0 seconds: never)."""
        quiet = min((child for child in team if child.died is None), key=lambda child: child.heard, default=None)
        return quiet if quiet and seconds and time.monotonic() - quiet.heard > seconds else None

    def _resize(self, slots: list[int]) -> str:
        """Return why the run should continue with other slots, or "" if it should not."""
        if (number := self.order.new()) is not None:
            self.staff.ask(number)
            self._record("ordered", processes=number)
        if not self.staff.elastic or (wanted := self.staff.wanted()) == slots:
            return ""
        return f"{len(wanted)} instead of {len(slots)} processes"

    def _room(self) -> bool:
        """Wait while the disk is too full to start anything; returns False if a signal ended the run meanwhile."""
        said = False
        while not self.asked and shutil.disk_usage(self.workdir).free < _ROOM:
            if not said:
                say(f"{self.workdir} has too little free space for a start; waiting for more")
                said = True
            self._sleep(_TICK)
        return not self.asked

    def _recovered(self, since: float, why: str) -> None:
        seconds = time.monotonic() - since
        say(f"recovered in {seconds:.1f} s: {why}; all processes train again")
        self._record("recovered", seconds=seconds, why=why, step=self.steps.newest)

    def _fits(self, processes: int) -> bool:
        """Return whether a mesh fits this number of processes; False until a run has recorded its devices."""
        if not (self.workdir / "run.json").exists():
            return False
        if self._fitting is None:
            self._ask_what_fits()
            assert self._asking
            answers, refusals = self._asking.communicate()
            if self._asking.returncode:
                say(refusals.strip() or "it is not known yet on how many processes the run can continue")
                self._asking = None  # ask again next time
                return False
            self._fitting = {int(line.split()[0]) for line in answers.splitlines()}
            if refusals:
                say(refusals.strip())
            self._record("fitting", processes=sorted(self._fitting))
        return processes in self._fitting

    def _ask_what_fits(self) -> None:
        """Start a subprocess (it needs JAX) that finds which sizes fit, before the answer is needed."""
        if self._asking is None:
            command = [sys.executable, "-m", "jaxtrain", "elastic", f"{self.workdir}", "--", *self.rest]
            command[5:5] = [f"--min_processes={self.settings.min_processes}", f"--processes={self.settings.processes}"]
            self._asking = subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, text=True,
                                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                            preexec_fn=child_processes.die_with_parent())

    @contextlib.contextmanager
    def alone(self):
        """Hold a lock against a second supervisor in this workdir; the kernel releases it when this process ends."""
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            lock = open(self._logs / "lock", "w")  # noqa: SIM115 (closed below)
        except OSError as error:
            raise UserError("--workdir", f"{self._logs} cannot be written ({error.strerror})",
                            "give a folder that can be") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError("--workdir", f"another supervisor works in {self.workdir}",
                                "end that one or give another folder") from None
            yield

    # ---------------------------------------------------------------------------------------------------------- waiting
    def _wait(self) -> None:
        """Wait for an event or a tick; a child's end and a signal wake this up through the pipe."""
        with contextlib.suppress(BlockingIOError):
            if select.select([self._wakeups], [], [], _TICK)[0]:
                self._wakeups.recv(4096)

    def _sleep(self, seconds: float) -> bool:
        """Sleep; returns False if a signal cut it short."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.asked:
            self._wait()
        return not self.asked

    @contextlib.contextmanager
    def listening(self):
        """Handle signals: the first is forwarded so that all processes save; a second Ctrl-C ends all at once.

        Closing the terminal (SIGHUP) also saves, unless it is ignored (nohup).
        """
        self._wakeups, theirs = socket.socketpair()
        theirs.setblocking(False)
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._received) for number in numbers}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        pipe = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            if self._asking:
                self._asking.kill()
            signal.set_wakeup_fd(pipe)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _received(self, number: int, frame) -> None:
        if self.asked is None:
            self._signals.append(number if number == signal.SIGINT else signal.SIGTERM)
        elif number == signal.SIGINT:
            self._at_once = True
        self.asked = self.asked or number

    def _record(self, kind: str, **fields) -> None:
        with contextlib.suppress(OSError):  # a full disk is not a reason to stop monitoring
            record(self.workdir, kind, **{"process": "supervisor", **fields})


class _Tail:
    """Copies what is added to a log to stderr."""

    def __init__(self, path: Path):
        self._file = open(path, "rb")  # noqa: SIM115 (lives as long as the attempt)

    def pump(self) -> None:
        while new := self._file.read(2**16):
            sys.stderr.buffer.write(new)
            sys.stderr.flush()


def say(text: str) -> None:
    """Print a message of the supervisor."""
    errors.say(f"supervise: {text}")


def _next_folder(logs: Path) -> Path:
    """Create and return logs/N, one higher than the highest there is."""
    number = max((int(entry.name) for entry in logs.iterdir() if entry.name.isdecimal()), default=0) + 1
    (folder := logs / str(number)).mkdir()
    return folder


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
