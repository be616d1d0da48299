"""Ctrl-C and SIGTERM as a request that the loop answers between two steps."""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn

from jaxtrain.distributed import exit_codes

_calls = itertools.count(1)  # all processes make the same
_complete = threading.Event()
_early = 0  # the signal that came before the loop


def complete() -> None:
    """The last step is saved: from here on SIGTERM has nothing to stop, and does not make the run look unfinished."""
    _complete.set()


@contextlib.contextmanager
def before_the_loop() -> Iterator[None]:
    """Within this context, and outside of an `Interrupt`, Ctrl-C and SIGTERM end at once, each with its own status.

    Among several processes JAX takes SIGTERM over as soon as they have met, and the loop answers it behind step one.
    """
    global _early

    def stop(number, frame):
        global _early
        if _complete.is_set() and number == signal.SIGTERM:
            return
        _early = number
        _end(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _complete.clear()
    _early = 0
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Exception as error:  # a module in C whose import was cut short makes an error of its own of it
        if _early:
            _end(_early, error)
        raise
    finally:
        _early = 0
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, cause: Exception | None = None) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt from cause
    os.write(2, b"stopped outside of the loop; run the same command again to resume\n")
    raise SystemExit(exit_codes.SAVED) from cause  # no Exception: nobody is to take it for a damaged checkpoint


class Interrupt:
    """Within this context the first SIGINT or SIGTERM is only remembered; a second Ctrl-C ends at once.

    Among several processes all must stop at the same step, whoever got the signal: there JAX's preemption service
    answers SIGTERM and names the step, and Ctrl-C is passed on to it.

    It may be entered again, by a run that goes back: what was requested is still to be answered.
    """

    def __init__(self):
        self.signal, self._reached = 0, False
        import jax  # takes a second, in which signals are to be answered already

        self._together = jax.process_count() > 1

    def __enter__(self) -> "Interrupt":
        handled = (signal.SIGINT,) if self._together else (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread():
            handled = ()  # Python lets only the main thread handle signals
        elif _early:  # what it raised was lost: nothing can be raised in a callback of gc, as JAX has one
            _end(_early)
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
