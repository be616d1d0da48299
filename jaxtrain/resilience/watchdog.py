"""The watchdog: without progress every process writes a hang report and exits, to be restarted.

Progress is a completed step, or another phase of the loop. A thread checks once a second. It cannot run while native
code holds Python's lock (GIL); for that case there is `faulthandler`'s timer in C, which this thread keeps postponing.
"""

import contextlib
import faulthandler
import json
import os
import resource
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import jax

from jaxtrain.base.annotations import JsonObject
from jaxtrain.config.schema import ResilienceConfig
from jaxtrain.distributed import exit_codes
from jaxtrain.distributed import processes as distributed
from jaxtrain.distributed.run_processes import heartbeats
from jaxtrain.observe import events

TICK = 1.0  # seconds between two checks
PATIENCE = 20.0  # seconds for a process to write its hang report
GRACE = 60.0  # the extra seconds of the timer in C, which is for a thread that cannot run
STDERR = 2  # the file descriptor: sys.stderr may be replaced, and C code knows only descriptors


class Watchdog:
    """Watches one process of a run within this context; `limit()` is how long it may make no progress.

    Signal USR1 writes the Python stacks of all threads to stderr and changes nothing else.
    """

    def __init__(self, workdir: str | Path, config: ResilienceConfig, leave: Callable[[int], object] = os._exit):
        """`leave` ends the process; `finally` blocks are not run, since they may wait for what hangs."""
        self._workdir, self._config, self._leave = Path(workdir), config, leave
        self._process, self._processes = distributed.process(), distributed.processes()
        self._phase = "start"
        self._begun = self._step = 0  # newest step handed to the devices; newest one they completed
        self._times: deque[float] = deque(maxlen=64)  # when the last steps completed
        self._quiet = 0.0  # seconds without progress
        self._error: BaseException | None = None
        self._closed, self._giving_up = threading.Event(), threading.Lock()

    # ----------------------------------------------------------------------------------------------- called by the loop
    def begin(self, step: int) -> None:
        """Note that step `step` (counted from 1) has its batch and is dispatched to the devices."""
        self._begun = step

    def completed(self, step: int) -> None:
        """Note that the devices completed a step; callable on any thread."""
        self._step = step
        self._times.append(time.perf_counter())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context in which the loop does something other than steps, for up to `resilience.start_limit` seconds."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def start(self) -> None:
        """Note that the run starts, or resumes from a checkpoint."""
        self._phase, self._error = "start", None

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """A context in which steps are made; after an error, cleanup may take `resilience.hang_floor` seconds."""
        self._phase = "train"
        try:
            yield
            self._phase = "end"
        except BaseException as error:
            self._phase, self._error = "failure", error
            raise

    # ----------------------------------------------------------------------------------------------- background threads
    def __enter__(self) -> "Watchdog":
        self._was_enabled = faulthandler.is_enabled()
        if not self._was_enabled:
            faulthandler.enable(STDERR)  # so that a crash in native code prints its Python stacks
        faulthandler.register(signal.SIGUSR1, STDERR, all_threads=True)
        distributed.record_in(self._workdir)
        if self._config.hang_factor:
            distributed.on_hang(self.give_up)
            self._arm()  # before anything can keep the watching thread from running
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        # Separate from the watching thread, because a file system may hang too.
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heart.start()
        return self

    def __exit__(self, *error) -> None:
        self._closed.set()
        with self._giving_up:  # otherwise a hang report in progress finishes first
            faulthandler.cancel_dump_traceback_later()
        distributed.on_hang(None)
        faulthandler.unregister(signal.SIGUSR1)
        if not self._was_enabled:
            faulthandler.disable()
        self._heart.join(timeout=PATIENCE)

    def limit(self) -> float:
        """Return the seconds that may pass without progress."""
        return hang_limit(self._config, self._phase, [after - before for before, after in pairwise(list(self._times))])

    def _watch(self) -> None:
        seen, before, armed = None, time.monotonic(), -GRACE
        while not self._closed.wait(TICK):
            now, progress = time.monotonic(), (self._phase, self._step)
            # Time in which this thread did not run either, as in a stopped process, is not a hang.
            self._quiet = self._quiet + min(now - before, 2 * TICK) if progress == seen else 0.0
            seen, before = progress, now
            limit = self.limit()
            if self._quiet > limit:
                self.give_up(f"no progress for {self._quiet:.0f} seconds, {limit:.0f} is the limit")
            if now - armed > GRACE / 4:
                self._arm()
                armed = now

    def _arm(self) -> None:
        """Postpone the timer in C, which ends the process when nothing does this any more."""
        with self._giving_up:
            if not self._closed.is_set():
                faulthandler.dump_traceback_later(self.limit() + GRACE, exit=True, file=STDERR)

    # -------------------------------------------------------------------------------------------------- the hang report
    def give_up(self, why: str) -> bool:
        """Tell the other processes, which do the same; write the hang report; end with exit status 76.

        Returns whether this process is already ending so; if not, its run is over and there is nothing to report.
        """
        if self._closed.is_set() or not self._giving_up.acquire(blocking=False):
            return not self._closed.is_set()
        stuck = sys._current_frames().get(threading.main_thread().ident or 0)
        where = "".join(traceback.format_stack(stuck)) if stuck else ""
        cause = "".join(traceback.format_exception(self._error)) if self._error else ""
        self._say(f"process {self._process} ({socket.gethostname()}) hangs in phase {self._phase!r}: {why}\n{where}"
                  f"{cause}")
        distributed.hang(why)
        # Everything below touches files, which may be what hangs.
        writing = threading.Thread(target=self._write_down, args=(why, where, cause), daemon=True)
        writing.start()
        writing.join(timeout=PATIENCE)
        distributed.wait_for_others(PATIENCE)
        self._leave(exit_codes.RESTART)
        return True

    def _write_down(self, why: str, where: str, cause: str) -> None:
        self._beat_once()
        time.sleep(min(2 * TICK, self._config.hang_floor))  # for the heartbeats of the others
        others = heartbeats(self._workdir)
        behind = laggards(others, self._processes)
        folder = self._workdir / "hangs"
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-process-{self._process}.txt"
        about = [f"process {self._process} of {self._processes} on {socket.gethostname()}, pid {os.getpid()}: {why}",
                 f"phase {self._phase!r}; newest step begun {self._begun}, completed {self._step}", behind,
                 f"memory: {_memory()}", "", "heartbeats:", *(f"  {i}: {beat}" for i, beat in others.items()), "",
                 "last events:", *(f"  {json.dumps(event)}" for event in events.events(self._workdir)[-20:]), "",
                 "main thread:", where, cause, "all threads:"]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(path, "w") as file:
                file.write("\n".join(about) + "\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            events.record(self._workdir, "hang", phase=self._phase, begun=self._begun, step=self._step,
                          seconds=round(self._quiet), why=why, behind=behind, stacks=str(path))
        except OSError as error:
            self._say(f"{path} cannot be written ({error.strerror})\n")
        self._say(f"{behind}\nstacks of all threads: {path}\n")

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(STDERR, text.encode())

    # ------------------------------------------------------------------------------------------------- the heartbeat
    def _beat(self) -> None:
        pause = max(TICK, self._processes / 100)  # a thousand processes must not overload the file system
        while not self._closed.wait(pause):
            self._beat_once()
        self._phase = "ended"
        self._beat_once()

    def _beat_once(self) -> None:
        """Write WORKDIR/heartbeats/process-I, once there is a workdir.

        A single write of constant size, so that no reader sees half of it.
        """
        beat = {"step": self._step, "begun": self._begun, "phase": self._phase, "quiet_s": round(self._quiet),
                "time": round(time.time(), 1), "pid": os.getpid(), "host": socket.gethostname()}
        with contextlib.suppress(OSError):  # a full disk is reported where data would be lost
            (self._workdir / "heartbeats").mkdir(exist_ok=True)
            file = os.open(self._workdir / "heartbeats" / f"process-{self._process}",
                           os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)
            try:
                os.pwrite(file, json.dumps(beat).ljust(255).encode()[:255] + b"\n", 0)
            finally:
                os.close(file)


def hang_limit(config: ResilienceConfig, phase: str, steps: Sequence[float]) -> float:
    """Return the seconds that may pass without progress in this phase, after the last steps took so long."""
    if phase == "failure":
        return config.hang_floor
    if phase != "train" or len(steps) < 3:  # the first steps of a process wait for connections and caches
        return config.start_limit
    return max(config.hang_factor * statistics.median(steps), config.hang_floor)


def laggards(beats: dict[int, JsonObject], processes: int) -> str:
    """Return a sentence that names the processes which did not arrive where the others wait."""
    beats = {i: beat for i, beat in beats.items() if i < processes and {"time", "begun", "phase"} <= beat.keys()}
    if processes == 1 or len(beats) < 2:
        return "there is no other process to compare with"
    newest = max(beat["time"] for beat in beats.values())
    silent = [i for i, beat in beats.items() if newest - beat["time"] > 15 * TICK + processes / 20]
    silent += [i for i in range(processes) if i not in beats]
    if silent:
        return f"{_names(silent, beats)} stopped writing heartbeats"
    most = max(beat["begun"] for beat in beats.values())
    if behind := [i for i, beat in beats.items() if beat["begun"] < most]:
        first = min(beats[i]["begun"] for i in behind) + 1
        return f"{_names(behind, beats)} did not begin step {first}, where the others wait"
    phases = {i: beat["phase"] for i, beat in beats.items()}
    common = statistics.mode(phases.values())
    if odd := [i for i, phase in phases.items() if phase != common]:
        return f"{_names(odd, beats)} is in phase {phases[odd[0]]!r}, the others in {common!r}"
    return f"all processes began step {most}: look at the devices and the network between them"


def _names(processes: list[int], beats: dict[int, JsonObject]) -> str:
    return ", ".join(f"process {i} ({beats.get(i, {}).get('host', 'host unknown')})" for i in processes[:8]) + (
        f" and {len(processes) - 8} more" if len(processes) > 8 else "")


def _memory() -> str:
    """Return the memory in use on the host and its devices, as text; the devices may not answer."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = [f"host peak {peak * (1 if sys.platform == 'darwin' else 1024) / 2**30:.2f} GiB"]

    def ask() -> None:
        for device in jax.local_devices():
            if stats := device.memory_stats():
                told.append(f"{device}: {stats.get('bytes_in_use', 0) / 2**30:.2f} GiB in use, peak "
                            f"{stats.get('peak_bytes_in_use', 0) / 2**30:.2f}")

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout=2 * TICK)
    return "; ".join(told)
