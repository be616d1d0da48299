"""What keeps a run alive, or ends it well."""

from jaxtrain.resilience.accusations import Accusations, Corrupted
from jaxtrain.resilience.interrupt import Interrupt
from jaxtrain.resilience.replays import Replays
from jaxtrain.resilience.replicas import Replicas
from jaxtrain.resilience.stragglers import Stragglers

__all__ = ["Accusations", "Corrupted", "Interrupt", "Replays", "Replicas", "Stragglers"]
