"""The extensions of a run in its loop: what changes the state between steps, and what makes batches with it."""

from typing import Any

import jax

from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.loading.loader import in_step
from jaxtrain.data.loading.placement import placed_ahead
from jaxtrain.run import Loop, Run, Stopped, shapes_of
from jaxtrain.train_step.state import TrainState
from jaxtrain.trainer.session import Interrupted, Session


class Extensions:
    """The hooks of a run's extensions in its loop."""

    def __init__(self, run: Run, session: Session):
        self._run, self._signals = run, session.interrupt
        self._loop = Loop(session.workdir, run.config.train.steps, session.interrupt.requested, session.phase)

    def begin(self, step: int, state: TrainState) -> TrainState:
        """Return the state that the loop begins with."""
        return self._changed("begin", step, state) if step < self._loop.last else state

    def after_step(self, step: int, state: TrainState) -> TrainState:
        """Return the state to go on with after a step."""
        return self._changed("after_step", step, state)

    def before_save(self, step: int, state: TrainState) -> TrainState:
        """Return the state to be saved after a step, and to go on with."""
        return self._changed("before_save", step, state)

    def ended(self) -> None:
        """Clean up after the last step, whose checkpoint is on disk."""
        for one in self._run.extensions:
            one.ended(self._loop)

    def pop_fields(self) -> dict[str, float]:
        """Return what extensions, and data made with the state, have measured since the last call."""
        found = dict(getattr(self._run.data, "pop_fields", dict)())
        for one in self._run.extensions:
            found |= one.pop_fields()
        return found

    def _changed(self, hook: str, step: int, state: TrainState) -> TrainState:
        for one in self._run.extensions:
            try:
                state = getattr(one, hook)(step, state, self._loop)
            except Stopped:
                raise Interrupted(step, self._signals.signal, saved=False) from None
        return state


def makes_batches(run: Run) -> bool:
    """Return whether batches are made with the state: then `run.see` has to be called before each."""
    return hasattr(run.data, "see")


def drawn(run: Run, batches: BatchSource, start: int, stop: int) -> Any:
    """Return an iterator of the placed batches of these steps, which prepares the next ones ahead if it can."""
    def place(step, batches):
        with jax.transfer_guard("allow"):
            return run.batch(step, batches)

    if makes_batches(run):
        return in_step(batches, start, stop - start, place, getattr(run.data, "forget", None))
    for one in run.extensions:
        batches = one.added_to(batches)
    return placed_ahead(batches, start, stop, run.layout.batch, shapes_of(run).spec.check, run.config.data.prefetch,
                        run.config.data.workers)
