"""A barrier for saves that fails at once in all processes when one could not write its part.

With Orbax's own barrier the others wait until its timeout, which is also that of the slowest healthy save, and soon the
training loop waits with them. Here a process that fails comes to the barrier too, and says so.
"""

from collections.abc import Callable

import jax

from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.checkpoint.orbax.orbax_logging import innermost
from jaxtrain.distributed.coordination import together

_STAGES = ["written", "committed"]


class Barrier:
    """The barrier passed to Orbax, which calls it on the writing thread twice per save; one save at a time.

    (With a single process Orbax does not call it.) What each process contributes to a save is gathered at the first.
    """

    def __init__(self):
        self._save = ""
        self._stages: list[str] = []  # that the current save has not reached

    def begin(self, save: str, read: Callable[[], Json]) -> None:
        """Begin a save to which this process contributes what `read` returns."""
        self._save, self._read, self._gathered, self._stages = save, read, None, _STAGES

    def gathered(self) -> list[Json]:
        """Return, in process 0 once all parts are written, what each process contributed."""
        return [self._read()] if self._gathered is None else self._gathered

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Wait until all processes are here; raises OSError in all of them if one failed."""
        note = {}
        if self._stages == _STAGES:
            try:
                note = {"read": self._read()}
            except Exception as error:
                note = {"why": innermost(error)}
        self._meet(note)

    def fail(self, reason: str) -> None:
        """Report, where the others wait, that this process failed; does nothing if they failed with it."""
        if self._stages and jax.process_count() > 1:
            self._meet({"why": reason})

    def _meet(self, note: JsonObject) -> None:
        stage, self._stages, left = self._stages[0], [], self._stages[1:]  # none are left if it raises

        def decide(notes):
            for process, each in enumerate(notes):
                if "why" in each:
                    raise OSError(f"{each['why']}{f' in process {process}' if process else ''}")
            self._gathered = self._gathered or [each["read"] for each in notes]  # at the first stage

        together(f"{self._save}/{stage}", note, decide)
        self._stages = left
