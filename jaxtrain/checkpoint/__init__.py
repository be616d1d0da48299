"""Whole checkpoints or none: saved in the background, restored on any mesh."""

from jaxtrain.checkpoint.store import Checkpoints, preload

__all__ = ["Checkpoints", "preload"]
