"""Whole checkpoints or none: saved in the background, restored on any mesh."""

from jaxtrain.checkpoint.snapshots import Snapshots
from jaxtrain.checkpoint.store import Checkpoints

__all__ = ["Checkpoints", "Snapshots"]
