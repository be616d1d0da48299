"""The processes of a run agree through the coordination service: no device takes part, so any thread may do it."""

import json
from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.errors import UserError

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
