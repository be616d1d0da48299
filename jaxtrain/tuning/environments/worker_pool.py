"""Environments in worker processes of their own: what hangs, dies or fills its memory costs a retry, and no run.

A worker is asked for one turn at a time, and keeps the conversations that it has begun. After a worker was lost, its
conversations are played again by another.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxtrain.base.annotations import JsonObject
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import parsed
from jaxtrain.tuning.environments.protocol import KEY, MESSAGE, Asked, Turn, tolerated, turn_of

TRIES = 3  # of a conversation's turn, each in another process
SETUP_S = 100.0  # for a process to start and load its environment: frameworks take long to import
_MODULE = "jaxtrain.tuning.environments.worker"
_ROOT = Path(__file__).parents[3]  # where jaxtrain is


class _Lost(Exception):
    """Raised if a worker gave no answer; says why."""


class _Ended(Exception):
    """Raised on a thread whose turns are no longer wanted."""


@dataclass(eq=False)
class _Worker:
    """A process and the line to it."""

    process: subprocess.Popen
    line: socket.socket
    until: float = 0.0  # when it has to have answered
    asked: "_Question | None" = None  # what it is at work on
    lost: str = ""  # why it could not be asked
    came: bytearray = field(default_factory=bytearray)  # of its answer
    known: set[str] = field(default_factory=set)  # conversations that it keeps

    def send(self, content: JsonObject, seconds: float) -> None:
        """Send a request whose answer may take so long."""
        written = json.dumps(content).encode()
        self.until, self.came = time.monotonic() + seconds, bytearray()
        self.line.settimeout(seconds)
        try:
            self.line.sendall(len(written).to_bytes(8, "big") + written)
        except TimeoutError:
            raise _Lost("hangs") from None
        except OSError:
            raise _Lost(self.words()) from None

    def received(self) -> JsonObject | None:
        """Return the answer, if all of it has come."""
        try:
            part = self.line.recv(2**20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        if not part:
            raise _Lost(self.words())
        self.came += part
        size = int.from_bytes(self.came[:8], "big") if len(self.came) >= 8 else 0
        if size > MESSAGE or len(self.came) > 8 + MESSAGE:
            raise _Lost(f"sends more than {MESSAGE:,} bytes")
        if len(self.came) < 8 or len(self.came) < 8 + size:
            return None
        try:
            return parsed(bytes(self.came[8:]), dict)
        except ValueError:
            raise _Lost("sends invalid JSON") from None

    def words(self) -> str:
        """Return how the process ended."""
        try:
            code = self.process.wait(1)
        except subprocess.TimeoutExpired:
            return "has closed the line to it"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended its process with status {code}"

    def kill(self) -> None:
        """End the process, and those that it started."""
        self.line.close()
        self.send_kill()
        self.process.wait()

    def send_kill(self) -> None:
        """Have the processes end; whoever waits for an answer sees it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


@dataclass(eq=False)
class _Question:
    """A turn that is asked for."""

    place: int  # of its answer among all
    asked: Asked
    tries: int = 0


class WorkerPool:
    """An environment whose conversations take place in several processes."""

    def __init__(self, named: str, options: JsonObject, workers: int, timeout_s: float, memory: int,
                 python: str = "", masks: bool = False):
        """Take what `rl.environment` names.

        Args:
            named: the environment.
            options: the options of one of another package.
            workers: the number of processes.
            timeout_s: how long a turn may take.
            memory: bytes of each process; 0: no limit.
            masks: an environment that fails ends a conversation, and not the run.
            python: the program that runs it, with packages of its own; "": the one that runs here.
        """
        self._python, self.name, self._options, self._timeout_s, self._memory, self._masks = (
            python, named, options, timeout_s, memory, masks)
        self._workers: list[_Worker | None] = [None] * workers
        self._lock = threading.RLock()  # with a sampler elsewhere, turns are asked on its thread
        self._ends = 0  # how often all processes were ended
        self._starting: _Worker | None = None  # the one that was started last
        weakref.finalize(self, _end, self._workers)  # at Python's exit too

    def tasks(self) -> list[JsonObject]:
        """Return the tasks that the environment brings, after a check that it can be loaded."""
        self._workers[0], found = self._started(tasks=True)
        return found

    def turns(self, asked: Sequence[Asked]) -> list[Turn]:
        """Return the next turn of each conversation."""
        ends = self._ends
        with self._lock:
            return self._turns(asked, ends)

    def _turns(self, asked: Sequence[Asked], ends: int) -> list[Turn]:
        found: dict[int, Turn] = {}
        waiting: list[deque[_Question]] = [deque() for _ in self._workers]
        for place, one in enumerate(asked):
            keeper = next((at for at, worker in enumerate(self._workers) if worker and one.id in worker.known), None)
            waiting[place % len(waiting) if keeper is None else keeper].append(_Question(place, one))
        try:
            while len(found) < len(asked):
                self._hand_out(waiting, ends)
                for at, turn in self._heard(waiting):
                    found[at] = turn
        except BaseException:  # those that are at work would give an old answer next
            _end(self._workers)
            raise
        return [found[place] for place in range(len(asked))]

    def release(self, ids: Iterable[str]) -> None:
        """Have workers drop what they keep of conversations that have ended."""
        ids = set(ids)
        with self._lock:
            for worker in filter(None, self._workers):
                if theirs := worker.known & ids:
                    worker.known -= theirs
                    with contextlib.suppress(_Lost):  # which the next question finds
                        worker.send({"release": sorted(theirs)}, self._timeout_s)

    def end(self) -> None:
        """End all processes, and with them turns that another thread waits for; they are started again when needed."""
        self._ends += 1
        for worker in filter(None, (*self._workers, self._starting)):
            if worker.process.returncode is None:  # else its number may be another process's by now
                worker.send_kill()
        with self._lock:
            _end(self._workers)

    def _hand_out(self, waiting: Sequence[deque[_Question]], ends: int) -> None:
        """Give each worker that has nothing to do the next of its questions."""
        for at, questions in enumerate(waiting):
            if self._ends != ends:
                raise _Ended
            worker = self._workers[at]
            if not questions or (worker and worker.asked):
                continue
            if worker is None:
                worker = self._workers[at] = self._started()[0]
            one = worker.asked = questions.popleft()
            again = len(one.asked.answers) * (one.asked.id not in worker.known)  # turns that have to be played again
            worker.known.add(one.asked.id)
            try:
                worker.send(vars(one.asked), self._timeout_s * (1 + again))
            except _Lost as why:
                worker.until, worker.lost = 0.0, f"{why}"

    def _heard(self, waiting: Sequence[deque[_Question]]) -> list[tuple[int, Turn]]:
        """Wait until a worker answers or should have; return the turns that have come."""
        found, busy = [], {at: worker for at, worker in enumerate(self._workers) if worker and worker.asked}
        if not busy:
            return []
        with selectors.DefaultSelector() as selector:
            for at, worker in busy.items():
                selector.register(worker.line, selectors.EVENT_READ, at)
            soonest = min(worker.until for worker in busy.values())
            ready = {key.data for key, _ in selector.select(max(0.0, soonest - time.monotonic()))}
        for at, worker in busy.items():
            try:
                if worker.lost:
                    raise _Lost(worker.lost)
                answer = worker.received() if at in ready else None
                if answer is None and time.monotonic() > worker.until:
                    raise _Lost(f"takes longer than rl.reward_timeout_s={self._timeout_s:g} s")
            except _Lost as why:
                found += self._again(at, waiting[at], f"{why}")
                continue
            if answer is not None:
                one, worker.asked = worker.asked, None
                assert one
                found.append((one.place, self._turn(answer, one.asked)))
        return found

    def _turn(self, answer: JsonObject, asked: Asked) -> Turn:
        try:
            if "error" in answer:
                raise UserError(KEY, f"at {_where(asked)}, {self.name} {answer['error']}", "correct it")
            return turn_of(answer, asked, self.name)
        except UserError as error:
            return tolerated(error, asked, self._masks)

    def _again(self, at: int, questions: deque[_Question], why: str) -> list[tuple[int, Turn]]:
        """Replace a worker that was lost; its question is asked again, unless it was often enough."""
        worker = self._workers[at]
        assert worker and worker.asked
        one, self._workers[at] = worker.asked, None
        worker.kill()
        one.tries += 1
        if one.tries == TRIES:
            error = UserError(KEY, f"{self.name} {why} at {_where(one.asked)}, in {TRIES} tries", "correct it, allow "
                              "more with rl.reward_timeout_s or rl.environment_memory_gib, or leave out that task")
            return [(one.place, tolerated(error, one.asked, self._masks))]
        questions.appendleft(one)
        return []

    def _started(self, tasks: bool = False) -> tuple[_Worker, list[JsonObject]]:
        """Return a worker that has loaded the environment, and the tasks that this brings, if they are wanted."""
        ours, theirs = socket.socketpair()
        paths = [f"{_ROOT}"] if self._python else list(filter(None, sys.path))
        try:
            with theirs:
                process = subprocess.Popen(
                    [self._python or sys.executable, "-m", _MODULE], stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for this process, and all that a worker started ends with it
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUTF8": "1",
                         "JAX_PLATFORMS": "cpu"})  # accelerators are the run's
        except OSError as error:
            ours.close()
            raise UserError("rl.environment_python", f"{self._python or sys.executable} cannot be started ({error})",
                            "give the path of a Python") from error
        worker = self._starting = _Worker(process, ours)
        try:
            worker.send({"name": self.name, "options": self._options, "limit": self._memory, "tasks": tasks}, SETUP_S)
            while (answer := worker.received() if _readable(worker) else None) is None:
                if time.monotonic() > worker.until:
                    raise _Lost(f"takes longer than {SETUP_S:g} s to load")
            if "error" in answer:
                raise UserError(KEY, answer.get("refused") or f"{self.name} cannot be loaded ({answer['error']})",
                                answer.get("fix") or "correct it")
        except _Lost as why:
            worker.kill()
            raise UserError(KEY, f"{self.name} {why} as it is loaded", "correct it, or raise "
                            "rl.environment_memory_gib") from None
        except BaseException:
            worker.kill()
            raise
        return worker, answer.get("tasks", [])


def _where(asked: Asked) -> str:
    return f"the answer {asked.answers[-1][:40]!r}" if asked.answers else "a conversation's beginning"


def _end(workers: list[_Worker | None]) -> None:
    for at, worker in enumerate(workers):
        workers[at] = None
        if worker:
            worker.kill()


def _readable(worker: _Worker) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(worker.line, selectors.EVENT_READ)
        return bool(selector.select(max(0.0, worker.until - time.monotonic())))
