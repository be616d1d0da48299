"""Trace some steps of a run while it trains, when somebody asks for it, by a file in the workdir or by SIGUSR2.

The loop's thread only begins and ends the trace; a thread of its own looks for requests and writes what goes with it.
The first process decides with which step tracing begins, so that all processes trace the same ones.
"""

import contextlib
import gzip
import math
import queue
import signal
import socket
import threading
import time
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from jaxtrain.errors import UserError, say
from jaxtrain.files import atomic_files
from jaxtrain.observe import events, profile_requests
from jaxtrain.observe.profile_requests import Request
from jaxtrain.run import Run, compiled_step
from jaxtrain.trainer.observers import Observer

TICK = 1.0  # seconds between two looks for a request
LEAD = 5.0  # seconds from a request to its first step, in which other processes learn of it, however they speed up
FOLDER = "profiles"


class Capture(Observer):
    """Traces steps of a run on request. It never ends the run: what goes wrong with a profile is a warning."""

    def __init__(self, run: Run, workdir: Path):
        self._run, self._workdir = run, workdir
        self._process, self._alone = jax.process_index(), jax.process_count() == 1
        self._wanted: Request | None = None  # set by the thread, taken by the loop
        self._tracing: Request | None = None
        self._known = ""  # the id of the newest request that was seen
        self._begun = self._left = 0  # newest step that was begun; steps still to trace
        self._last: Any = ()  # the metrics of the newest step
        self._signalled = False
        self._traced: queue.SimpleQueue[tuple[Request, dict[str, Any], Any]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._before: Any = None

    # ------------------------------------------------------------------------------------------------ the loop's thread
    def on_batch(self, step: int, batch: dict[str, jax.Array]) -> None:
        """Begin a trace where this is its first step."""
        self._begun = step
        if self._tracing is not None:
            if self._program is not compiled_step(self._run, batch):  # whose operations have other names
                self._end()
        elif (request := self._wanted) is not None and step >= request["first"]:
            self._wanted = None
            if step == request["first"] or self._alone:
                self._begin({**request, "first": step}, batch)
            else:
                self._warn(request, f"it was to begin with step {request['first']}, and step {step} comes next")

    def on_dispatch(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """End a trace after its last step."""
        self._last = metrics
        if self._tracing is not None:
            self._left -= 1
            if not self._left:
                self._end()

    def _begin(self, request: Request, batch: dict[str, jax.Array]) -> None:
        self._program = compiled_step(self._run, batch)
        try:
            jax.block_until_ready(self._last)
            folder = self._folder(request)
            folder.mkdir(parents=True, exist_ok=True)
            from jaxtrain.profiling import trace

            trace.begin(folder)
        except Exception as error:
            self._warn(request, _reason(error))
            return
        # At most to the last step: what follows it would count as part of the steps.
        self._steps = self._left = min(request["steps"], self._run.config.train.steps - request["first"] + 1)
        self._tracing, self._since = request, time.perf_counter()

    def _end(self) -> None:
        """End the trace; its steps are complete then."""
        request, self._tracing = self._tracing, None
        assert request is not None
        try:
            jax.block_until_ready(self._last)
            seconds = time.perf_counter() - self._since
            jax.profiler.stop_trace()
        except Exception as error:
            with contextlib.suppress(Exception):  # otherwise JAX takes the trace for one that still goes on
                jax._src.profiler._profile_state.reset()
            self._warn(request, _reason(error))
            return
        steps = self._steps - self._left
        self._traced.put((request, {"steps": steps, "wall_ms": 1e3 * seconds / max(1, steps)}, self._program))

    # ------------------------------------------------------------------------------------------------- the other thread
    def __enter__(self) -> "Capture":
        if self._process == 0:
            profile_requests.withdraw(self._workdir)  # one that an earlier start of the run did not answer
        if threading.current_thread() is threading.main_thread() and signal.getsignal(
                signal.SIGUSR2) == signal.SIG_DFL:
            self._before = signal.signal(signal.SIGUSR2, self._signal)
        self._thread = threading.Thread(target=self._work, name="profiles", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        if self._tracing is not None:
            self._end()
        if self._before is not None:
            signal.signal(signal.SIGUSR2, self._before)
        self._closed.set()
        self._thread.join()
        if self._process == 0 and self._wanted is not None:
            self._warn(self._wanted, "the run ended before")
            profile_requests.withdraw(self._workdir, self._wanted["id"])

    def _signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def _work(self) -> None:
        seen, since = 0, time.monotonic()
        paces: deque[float] = deque(maxlen=5)  # of whole steps
        while not self._closed.wait(TICK):
            if seen:  # otherwise the first ones are those that were made before this start
                paces.append(max(0, self._begun - seen - 1) / (time.monotonic() - since))
            seen, since = self._begun, time.monotonic()
            try:
                if self._alone or len(paces) > 1:  # the first steps are slower than those that follow
                    self._look(max(paces, default=0.0))
                self._write()
            except Exception as error:
                say(f"profile: {_reason(error)}")
        self._write()

    def _look(self, pace: float) -> None:
        """Look for a request, and decide when it begins. `pace`: steps a second at most."""
        if self._signalled:
            self._signalled = False
            with contextlib.suppress(UserError):  # one is under way
                profile_requests.request_profile(self._workdir)
        request = profile_requests.pending(self._workdir)
        if request is None or request["id"] == self._known:
            return
        if "first" not in request:
            if self._process != 0:
                return
            request["first"] = self._begun + (0 if self._alone else 1 + max(3, math.ceil(LEAD * pace)))
            if not self._alone:
                profile_requests.agree(self._workdir, request, request["first"])
        self._known = request["id"]
        if self._process < request["processes"]:
            self._wanted = request

    def _write(self) -> None:
        """Write what goes with a trace that has ended: the program, and last of all what it is of."""
        while not self._traced.empty():
            request, took, program = self._traced.get()
            mine = self._folder(request)
            try:
                if self._process == 0:
                    with atomic_files.written(mine.parent / "step.hlo.txt.gz") as file:
                        file.write(gzip.compress((program.as_text() or "").encode(), 1))
                atomic_files.write_json(mine / "traced.json", {**took, "host": socket.gethostname()})
                if self._process == 0:
                    device = jax.local_devices()[0]
                    atomic_files.write_json(mine.parent / "profile.json", {
                        "id": request["id"], "first": request["first"], **took, "mesh": dict(self._run.mesh.shape),
                        "processes": min(request["processes"], jax.process_count()), "platform": device.platform,
                        "device_kind": device.device_kind})
                    events.record(self._workdir, "profile", step=request["first"], steps=took["steps"])
            except Exception as error:
                self._warn(request, _reason(error))
            if self._process == 0:
                profile_requests.withdraw(self._workdir, request["id"])

    def _folder(self, request: Request) -> Path:
        return self._workdir / FOLDER / str(request["first"]) / f"process-{self._process}"

    def _warn(self, request: Request, why: str) -> None:
        events.tell(self._workdir, "profile_failed", f"warning: the profile is not written: {why}", why=why,
                    request=request["id"])
        if self._process == 0:
            profile_requests.withdraw(self._workdir, request["id"])


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
