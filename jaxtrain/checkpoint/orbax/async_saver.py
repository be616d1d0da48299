"""An asynchronous save by Orbax: the state, its metadata, and the fingerprint that the arrays had on the devices."""

import contextlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import jax

from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.checkpoint.orbax.barrier import Barrier
from jaxtrain.checkpoint.orbax.orbax_logging import no_echoes, orbax


class AsyncSaver:
    """Orbax's checkpointer with a barrier of our own, which all processes leave when one of them has failed."""

    @cached_property
    def barrier(self) -> Barrier:
        """The barrier at which processes wait before a save counts as committed."""
        return Barrier()

    @cached_property
    def _orbax(self):
        from jaxtrain.checkpoint.orbax.deferred_json import DeferredJson

        ocp = orbax()
        handler = ocp.CompositeCheckpointHandler(
            state=ocp.StandardCheckpointHandler(), meta=ocp.JsonCheckpointHandler(), fingerprint=DeferredJson())
        return ocp.AsyncCheckpointer(handler, async_options=ocp.AsyncOptions(barrier_sync_fn=self.barrier))

    def save(self, folder: Path, flat: dict[str, jax.Array], meta: JsonObject, sums: Callable[[], Json]) -> None:
        """Start a save; `flat` is copied off the devices, and `sums` is called at the end of the write."""
        from jaxtrain.checkpoint.orbax.deferred_json import DeferredJsonSave

        args = orbax().args
        self._orbax.save(folder, args=args.Composite(
            state=args.StandardSave(flat), meta=args.JsonSave(meta), fingerprint=DeferredJsonSave(sums)))

    def wait(self) -> None:
        """Wait until the save is committed; raises what it failed with."""
        with no_echoes():
            self._orbax.wait_until_finished()

    def drain(self) -> None:
        """After a failed save, wait until no thread of this process writes any more.

        Orbax stops waiting at the first part that fails, and may hold further errors that it would raise at the next
        save.
        """
        parts = list(getattr(self._orbax._async_manager, "_commit_futures", None) or ())
        while parts:
            part = parts.pop()
            if inner := getattr(part, "_futures", None):
                parts += inner
            else:
                with contextlib.suppress(Exception):
                    part.result()
        for _ in range(9):
            with contextlib.suppress(Exception):
                self._orbax.wait_until_finished()
                return

    def close(self) -> None:
        """Release Orbax's threads."""
        if "_orbax" in self.__dict__:
            self._orbax.close()
