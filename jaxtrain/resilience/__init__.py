"""What keeps a run alive, or ends it well."""

from jaxtrain.resilience.interrupt import Interrupt

__all__ = ["Interrupt"]
