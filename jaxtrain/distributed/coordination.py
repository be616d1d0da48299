"""Coordination of processes without devices, through the key-value store of JAX's coordination service.

Works while devices hang or lag, and from any thread.
"""

import itertools
import socket
from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.base.annotations import Json
from jaxtrain.distributed.authentication import opened, sealed
from jaxtrain.errors import UserError

_exchanges = itertools.count()
TIMEOUT_S = 3600  # for the slowest process; the service notices a dead one long before


def together(name: str, mine: Json, decide: Callable[[list[Json]], Json]) -> Json:
    """Return what process 0 decides on the values that all processes contribute, as JSON.

    Every process makes the same calls, with a new `name` each time. An exception from `decide` is raised in all
    processes. Nothing of it stays in the store once all have read the answer.
    """
    count, me = jax.process_count(), jax.process_index()
    if count == 1:
        return decide([mine])
    service: Any = jax._src.distributed.global_state.client
    if me != 0:
        service.key_value_set(f"jaxtrain/{name}/{me}", sealed(f"{name}/{me}", mine))
        answer = opened(f"{name}/answer", service.blocking_key_value_get(f"jaxtrain/{name}/answer", TIMEOUT_S * 1000))
        if service.key_value_increment(f"jaxtrain/{name}/read", 1) == count - 1:  # the last one; process 0 knows it
            for key in ("answer", "read"):
                service.key_value_delete(f"jaxtrain/{name}/{key}")
        if "refused" in answer:
            raise UserError(*answer["refused"])
        if "failed" in answer:
            raise OSError(answer["failed"])
        return answer["decided"]
    answer: dict[str, Any] = {"failed": "process 0 was stopped"}
    try:
        theirs = []
        for i in range(1, count):
            theirs.append(opened(f"{name}/{i}", service.blocking_key_value_get(
                f"jaxtrain/{name}/{i}", TIMEOUT_S * 1000)))
            service.key_value_delete(f"jaxtrain/{name}/{i}")  # a run of weeks agrees often
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
        service.key_value_set(f"jaxtrain/{name}/answer", sealed(f"{name}/answer", answer))


def exchange(value: object, decide: Callable[[list[Json]], Json] = list) -> Json:
    """Return the value of each process, by process, or what process 0 decides on them.

    All processes make this call, in the same order, on their main threads.
    """
    return together(f"exchange/{next(_exchanges)}", value, decide)


def count(name: str, by: int) -> int:
    """Add `by` to a counter that all processes share and return it (by=0 reads it); always 1 with one process."""
    service: Any = jax._src.distributed.global_state.client
    return 1 if jax.process_count() == 1 else service.key_value_increment(f"jaxtrain/count/{name}", by)


class Board:
    """A bulletin board with one note per process under a topic; a new note replaces the old one."""

    def __init__(self, topic: str):
        self._topic = f"jaxtrain/{topic}/"
        self._client = jax._src.distributed.global_state.client  # None: there is only one process
        self._own: dict[int, Any] = {}

    def publish(self, note: Json) -> None:
        """Publish this process's note, as JSON."""
        if self._client is None:
            self._own[jax.process_index()] = note
        else:
            name = f"{self._topic}{jax.process_index()}"
            self._client.key_value_set(name, sealed(name, note), allow_overwrite=True)

    def read(self) -> dict[int, Json]:
        """Return the newest note of each process that has published one."""
        if self._client is None:
            return dict(self._own)
        notes = self._client.key_value_dir_get(self._topic)
        numbers = [int(key.rpartition("/")[2]) for key, _ in notes]
        return {i: opened(f"{self._topic}{i}", note) for i, (_, note) in zip(numbers, notes, strict=True)}


class Hosts:
    """The host name of each process, for messages."""

    def __init__(self):
        self._board = Board("hosts")
        self._board.publish(socket.gethostname())

    def of(self, processes: set[int]) -> dict[int, str]:
        """Return the host name of each of these processes, or "?" where it can no longer be found out."""
        try:
            known = self._board.read()
        except Exception:  # the coordinator is gone; report without the host names
            known = {}
        return {process: known.get(process, "?") for process in processes}
