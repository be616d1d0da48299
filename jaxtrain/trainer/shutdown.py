"""Graceful shutdown: Ctrl-C and SIGTERM are requests that the loop handles between two steps."""

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from jaxtrain.distributed import exit_codes

_calls = itertools.count(1)  # all processes make the same calls
_complete = threading.Event()
_early = 0  # a signal that is to end the run at once: one before the loop, or a second Ctrl-C in it
_said = False  # that the run ends because of it
_AGAIN_S = 0.05  # after which a signal is sent again that came during an import, or whose exception was discarded


def complete() -> None:
    """Note that the last step is saved: from now on SIGTERM is ignored, so that the run counts as finished."""
    _complete.set()


@contextlib.contextmanager
def before_the_loop() -> Iterator[None]:
    """A context in which, outside of an `Interrupt`, Ctrl-C and SIGTERM end at once, each with its own exit status.

    They are held back during imports: an exception there may crash modules that are not written in Python. Where Python
    discards the exception, as in a callback of the garbage collector, the signal is sent again.

    In a multi-process run JAX takes SIGTERM over once the processes are connected, and the loop handles it after step
    one.
    """
    global _early, _said
    held: list[threading.Timer] = []

    def stop(number, frame):
        global _early
        if _complete.is_set() and number == signal.SIGTERM:
            return
        _early = number
        if not _is_importing(frame):
            _end(number)
        send_again()

    def send_again():
        if not held:
            held.append(threading.Timer(_AGAIN_S, send, (_early,)))
            held[-1].daemon = True
            held[-1].start()

    def send(number):
        held.clear()
        os.kill(os.getpid(), number)

    def discarded(unraisable):
        if _early and isinstance(unraisable.exc_value, SystemExit | KeyboardInterrupt):
            send_again()
        else:
            before_discarded(unraisable)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _complete.clear()
    _early, _said = 0, False
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    before_discarded, sys.unraisablehook = sys.unraisablehook, discarded
    try:
        yield
    except Exception as error:  # a C module whose import was interrupted raises an error of its own
        if _early:
            _end(_early, error)
        raise
    finally:
        _early = 0
        sys.unraisablehook = before_discarded
        for timer in list(held):
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_importing(frame: FrameType | None) -> bool:
    while frame and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _end(number: int, cause: Exception | None = None) -> NoReturn:
    global _said
    if number == signal.SIGINT:
        raise KeyboardInterrupt from cause
    if not _said:
        os.write(2, b"stopped outside of the loop; run the same command again to resume\n")
    _said = True
    raise SystemExit(exit_codes.SAVED) from cause  # not an Exception, which could be mistaken for a damaged checkpoint


class Interrupt:
    """A context in which the first SIGINT or SIGTERM is only recorded; a second Ctrl-C ends at once.

    In a multi-process run all must stop at the same step, whichever process got the signal: there JAX's preemption
    service handles SIGTERM and chooses the step, and Ctrl-C is forwarded to it.

    It may be entered again after a rollback: an earlier request is still pending.
    """

    def __init__(self):
        self.signal, self._reached = 0, False
        import jax  # takes a second, during which signals must already be handled

        self._together = jax.process_count() > 1

    def __enter__(self) -> "Interrupt":
        handled = (signal.SIGINT,) if self._together else (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread():
            handled = ()  # Python lets only the main thread handle signals
        elif _early:  # its exception was lost, as in code that catches every exception
            _end(_early)
        self._before = {number: signal.signal(number, self._received) for number in handled}
        return self

    def __exit__(self, *error) -> None:
        global _early
        _early = 0
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self, step: int) -> bool:
        """Return whether to stop after this step; the same answer in all processes."""
        if not self._together:
            return self.signal != 0
        from jax.experimental import multihost_utils

        # Counted on through rollbacks: the service needs increasing numbers.
        self._reached |= multihost_utils.reached_preemption_sync_point(next(_calls))  # reports it only once
        if self._reached and not self.signal:
            self.signal = signal.SIGTERM
        return self._reached

    def _received(self, number, frame) -> None:
        global _early
        if self.signal and number == signal.SIGINT:
            _early = number  # if Python discards the exception, the signal is sent again, as before the loop
            raise KeyboardInterrupt
        self.signal = number
        os.write(2, b"\nstopping after this step; Ctrl-C ends at once\n")  # print is not safe in signal handlers
        if self._together:
            os.kill(os.getpid(), signal.SIGTERM)
