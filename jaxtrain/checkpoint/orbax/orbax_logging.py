"""Orbax, loaded when first used (a quarter of a second), without its news, and its errors in a few words."""

import contextlib
import logging
import os
import re
import sys


def orbax():
    """The package, muted; its news would break up the progress line, and what fails it raises too."""
    import orbax.checkpoint as ocp

    logger = logging.getLogger("absl")  # shared by all users of absl: silence a source, not the logger
    if _not_news not in logger.filters:
        logger.addFilter(_not_news)
    return ocp


def _not_news(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


@contextlib.contextmanager
def no_echoes():
    """Mute the traceback that each array still being read prints when the reading of another one has failed."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda event: None if "Event loop is closed" in str(event.exc_value) else before(event)
    yield
    sys.unraisablehook = before  # not after an error: the echoes of one come later


def innermost(error: BaseException) -> str:
    """What went wrong at first, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    if code := re.search(r"os_error_code='(\d+)'", str(error)):  # TensorStore tells a long story around it
        return os.strerror(int(code[1]))
    said = isinstance(error, OSError) and error.errno is None  # by us, or by another process
    line = next(iter(f"{error}".strip().splitlines()), "")
    return (line if said and line else f"{type(error).__name__}: {line or 'no reason given'}")[:200]
