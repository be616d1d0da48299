"""A JSON file of a checkpoint whose content is known only after the save returned; it is committed with the rest."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp


class LateJson(ocp.JsonCheckpointHandler):
    """Writes what a function returns, and calls it in the background."""

    async def async_save(self, directory: Any, item: Any = None, args: Any = None) -> Any:
        """In one process; the commit waits for it."""
        if jax.process_index() != 0:
            return []

        async def write():
            (directory / "metadata").write_text(json.dumps(args.content()))

        return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name="late_json")]  # it runs from here on


@ocp.args.register_with_handler(LateJson, for_save=True, for_restore=True)  # Orbax wants both
@dataclass
class LateJsonSave(ocp.args.CheckpointArgs):
    """What to write, when it is known."""

    content: Callable[[], Any]
