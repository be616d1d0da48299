"""No run hangs in silence: without progress every process writes down where it stands, and ends to be started again.

Progress is a completed step, or another phase of the loop. A thread looks once a second. It cannot look while native
code keeps Python's lock; for that there is `faulthandler`'s timer in C, which this thread keeps putting off.
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
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config.schema import ResilienceConfig
from jaxtrain.distributed import exit_codes
from jaxtrain.distributed import processes as distributed
from jaxtrain.observe import events

TICK = 1.0  # seconds between two looks
PATIENCE = 20.0  # seconds for what a process writes down about itself
GRACE = 60.0  # what the timer in C waits beyond the limit: it is for a thread that cannot look
STDERR = 2  # the descriptor itself: sys.stderr may be anything, and C knows descriptors only


class Watchdog:
    """Watches one process of a run within this context; `limit()` says how long it may stand still.

    Signal USR1 writes the Python stacks of all threads to stderr and changes nothing else.
    """

    def __init__(self, workdir: str | Path, config: ResilienceConfig, leave: Callable[[int], Any] = os._exit):
        """`leave` ends the process; `finally` blocks are not run, since they may wait for what hangs."""
        self._workdir, self._config, self._leave = Path(workdir), config, leave
        self._process, self._processes = distributed.process(), distributed.processes()
        self._phase = "start"
        self._begun = self._step = 0  # newest step handed to the devices; newest one they completed
        self._times: deque[float] = deque(maxlen=64)  # when the last steps were complete
        self._quiet = 0.0  # seconds without progress
        self._error: BaseException | None = None
        self._closed, self._giving_up = threading.Event(), threading.Lock()

    # ---------------------------------------------------------------------------------------- what the loop tells it
    def begin(self, step: int) -> None:
        """Step `step` (counted from 1) has its batch and goes to the devices."""
        self._begun = step

    def completed(self, step: int) -> None:
        """The devices are done with it; by any thread."""
        self._step = step
        self._times.append(time.perf_counter())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within it the loop does something else than steps, which may take `resilience.start_limit` seconds."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def start(self) -> None:
        """The run begins, or begins again from a checkpoint."""
        self._phase, self._error = "start", None

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Within it steps are made. Behind an error, what is still open has `resilience.hang_floor` to close."""
        self._phase = "train"
        try:
            yield
            self._phase = "end"
        except BaseException as error:
            self._phase, self._error = "failure", error
            raise

    # -------------------------------------------------------------------------------------------------- its own life
    def __enter__(self) -> "Watchdog":
        self._was_enabled = faulthandler.is_enabled()
        if not self._was_enabled:
            faulthandler.enable(STDERR)  # a crash in native code tells its Python stacks, too
        faulthandler.register(signal.SIGUSR1, STDERR, all_threads=True)
        distributed.record_in(self._workdir)
        if self._config.hang_factor:
            distributed.on_hang(self.give_up)
            self._arm()  # before anything can keep the lock from the thread that looks
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        # Apart from the thread that looks, because a file system may hang, too.
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heart.start()
        return self

    def __exit__(self, *error) -> None:
        self._closed.set()
        with self._giving_up:  # else the one who gives up has the last word
            faulthandler.cancel_dump_traceback_later()
        distributed.on_hang(None)
        faulthandler.unregister(signal.SIGUSR1)
        if not self._was_enabled:
            faulthandler.disable()
        self._heart.join(timeout=PATIENCE)

    def limit(self) -> float:
        """Seconds that may pass without progress."""
        config = self._config
        if self._phase == "failure":
            return config.hang_floor
        times = list(self._times)
        if self._phase != "train" or len(times) < 4:  # a process' first steps wait for connections and caches
            return config.start_limit
        step = statistics.median(after - before for before, after in pairwise(times))
        return max(config.hang_factor * step, config.hang_floor)

    def _watch(self) -> None:
        seen, before, armed = None, time.monotonic(), -GRACE
        while not self._closed.wait(TICK):
            now, progress = time.monotonic(), (self._phase, self._step)
            # Time in which this thread did not run either, as in a process that was stopped, is nobody's hang.
            self._quiet = self._quiet + min(now - before, 2 * TICK) if progress == seen else 0.0
            seen, before = progress, now
            limit = self.limit()
            if self._quiet > limit:
                self.give_up(f"no progress for {self._quiet:.0f} seconds, {limit:.0f} is the limit")
            if now - armed > GRACE / 4:
                self._arm()
                armed = now

    def _arm(self) -> None:
        """Put off the timer in C, which ends the process when nothing does this any more."""
        with self._giving_up:
            if not self._closed.is_set():
                faulthandler.dump_traceback_later(self.limit() + GRACE, exit=True, file=STDERR)

    # ------------------------------------------------------------------------------------------------------ the end
    def give_up(self, why: str) -> bool:
        """Tell the other processes, who do the same; write down everything; end with exit status 76.

        Returns whether this process is ending so already; if not, its run is over and there is nothing to write down.
        """
        if self._closed.is_set() or not self._giving_up.acquire(blocking=False):
            return not self._closed.is_set()
        stuck = sys._current_frames().get(threading.main_thread().ident or 0)
        where = "".join(traceback.format_stack(stuck)) if stuck else ""
        cause = "".join(traceback.format_exception(self._error)) if self._error else ""
        self._say(f"process {self._process} ({socket.gethostname()}) hangs in phase {self._phase!r}: {why}\n{where}"
                  f"{cause}")
        distributed.hang(why)
        # Everything beyond touches files, which may be what hangs.
        writing = threading.Thread(target=self._write_down, args=(why, where, cause), daemon=True)
        writing.start()
        writing.join(timeout=PATIENCE)
        distributed.see_off(PATIENCE)
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
        pause = max(TICK, self._processes / 100)  # a thousand processes do not keep a file system busy
        while not self._closed.wait(pause):
            self._beat_once()
        self._phase = "ended"
        self._beat_once()

    def _beat_once(self) -> None:
        """WORKDIR/heartbeats/process-I, once there is a workdir. One write of one size: no reader sees half of it."""
        beat = {"step": self._step, "begun": self._begun, "phase": self._phase, "quiet_s": round(self._quiet),
                "time": round(time.time(), 1), "pid": os.getpid(), "host": socket.gethostname()}
        with contextlib.suppress(OSError):  # a full disk is found by those who have something to lose
            (self._workdir / "heartbeats").mkdir(exist_ok=True)
            file = os.open(self._workdir / "heartbeats" / f"process-{self._process}", os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(file, json.dumps(beat).ljust(255).encode()[:255] + b"\n", 0)
            finally:
                os.close(file)


def heartbeats(workdir: str | Path) -> dict[int, dict[str, Any]]:
    """What each process last wrote of itself."""
    found = {}
    for path in (Path(workdir) / "heartbeats").glob("process-*"):
        with contextlib.suppress(OSError, ValueError):
            found[int(path.name.removeprefix("process-"))] = json.loads(path.read_text())
    return dict(sorted(found.items()))


def laggards(beats: dict[int, dict[str, Any]], processes: int) -> str:
    """Who did not arrive where the others wait: a sentence."""
    beats = {i: beat for i, beat in beats.items() if i < processes}
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


def _names(processes: list[int], beats: dict[int, dict[str, Any]]) -> str:
    return ", ".join(f"process {i} ({beats.get(i, {}).get('host', 'host unknown')})" for i in processes[:8]) + (
        f" and {len(processes) - 8} more" if len(processes) > 8 else "")


def _memory() -> str:
    """Of the host now and at most, and of the devices; these may not answer."""
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
