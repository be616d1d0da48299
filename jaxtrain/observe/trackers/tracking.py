"""Keeps trackers up to date with metrics.jsonl, each on a thread of its own, so that nothing waits for one.

The file is the truth: a tracker says which line is the last that it has, and gets those behind it, be it at the start,
after a crash or when its server is back. A run that resumes from an earlier step writes some lines again. They have the
numbers that they had, so they are left out where they were sent before; where they do not, as after a rollback that
skips batches, a tracker that cannot forget begins another run of its own, with all lines.
"""

import contextlib
import json
import math
import textwrap
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import json_lines, read_json
from jaxtrain.files.log_tail import LogTail
from jaxtrain.observe import events
from jaxtrain.observe.trackers.tracker import NOTHING, About, Position, Tracker, position

_AT_ONCE = 200  # lines
_KEPT = 1000  # texts, histograms and artifacts for a tracker that is down
_TRIES = 2  # of giving a tracker one of these, and of what is left at the end
_HUNG_S = 120.0  # after which a call counts as hung
_PART = 0.01  # of the time of a processor that a tracker may take, so that steps are not slower for it
_SHORTEST_S, _LONGEST_S = 1.0, 60.0  # between two times that lines are sent
_SYSTEM_S = 10.0  # between two looks at the machine
# Seconds that the end waits for trackers: a job that is told to stop has little time, and one that was rolled back
# sends the rest later.
_PATIENCE_S = {"stopped": 10.0, "rolled_back": 10.0}
_LAST_PATIENCE_S = 60.0
_LOSSES = "loss", "eval_loss"
_SAME = 1e-3  # relative difference of losses that another mesh or precision may make
_FORM = {"generation": int, "sent": (int, bool), "rolled_back": int}


class Tracking:
    """A sink of the metrics writer that has the trackers of a run follow what it writes."""

    def __init__(self, about: About, trackers: Sequence[Tracker]):
        """Set up for a run; nothing happens before `start`."""
        self._followers, names = list[_Follower](), Counter[str]()
        for tracker in trackers:
            of = type(tracker)
            name = of.__module__.rpartition(".")[2] if of.__name__ == "Service" else of.__name__
            names[name] += 1  # two of one class keep their notes apart
            self._followers.append(_Follower(tracker, about, name if names[name] == 1 else f"{name}-{names[name]}"))

    def __bool__(self) -> bool:
        return bool(self._followers)

    def start(self) -> None:
        """Begin to follow metrics.jsonl, which from now on only grows."""
        for follower in self._followers:
            follower.start()

    def write(self, record: JsonMapping) -> None:
        """Say that there is another line."""
        for follower in self._followers:
            follower.wake()

    def add(self, what: str, *arguments: object) -> None:
        """Have all trackers called with a `text`, a `histogram` or an `artifact`."""
        for follower in self._followers:
            follower.extras.append((what, arguments))
            follower.wake()

    def close(self) -> None:
        """Do nothing: how the run ends is known later."""

    def finish(self, status: str) -> None:
        """Give the trackers a while to get what they lack, and end them; says which of them lacks something.

        One that hangs is left alone: should it go on, it gets nothing more, for another attempt may tell it.
        """
        for follower in self._followers:
            follower.end(status)
        end = time.monotonic() + _PATIENCE_S.get(status, _LAST_PATIENCE_S)
        for follower in self._followers:
            follower.join_until(end)


class _Superseded(Exception):
    """Raised when lines that a tracker has are no longer those of the run."""


class _Follower:
    """One tracker and its thread."""

    def __init__(self, tracker: Tracker, about: About, name: str):
        self._tracker, self._about, self._name = tracker, about, name
        self._path = about.workdir / "trackers" / f"{self._name}.json"
        self._generation, self._sent, self._compared = 1, NOTHING, 0
        with contextlib.suppress(OSError, ValueError):
            kept = read_json(self._path, _FORM)
            step, evaluation = kept["sent"]
            self._generation, self._sent, self._compared = kept["generation"], (step, evaluation), kept["rolled_back"]
        self.extras: deque[tuple[str, tuple]] = deque(maxlen=_KEPT)
        self._begun, self._floor = False, -1  # not known yet
        self._tried: Any = None  # the last extra, and how often
        self._tries, self._refused = 0, set[str]()
        self._tail, self._have = LogTail(about.workdir / "metrics.jsonl"), NOTHING
        self._earlier: dict[Position, dict[str, Any]] = {}  # lines that it has and that were taken back since
        self._rolled_back = 0  # how many lines were, in all
        self._evaluations: list[dict[str, Any]] = []
        from jaxtrain.observe import system_metrics  # which takes a while, and few runs have a tracker

        self._system, self._looked = system_metrics.read, -math.inf
        self._busy_since: float | None = None
        self._down = ""  # why, if it is
        self._status = ""  # how the run ended, once it has
        self._left = False  # whether nobody waits for it any more
        self._news, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker-{self._name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._news.set()
        since = self._busy_since
        if since is not None and time.monotonic() - since > _HUNG_S:
            self._tell_down(f"it has not answered for {_HUNG_S:.0f} s")

    def end(self, status: str) -> None:
        self._status = status
        self._ended.set()
        self._news.set()

    def join_until(self, end: float) -> None:
        if self._thread.is_alive():
            self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            self._left, self._down = True, self._down or "it has not answered in time"
        if self._down:
            self._tell("tracker_behind", f"{self._name} has the metrics of this run only up to step {self._have[0]} "
                       f"({self._down}); metrics.jsonl has all of them, and running the same command again sends them")

    # ------------------------------------------------------------------------------------------------- on its thread

    def _work(self) -> None:
        failures = last_tries = 0
        while not self._left:
            self._news.clear()  # before the look at how the run ended, which is news too
            ending, self._busy_since, spent = self._status, time.monotonic(), time.thread_time()
            try:
                if not self._begun:
                    self._begin()
                self._catch_up()
                if self._left:
                    return
                if ending:
                    self._finish(ending)
                    self._up()
                    return
                self._up()
                failures = 0
            except _Superseded:
                self._supersede()
                continue
            except Exception as error:  # of whatever kind: it is somebody else's code
                self._begun = False  # what it has must be asked again
                self._tell_down(textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ..."))
                failures, last_tries = failures + 1, last_tries + bool(ending)
                if last_tries > _TRIES:
                    return
            finally:
                self._busy_since = None
            self._rest(failures, time.thread_time() - spent)

    def _rest(self, failures: int, spent: float) -> None:
        """Wait for news, and until the time that was spent is a small part of what has passed, or the run ends."""
        if failures:
            self._ended.wait(min(_LONGEST_S, 2.0 ** failures))
            return
        self._ended.wait(min(_LONGEST_S, max(_SHORTEST_S, spent / _PART)))
        self._news.wait()

    def _begin(self) -> None:
        workdir = self._about.workdir
        taken_back = list(json_lines(workdir / "metrics.rolled_back.jsonl", {"step": int}))
        self._rolled_back, self._earlier = len(taken_back), {}
        for line in taken_back[self._compared:]:
            self._earlier.setdefault(position(line), line)  # the first one is what was sent
        self._tail, self._evaluations = LogTail(workdir / "metrics.jsonl", {"step": int}), []
        again = min(self._earlier, default=(math.inf, False))
        since = max((place for line in json_lines(workdir / "metrics.jsonl", {"step": int})
                     if (place := position(line)) < again), default=NOTHING)
        about = self._about
        if self._generation > 1:
            about = replace(about, id=f"{about.id}-{self._generation}", name=f"{about.name} ({self._generation})")
        have = self._tracker.begin(about, min(self._sent, since))
        self._have = self._sent if have is None else have
        self._floor = self._have[0] if self._floor < 0 else self._floor
        self._begun = True
        self._keep()

    def _catch_up(self) -> None:
        while self.extras:
            extra = self.extras[0]
            if extra[1][0] > self._floor:  # its step
                self._give(extra)
            if self.extras[0] is extra:  # otherwise it had to make room
                self.extras.popleft()
        for lines in self._new_lines():
            if self._left:
                return
            if time.monotonic() - self._looked >= _SYSTEM_S:
                self._looked = time.monotonic()
                lines[-1] |= {f"system/{name}": value
                              for name, value in self._system(self._about.workdir).items()}
            self._tracker.log(lines)
            self._have = self._sent = position(lines[-1])
            self._compared = self._rolled_back
            self._keep()

    def _give(self, extra: tuple[str, tuple]) -> None:
        """Give the tracker an extra; one that it refuses again and again, and those of its kind, must not block it."""
        what, arguments = extra
        self._tries = self._tries + 1 if extra is self._tried else 1
        self._tried = extra
        if self._tries > _TRIES:
            self._refused.add(what)
            self._tell("tracker_refuses", f"{self._name} gets no more {what} uploads ({self._down})", reason=self._down)
        if what not in self._refused:
            getattr(self._tracker, what)(*arguments)

    def _new_lines(self) -> Iterator[list[JsonObject]]:
        """Yield the lines that the tracker lacks, some at a time."""
        found: list[dict[str, Any]] = []
        for line in self._tail.added():
            place = position(line)
            if "eval_loss" in line:
                self._evaluations.append(line)
            if place > self._have:
                found.append({key: value for key, value in line.items() if value is not None})
            elif place in self._earlier and not _same(line, self._earlier[place]):
                raise _Superseded
            if len(found) == _AT_ONCE:
                yield found
                found = []
        if found:
            yield found

    def _finish(self, status: str) -> None:
        if self._evaluations:
            columns = list(dict.fromkeys(key for line in self._evaluations for key in line))
            self._tracker.table(self._evaluations[-1]["step"], "evaluations", columns,
                                [[line.get(key) for key in columns] for line in self._evaluations])
        self._tracker.finish(status)

    def _supersede(self) -> None:
        with contextlib.suppress(Exception):
            self._tracker.finish("superseded")
        self._generation, self._sent, self._begun, self._floor = self._generation + 1, NOTHING, False, 0
        self._compared = self._rolled_back
        self._keep()
        self._tell("tracker_superseded", f"{self._name} has metrics that a rollback or restart replaced; it "
                   f"begins a new run there, {self._about.name} ({self._generation})")

    def _keep(self) -> None:
        """Note in the workdir what was sent; where that fails, lines may come twice after a crash."""
        if self._left:  # the next attempt notes it
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            atomic_files.write(self._path, json.dumps({
                "generation": self._generation, "sent": self._sent, "rolled_back": self._compared}))

    def _up(self) -> None:
        if self._down:
            self._down = ""
            self._tell("tracker_back", f"{self._name} is reachable again and has all metrics")

    def _tell_down(self, why: str) -> None:
        if not self._down:
            self._tell("tracker_down", f"{self._name} is down ({why}); training continues, and the missing metrics "
                       "are sent later", reason=why)
        self._down = why

    def _tell(self, kind: str, sentence: str, **fields: object) -> None:
        events.tell(self._about.workdir, kind, sentence, tracker=self._name, **fields)


def _same(one: JsonMapping, other: JsonMapping) -> bool:
    """Return whether two lines of one step are of the same training, whatever computed them.

    All numbers count in a line without a loss, which is of results beside the run.
    """
    for key in _LOSSES if one.keys() & set(_LOSSES) else one.keys() | other.keys():
        now, then = one.get(key), other.get(key)
        if now is None or then is None:
            if now is not then:
                return False
        elif abs(now - then) > _SAME * max(abs(now), abs(then)):
            return False
    return True
