"""What keeps a run alive, or ends it well."""

from jaxtrain.resilience.interrupt import Interrupt
from jaxtrain.resilience.watchdog import Watchdog

__all__ = ["Interrupt", "Watchdog"]
