"""A JSON file in a checkpoint whose content is known only when all else is written; it is committed with the rest."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orbax.checkpoint as ocp


class DeferredJson(ocp.JsonCheckpointHandler):
    """An Orbax handler that writes what a function returns, in process 0, just before the commit."""

    async def async_save(self, directory: Any, item: Any = None, args: Any = None) -> Any:
        """Keep the function."""
        self._content = args.content

    def finalize(self, directory: Any) -> None:
        """Write the file; Orbax calls this in process 0 when all processes have written their parts."""
        (directory / "metadata").write_text(json.dumps(self._content()))


@ocp.args.register_with_handler(DeferredJson, for_save=True, for_restore=True)  # Orbax requires both
@dataclass
class DeferredJsonSave(ocp.args.CheckpointArgs):
    """The save arguments: a function that returns what to write."""

    content: Callable[[], Any]
