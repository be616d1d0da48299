"""A barrier for saves that fails at once when a process could not write its part.

With Orbax's own barrier the others wait twenty minutes for a process that failed alone, and soon the training loop
waits with them. Here a process that fails publishes the failure under the keys that the others wait for.
"""

import json
from typing import Any

import jax

_STAGES = 3  # fingerprint sums available; all parts written; folder renamed to its final name


class FailedElsewhere(OSError):
    """Raised when another process could not write its part."""


class Barrier:
    """The barrier passed to Orbax, which calls it on the writing thread twice per save; one save at a time."""

    def __init__(self):
        self._service: Any = jax._src.distributed.global_state.client
        self._count, self._me = jax.process_count(), jax.process_index()
        self._saves: list[str] = []
        self._stage = 0

    def begin(self, save: str) -> None:
        """Begin a save, and delete the keys of the save before the last, which no process reads any more."""
        self._saves.append(save)
        self._stage = 0
        if len(self._saves) > 2:
            gone = self._saves.pop(0)
            if self._count > 1 and self._me == 0:
                self._service.key_value_delete(f"jaxtrain/{gone}/")  # a run of weeks saves often

    def give(self, what: Any) -> None:
        """Send a value to process 0, which gathers."""
        self._set(0, f"{self._me}", what=what)

    def gather(self, mine: Any, timeout_ms: int = 1_200_000) -> list[Any]:
        """Return, in process 0, the value that each process sent."""
        return [mine, *(self._get(0, f"{i}", timeout_ms)["what"] for i in range(1, self._count))]

    def fail(self, error: BaseException, reason: str) -> None:
        """Report that this process failed, so that the others do not wait for it."""
        if self._count == 1:
            return
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, FailedElsewhere):
            cause = cause.__cause__
        if cause is None:
            reason = f"{reason} in process {self._me}"
        elif self._me != 0:  # they already know, since the failure came from another process
            return
        for stage in range(_STAGES):
            self._set(stage, f"{self._me}" if self._me else "all", why=reason)

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Wait until all processes are here; raises OSError if one of them failed."""
        self._stage += 1
        if self._count == 1:
            return
        if self._me != 0:
            self._set(self._stage, f"{self._me}")
            self._get(self._stage, "all", timeout_ms)
            return
        for other in range(1, self._count):
            self._get(self._stage, f"{other}", timeout_ms)
        self._set(self._stage, "all")

    def _set(self, stage: int, who: str, **content: Any) -> None:
        self._service.key_value_set(self._key(stage, who), json.dumps(content), allow_overwrite=True)

    def _get(self, stage: int, who: str, timeout_ms: int) -> dict[str, Any]:
        found = json.loads(self._service.blocking_key_value_get(self._key(stage, who), timeout_ms))
        if "why" in found:
            raise FailedElsewhere(found["why"])
        return found

    def _key(self, stage: int, who: str) -> str:
        return f"jaxtrain/{self._saves[-1]}/barrier/{stage}/{who}"
