"""Ctrl-C and SIGTERM as a request that the loop answers between two steps."""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator

import jax

from jaxtrain.resilience import exits

_calls = itertools.count(1)  # all processes make the same
_complete = threading.Event()


def complete() -> None:
    """The last step is saved: from here on SIGTERM has nothing to stop, and does not make the run look unfinished."""
    _complete.set()


@contextlib.contextmanager
def before_the_loop() -> Iterator[None]:
    """Within this context, and outside of an `Interrupt`, SIGTERM ends with the status for "start me again".

    Among several processes JAX takes SIGTERM over as soon as they have met, and the loop answers it behind step one.
    """
    def stop(number, frame):
        if _complete.is_set():
            return
        os.write(2, b"stopped outside of the loop; run the same command again to resume\n")
        raise SystemExit(exits.SAVED)  # no Exception: nobody is to take it for a checkpoint that cannot be read

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _complete.clear()
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Interrupt:
    """Within this context the first SIGINT or SIGTERM is only remembered; a second Ctrl-C ends at once.

    Among several processes all must stop at the same step, whoever got the signal: there JAX's preemption service
    answers SIGTERM and names the step, and Ctrl-C is passed on to it.

    It may be entered again, by a run that goes back: what was requested is still to be answered.
    """

    def __init__(self):
        self.signal, self._reached = 0, False
        self._together = jax.process_count() > 1

    def __enter__(self) -> "Interrupt":
        handled = (signal.SIGINT,) if self._together else (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread():
            handled = ()  # Python lets only the main thread handle signals
        self._before = {number: signal.signal(number, self._received) for number in handled}
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self, step: int) -> bool:
        """Whether to stop after this step; in a multi-process run the same answer everywhere."""
        if not self._together:
            return self.signal != 0
        from jax.experimental import multihost_utils

        # Counted on through rollbacks: the service wants numbers that rise.
        self._reached |= multihost_utils.reached_preemption_sync_point(next(_calls))  # says so once
        if self._reached and not self.signal:
            self.signal = signal.SIGTERM
        return self._reached

    def _received(self, number, frame) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
        os.write(2, b"\nstopping after this step; Ctrl-C ends at once\n")  # print is not for signal handlers
        if self._together:
            os.kill(os.getpid(), signal.SIGTERM)
