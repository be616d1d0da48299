"""Straggler detection: find which process slows down all the others, and why.

Collectives make all step times equal, so each process measures what is its own: how long its loop waited for data and
was busy on the host, and now and then how fast each of its devices does the same small computation alone. The
measurements go through the coordination service; process 0 compares them on a thread.
"""

import queue
import socket
import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxtrain.base.annotations import AnyArray
from jaxtrain.distributed.coordination import Board
from jaxtrain.errors import say
from jaxtrain.observe import events

FACTOR = 1.25  # a process is slow if it takes this many times as long as its peers
RUNNING = 3  # consecutive windows in which a process must be slow, or recovered, before it is reported
_MOST = 1000.0  # larger ratios are cut off here


@dataclass(frozen=True)
class Window:
    """The measurements of one process over one time window."""

    number: int  # number of the window, the same in all processes
    host: str
    step_s: float  # mean seconds from step to step
    data_wait_s: float  # mean seconds of a step spent waiting for a batch
    busy_s: float  # mean seconds of a step spent dispatching it to the devices
    probe_s: Mapping[str, float] = field(default_factory=dict)  # device -> seconds of the probe computation
    kind: str = ""  # device kind; only devices of the same kind are compared


@dataclass(frozen=True)
class Slow:
    """A slow process: how many times as slow as the median of its peers, and why."""

    ratio: float
    why: str


def compare(windows: Mapping[int, Window]) -> dict[int, Slow]:
    """Compare each process with the median of the others; a process without peers is left out.

    For data waiting and host time, the ratio is the step time to what it would be with only as much of it as the others
    have. For devices, it is the slowest device's seconds to the others' median.
    """
    found = {}
    for process, own in windows.items():
        others = [window for other, window in windows.items() if other != process]
        causes = []
        for key, why in (("data_wait_s", "it waits for data"), ("busy_s", "its host is busy")):
            if others:
                lost = getattr(own, key) - statistics.median(getattr(window, key) for window in others)
                causes.append(Slow(_ratio(own.step_s, own.step_s - lost), why))
        for device, seconds in own.probe_s.items():
            elsewhere = [s for window in others if window.kind == own.kind for s in window.probe_s.values()]
            beside = [s for other, s in own.probe_s.items() if other != device]
            if peers := elsewhere or beside:
                causes.append(Slow(_ratio(seconds, statistics.median(peers)), f"its device {device} computes slowly"))
        if causes:
            found[process] = max([Slow(1.0, ""), *causes], key=lambda slow: slow.ratio)
    return found


class Judge:
    """Decides who is slow, or has recovered, only after several consecutive windows."""

    def __init__(self):
        """Begin without any process being slow."""
        self._named: set[int] = set()
        self._running: dict[int, int] = {}  # process -> consecutive windows that contradict its current status

    def changes(self, slowness: Mapping[int, Slow]) -> list[tuple[int, bool, Slow]]:
        """Return (process, whether it is slow now, how) for those whose status changes with this window."""
        settled = []
        for process, slow in slowness.items():
            is_slow, was_slow = slow.ratio >= FACTOR, process in self._named
            self._running[process] = self._running.get(process, 0) + 1 if is_slow != was_slow else 0
            if self._running[process] == RUNNING:
                self._running[process] = 0
                self._named ^= {process}
                settled.append((process, is_slow, slow))
        return settled


class Stragglers:
    """Measures this process, and in process 0 compares and reports all of them; use it as a context manager."""

    def __init__(self, workdir: str | Path, every: float):
        """Report slow processes, in windows of `every` seconds; does nothing if 0 or without peers."""
        alone = jax.process_count() == 1 and (jax.local_device_count() == 1 or jax.default_backend() == "cpu")
        self._every = 0.0 if alone else every
        self._compared: dict[str, float] = {}
        self._probed: dict[str, float] = {}
        if not self._every:
            return
        self._workdir, self._judge, self._board = workdir, Judge(), Board("stragglers")
        self._probe = _Probe()
        # On CPU a call may last until the step is done, and so includes waiting for slow processes.
        self._blocking = jax.default_backend() == "cpu"
        self._window, self._began = self._number(), 0.0  # the first window is incomplete and not counted
        self._steps, self._waited, self._busy = 0, 0.0, 0.0
        self._queue: queue.SimpleQueue[Window | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="stragglers", daemon=True)
        self._thread.start()

    def step(self, metrics: Mapping[str, AnyArray], waited: float, busy: float) -> None:
        """Record a step, given its scalars and the seconds that this process waited for data and was busy.

        At the end of a window it waits for the step, so that the devices are probed while idle. Windows end by the wall
        clock, at about the same step in all processes, so that they do not wait for each other one by one.
        """
        if not self._every:
            return
        busy = 0.0 if self._blocking else busy
        self._steps, self._waited, self._busy = self._steps + 1, self._waited + waited, self._busy + busy
        if (number := self._number()) == self._window:
            return
        now = time.perf_counter()
        if self._began:
            jax.block_until_ready(metrics)
            many, kind, probed = self._steps, jax.local_devices()[0].device_kind, self._probe.seconds()
            self._probed = {"probe_s": max(probed.values())}
            self._queue.put(Window(number, socket.gethostname(), (now - self._began) / many, self._waited / many,
                                   self._busy / many, probed, kind))
        self._window, self._began = number, now
        self._steps, self._waited, self._busy = 0, 0.0, 0.0

    @property
    def fields(self) -> dict[str, float]:
        """The newest comparison, and the probe of this process's slowest device, for a line of metrics."""
        return {**self._compared, **self._probed}

    def close(self) -> None:
        """End the thread, or abandon it if the coordinator does not answer."""
        if self._every:
            self._closing.set()
            self._queue.put(None)
            self._thread.join(timeout=5)

    def __enter__(self) -> "Stragglers":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def _number(self) -> int:
        return int(time.time() // self._every)

    def _work(self) -> None:
        while own := self._queue.get():
            try:
                self._board.publish(asdict(own))
                if jax.process_index() == 0 and not self._closing.wait(self._every / 10):  # let the others publish
                    notes = {process: Window(**note) for process, note in self._board.read().items()}
                    self._tell({process: window for process, window in notes.items()
                                if abs(window.number - own.number) <= 1})  # a silent process is not slow but gone
            except Exception as error:
                if not self._closing.is_set():
                    say(f"stragglers: no comparison in this window ({type(error).__name__})")

    def _tell(self, windows: Mapping[int, Window]) -> None:
        if not (slowness := compare(windows)):
            self._compared = {}
            return
        slowest = max(slowness, key=lambda process: slowness[process].ratio)
        self._compared = {"slowest_process": slowest, "slowest_ratio": slowness[slowest].ratio,
                          "data_wait_max_s": max(window.data_wait_s for window in windows.values())}
        for process, is_slow, slow in self._judge.changes(slowness):
            host = windows[process].host
            events.record(self._workdir, "straggler" if is_slow else "straggler_recovered", slow_process=process,
                          slow_host=host, ratio=slow.ratio, why=slow.why)
            said = f"is {slow.ratio:.2f} times as slow as its peers: {slow.why}" if is_slow else "keeps up again"
            say(f"process {process} on {host} {said}")


class _Probe:
    """The same small computation on each local device, compiled now and timed later."""

    def __init__(self):
        size, self._times = (128, 3) if jax.default_backend() == "cpu" else (4096, 3)
        unit = jnp.eye(size, dtype=jnp.bfloat16 if size > 128 else jnp.float32)
        self._work = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, y: y @ x, x))
        self._inputs = [(str(device.id), jax.device_put(unit, device)) for device in jax.local_devices()]
        self.seconds()

    def seconds(self) -> dict[str, float]:
        """Return device -> the best of a few times, one device after the other."""
        return {device: min(self._once(x) for _ in range(self._times)) for device, x in self._inputs}

    def _once(self, x: jax.Array) -> float:
        start = time.perf_counter()
        jax.block_until_ready(self._work(x))
        return time.perf_counter() - start


def _ratio(ours: float, theirs: float) -> float:
    return min(ours / theirs, _MOST) if theirs > 0 else _MOST if ours > 0 else 1.0
