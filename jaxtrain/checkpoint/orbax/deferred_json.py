"""A JSON file in a checkpoint whose content is known only after the save returned; it is committed with the rest."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp


class LateJson(ocp.JsonCheckpointHandler):
    """An Orbax handler that writes what a function returns, called in the background."""

    async def async_save(self, directory: Any, item: Any = None, args: Any = None) -> Any:
        """Start writing, in process 0 only; the commit waits for it."""
        if jax.process_index() != 0:
            return []

        async def write():
            (directory / "metadata").write_text(json.dumps(args.content()))

        return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name="late_json")]  # starts running here


@ocp.args.register_with_handler(LateJson, for_save=True, for_restore=True)  # Orbax requires both
@dataclass
class LateJsonSave(ocp.args.CheckpointArgs):
    """The save arguments: a function that returns what to write."""

    content: Callable[[], Any]
