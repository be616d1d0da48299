"""What processes tell each other without any device: through the coordination service's key-value store.

It works while devices hang or lag, and from any thread.
"""

import itertools
import json
import socket
from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.errors import UserError

_exchanges = itertools.count()
TIMEOUT_S = 3600  # of the slowest of them; a process that died is noticed by the service long before


def together(name: str, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
    """Process 0 decides on what all of them bring, as JSON, and everybody gets what it decided.

    Every process makes the same calls; `name` is another one each time. What `decide` raises is raised by all.
    """
    count, me = jax.process_count(), jax.process_index()
    if count == 1:
        return decide([mine])
    service: Any = jax._src.distributed.global_state.client
    if me != 0:
        service.key_value_set(f"jaxtrain/{name}/{me}", json.dumps(mine))
        answer = json.loads(service.blocking_key_value_get(f"jaxtrain/{name}/answer", TIMEOUT_S * 1000))
        if "refused" in answer:
            raise UserError(*answer["refused"])
        if "failed" in answer:
            raise OSError(answer["failed"])
        return answer["decided"]
    answer: dict[str, Any] = {"failed": "process 0 was stopped"}
    try:
        theirs = []
        for i in range(1, count):
            theirs.append(json.loads(service.blocking_key_value_get(f"jaxtrain/{name}/{i}", TIMEOUT_S * 1000)))
            service.key_value_delete(f"jaxtrain/{name}/{i}")  # a run of weeks agrees often; answers are short, and stay
        decided = decide([mine, *theirs])
        answer = {"decided": decided}
        return decided
    except UserError as error:
        answer = {"refused": [error.key, error.reason, error.fix]}
        raise
    except Exception as error:
        answer = {"failed": f"{type(error).__name__}: {error}"}
        raise
    finally:
        service.key_value_set(f"jaxtrain/{name}/answer", json.dumps(answer))


def exchange(value: Any, decide: Callable[[list[Any]], Any] = list) -> Any:
    """What each process gave, by process, or what process 0 decides on it.

    All make this call, in the same order, on their main threads.
    """
    return together(f"exchange/{next(_exchanges)}", value, decide)


def count(name: str, by: int) -> int:
    """A counter that all processes share (by=0 reads it); alone there is no need for one."""
    service: Any = jax._src.distributed.global_state.client
    return 1 if jax.process_count() == 1 else service.key_value_increment(f"jaxtrain/count/{name}", by)


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
