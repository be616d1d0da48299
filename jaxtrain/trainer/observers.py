"""Observers of a run: they are told of each step and change nothing."""

from collections.abc import Sequence

import jax

from jaxtrain.base.annotations import JsonObject
from jaxtrain.observe.metrics import Record


class Observer:
    """An observer of a run's steps; a subclass overrides the methods that it needs.

    Observers are told in no particular order, and none of them may keep the loop waiting: until `on_complete` the
    metrics are futures. An exception in one of them ends the run as an error. After a rollback steps come again, with
    the numbers that they had.
    """

    def on_batch(self, step: int, batch: dict[str, jax.Array]) -> None:
        """Take the batch on which `step` (from 1) trains, before it does."""

    def on_dispatch(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Take the metrics of a step that the devices have begun: reading a value would wait for them."""

    def on_complete(self, record: Record) -> None:
        """Take one line of metrics.jsonl, of a step or of an evaluation; on another thread, in the first process."""


class Completions:
    """A sink of the metrics writer that tells observers of its lines."""

    def __init__(self, observers: Sequence[Observer]):
        self._observers = observers

    def write(self, record: JsonObject) -> None:
        """Take one line."""
        for observer in self._observers:
            observer.on_complete(dict(record))

    def close(self) -> None:
        """Do nothing: observers are not told of the end."""
