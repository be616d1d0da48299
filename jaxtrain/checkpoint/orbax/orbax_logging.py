"""Lazy import of Orbax (a quarter of a second), with its log messages muted and its errors shortened."""

import contextlib
import logging
import os
import re
import sys


def orbax():
    """Import and return Orbax, muted: its messages would break up the progress line, and its failures raise anyway."""
    import orbax.checkpoint as ocp

    logger = logging.getLogger("absl")  # shared by all users of absl: filter one source, do not silence the logger
    if _not_news not in logger.filters:
        logger.addFilter(_not_news)
    return ocp


def _not_news(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


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
    if code := re.search(r"os_error_code='(\d+)'", str(error)):  # TensorStore wraps it in a long message
        return os.strerror(int(code[1]))
    said = isinstance(error, OSError) and error.errno is None  # raised by jaxtrain, here or in another process
    line = next(iter(f"{error}".strip().splitlines()), "")
    return (line if said and line else f"{type(error).__name__}: {line or 'no reason given'}")[:200]
