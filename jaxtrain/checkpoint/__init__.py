"""Whole checkpoints or none: saved in the background, restored on any mesh."""

from jaxtrain.checkpoint.local.snapshots import Snapshots
from jaxtrain.checkpoint.manager import Checkpoints

__all__ = ["Checkpoints", "Snapshots"]
