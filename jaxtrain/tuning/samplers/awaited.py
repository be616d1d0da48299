"""Answers that are on their way: a sequence that waits for them when it is read."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import overload

import jax

from jaxtrain.base.annotations import JsonObject
from jaxtrain.distributed.coordination import exchange
from jaxtrain.hub.generate import Generated
from jaxtrain.tuning.environments.conversation import Conversation


class Awaited(Sequence[Generated]):
    """So many answers, which the first process has asked for. All processes read them, in the same order."""

    def __init__(self, count: int, future: "Future[list[Generated]] | None"):
        self._count, self.future = count, future
        self._found: list[Generated] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> Generated: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Generated]: ...

    def __getitem__(self, at: int | slice) -> Generated | Sequence[Generated]:
        return self._all()[at]

    def __iter__(self) -> Iterator[Generated]:
        return iter(self._all())

    def _all(self) -> list[Generated]:
        if self._found is None:
            if jax.process_count() == 1:
                assert self.future is not None
                self._found = self.future.result()
            else:
                self._found = list(map(_of_json, exchange(None, lambda _: _as_json(self.future))))
        return self._found


def _as_json(future: "Future[list[Generated]] | None") -> list[dict]:
    assert future is not None
    return [asdict(one) for one in future.result()]


def _of_json(one: dict) -> Generated:
    found: JsonObject = {name: tuple(value) if isinstance(value, list) else value for name, value in one.items()}
    return Conversation(**found) if "turns" in one else Generated(**found)
