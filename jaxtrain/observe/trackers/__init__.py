"""Trackers: what a run measures, shown by TensorBoard, Weights & Biases, MLflow, trackio or a tracker of one's own."""

import importlib
import importlib.util
from collections.abc import Iterable

from jaxtrain.errors import UserError, install_extra
from jaxtrain.observe.trackers.tracker import Tracker

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}


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
    """Return the tracker that `observe.trackers` calls so."""
    return importlib.import_module(f"jaxtrain.observe.trackers.{name}").Service()
