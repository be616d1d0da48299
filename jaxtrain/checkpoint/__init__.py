"""Save and restore checkpoints: written atomically in the background, restored on any mesh."""

from jaxtrain.checkpoint.local.snapshots import LocalCheckpoints
from jaxtrain.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointManager", "LocalCheckpoints"]
