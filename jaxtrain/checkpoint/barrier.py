"""Where the processes wait for each other while a save is written; nobody waits there for one whose write failed.

Orbax's own barrier waits twenty minutes for a process that has failed alone, and the loop with it.
"""

from typing import Any

import jax

_LOOK_MS = 500  # how often who waits looks whether another one has failed


class Barrier:
    """Given to Orbax, which calls it on the thread that writes. One save at a time."""

    def __init__(self):
        self._service: Any = jax._src.distributed.global_state.client
        self._count, self._me = jax.process_count(), jax.process_index()
        self._save = ""

    def begin(self, save: str) -> None:
        """From here on it is about this save, by a name of its own. Nobody is waiting for the one before any more."""
        if self._save and self._count > 1 and self._me == 0:
            self._service.key_value_delete(f"jaxtrain/{self._save}/barrier/")  # else it would be kept for weeks
        self._save = save

    def fail(self, reason: str) -> None:
        """This process will not come; the others need not wait."""
        if self._count > 1:
            failed = f"jaxtrain/{self._save}/barrier/failed/{self._me}"
            self._service.key_value_set(failed, f"{reason} in process {self._me}")

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Return when all processes are here; raises OSError if one will not come."""
        if self._count == 1:
            return
        at = f"jaxtrain/{self._save}/barrier/{key}"
        self._service.key_value_set(f"{at}/{self._me}", "")
        if self._me == 0:
            for other in range(1, self._count):
                self._wait(f"{at}/{other}", timeout_ms)
            self._service.key_value_set(f"{at}/all", "")
        else:
            self._wait(f"{at}/all", timeout_ms)

    def _wait(self, key: str, timeout_ms: int) -> None:
        for _ in range(max(1, timeout_ms // _LOOK_MS)):
            try:
                return self._service.blocking_key_value_get(key, _LOOK_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in f"{error}":
                    raise
            for _, why in self._service.key_value_dir_get(f"jaxtrain/{self._save}/barrier/failed"):
                raise OSError(why)
        raise OSError(f"not all processes had written their part after {timeout_ms // 1000} seconds")
