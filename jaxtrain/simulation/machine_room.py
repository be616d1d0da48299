"""The machines of a simulated run: which are lost until when, and what spare ones save."""

import bisect
from collections.abc import Sequence
from random import Random


class MachineRoom:
    """The machines by slot, and the spares, which take the place of lost ones and are repaired in their turn."""

    def __init__(self, spares: int, swap: float, repair: float, dice: Random):
        """Set up a room in which all machines work.

        Args:
            swap: seconds until a spare has taken a lost machine's place.
            repair: mean seconds until a lost machine is repaired, or another one is found.
        """
        self._back: dict[int, float] = {}  # when the machines that were lost are there again
        self._spares = [0.0] * spares  # when each is ready, in order
        self._swap, self._repair, self._dice = swap, repair, dice

    def back(self, slot: int) -> float:
        """Return when there is a machine in this slot, or since when there has been one."""
        return self._back.get(slot, 0.0)

    def missing(self, slots: Sequence[int], now: float) -> list[int]:
        """Return which of these slots have no machine now."""
        self._back = {slot: back for slot, back in self._back.items() if back > now}
        return [slot for slot in slots if slot in self._back] if self._back else []

    def lose(self, slot: int, at: float) -> None:
        """Lose the machine of a slot: a spare replaces it, or it is missing until it is repaired."""
        repaired = at + (self._dice.expovariate(1 / self._repair) if self._repair else 0.0)
        if not self._spares:
            self._back[slot] = repaired
            return
        ready = self._spares.pop(0)
        self._back[slot] = min(max(ready, at) + self._swap, repaired)
        bisect.insort(self._spares, repaired)
