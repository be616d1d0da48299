"""Trackers: what a run measures, shown by TensorBoard, Weights & Biases, MLflow, trackio or a tracker of one's own."""

import contextlib
import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any

from jaxtrain.config.part_tables import TRACKERS
from jaxtrain.errors import UserError, install_extra
from jaxtrain.observe.trackers.tracker import IMPORTING, Tracker


def check(names: Iterable[str]) -> None:
    """Refuse trackers whose packages are not installed; imports none of them."""
    for name in names:
        if not (package := TRACKERS.load(name).imports.partition(".")[0]):
            continue
        try:
            found = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            found = None
        if found is None:
            fix = install_extra(name) if name in TRACKERS.own else "install it"
            raise UserError("observe.trackers", f"the package {package} is not installed",
                            f"{fix}, or leave {name} out")


def made(name: str, options: Any = None) -> Tracker:
    """Return the tracker that `observe.trackers` calls so. `options`: those of one of another package.

    Its package is imported here, before the run has work for other threads: Python 3.11 fails now and then to compile
    on two of them at once. What fails here fails again on the tracker's own thread, and is told there.
    """
    tracker = TRACKERS.made(name, options)
    if tracker.imports:
        with contextlib.suppress(Exception), IMPORTING:
            importlib.import_module(tracker.imports)
    return tracker
