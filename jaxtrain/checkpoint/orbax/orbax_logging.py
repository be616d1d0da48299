"""Lazy import of Orbax (a quarter of a second), with its log messages muted and its errors shortened."""

import contextlib
import logging
import os
import re
import sys
import traceback

_OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # in a long message of TensorStore


def orbax():
    """Import and return Orbax, muted: its messages would break up the progress line, and its failures raise anyway."""
    import orbax.checkpoint as ocp

    # Others use these loggers too: filter what comes from Orbax, do not silence them.
    for name, wanted in ("absl", _not_news), ("asyncio", _not_echo):
        if wanted not in (logger := logging.getLogger(name)).filters:
            logger.addFilter(wanted)
    return ocp


def _not_news(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _not_echo(record: logging.LogRecord) -> bool:
    """Return False for the traceback of a write that failed beside the one whose failure Orbax raised."""
    if "exception was never retrieved" not in record.getMessage() or not record.exc_info:
        return True
    _, error, trace = record.exc_info
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    return not (any(f"{os.sep}orbax{os.sep}" in file for file in files) or _OS_ERROR.search(f"{error}"))


@contextlib.contextmanager
def no_echoes():
    """Mute the traceback that each array still being read prints after the read of another one has failed."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda event: None if "Event loop is closed" in str(event.exc_value) else before(event)
    yield
    sys.unraisablehook = before  # not after an error: its echoes come later


def innermost(error: BaseException) -> str:
    """Return the root cause of an error in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    if code := _OS_ERROR.search(f"{error}"):
        return os.strerror(int(code[1]))
    said = isinstance(error, OSError) and error.errno is None  # raised by jaxtrain, here or in another process
    line = next(iter(f"{error}".strip().splitlines()), "")
    return (line if said and line else f"{type(error).__name__}: {line or 'no reason given'}")[:200]
