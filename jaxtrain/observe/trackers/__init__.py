"""Trackers: what a run measures, shown by TensorBoard, Weights & Biases, MLflow, trackio or a tracker of one's own."""

import contextlib
import importlib
import importlib.util
from collections.abc import Iterable

from jaxtrain.errors import UserError, install_extra
from jaxtrain.observe.trackers.tracker import IMPORTING, Tracker

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
_IMPORTED = {"mlflow": "mlflow.tracking"}  # whose own name imports little


def check(names: Iterable[str]) -> None:
    """Refuse trackers whose packages are not installed; imports none of them."""
    for name in names:
        try:
            found = importlib.util.find_spec(_PACKAGES[name])
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise UserError("observe.trackers", f"the package {_PACKAGES[name]} is not installed",
                            f"{install_extra(name)}, or leave {name} out")


def made(name: str) -> Tracker:
    """Return the tracker that `observe.trackers` calls so.

    Its package is imported here, before the run has work for other threads: Python 3.11 fails now and then to compile
    on two of them at once. What fails here fails again on the tracker's own thread, and is told there.
    """
    with contextlib.suppress(Exception), IMPORTING:
        importlib.import_module(_IMPORTED.get(name, _PACKAGES[name]))
    return importlib.import_module(f"jaxtrain.observe.trackers.{name}").Service()
