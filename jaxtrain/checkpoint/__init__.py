"""Save and restore checkpoints: written atomically in the background, restored on any mesh."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtrain.checkpoint.local.snapshots import LocalCheckpoints
    from jaxtrain.checkpoint.manager import CheckpointManager

_HOME = {"CheckpointManager": "manager", "LocalCheckpoints": "local.snapshots"}

__all__ = ["CheckpointManager", "LocalCheckpoints"]


def __getattr__(name: str):  # imported on first use: the command's --help does not wait for JAX
    if name not in _HOME:
        raise AttributeError(f"module 'jaxtrain.checkpoint' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"jaxtrain.checkpoint.{_HOME[name]}"), name)
    return value
