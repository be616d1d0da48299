"""What processes tell each other without any device: the coordination service's key-value store.

It works while devices hang or lag, and costs the loop nothing when a thread does it.
"""

import json
import socket
from typing import Any

import jax


class Board:
    """One note a process under a topic; a new one replaces the old. A process that is alone keeps its own."""

    def __init__(self, topic: str):
        self._topic = f"jaxtrain/{topic}/"
        self._client = jax._src.distributed.global_state.client  # None: there is no one else
        self._own: dict[int, Any] = {}

    def publish(self, note: Any) -> None:
        """What this process has to say, as JSON."""
        if self._client is None:
            self._own[jax.process_index()] = note
        else:
            self._client.key_value_set(f"{self._topic}{jax.process_index()}", json.dumps(note), allow_overwrite=True)

    def read(self) -> dict[int, Any]:
        """The newest note of each process that has published any."""
        if self._client is None:
            return dict(self._own)
        notes = self._client.key_value_dir_get(self._topic)
        return {int(key.rpartition("/")[2]): json.loads(note) for key, note in notes}


class Hosts:
    """Which host each process runs on, for messages."""

    def __init__(self):
        self._board = Board("hosts")
        self._board.publish(socket.gethostname())

    def of(self, processes: set[int]) -> dict[int, str]:
        """A name for each: "?" where it cannot be learnt any more."""
        try:
            known = self._board.read()
        except Exception:  # the coordinator is gone; what is to be said is said without the name
            known = {}
        return {process: known.get(process, "?") for process in processes}
