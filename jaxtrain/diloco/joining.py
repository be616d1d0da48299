"""An island's part in a run (`diloco.count`): the outer optimizer's state, and the exchanges of the loop."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from jaxtrain.config.schema import hash_of
from jaxtrain.config.sections.diloco_keys import DilocoConfig
from jaxtrain.diloco.meeting_places import open_meeting
from jaxtrain.diloco.outer_exchange import Exchange
from jaxtrain.run import Extension, Loop, Parts, Run, identity
from jaxtrain.train_step.optimizers import outer
from jaxtrain.train_step.state import Extras, TrainState

PHASE = "exchange"  # what its time counts as


@dataclass(frozen=True)
class Joining(Extension):
    """A run as one of several islands."""

    diloco: DilocoConfig
    exchange: Exchange | None = None  # None: it has not met the others, and nothing is exchanged
    state_words: ClassVar[str] = "outer parameters"
    keeps: ClassVar[bool] = True

    @classmethod
    def of(cls, parts: Parts) -> "Joining":
        """Return it without an exchange."""
        return cls(parts.config.diloco)

    def for_run(self, run: Run, workdir: Path | None) -> "Joining":
        """Return it with an exchange, in a loop."""
        if workdir is None or self.exchange is not None:
            return self
        kind = hash_of({name: identity.settings(run).get(name, {}) for name in ("model", "lora")})
        return replace(self, exchange=Exchange(self.diloco, run.abstract, run.layout.axes, open_meeting(self.diloco),
                                               run.batch_source.tokens, kind))

    def extra_state(self) -> Extras:
        """Return what makes the state of the outer optimizer."""
        return {outer.NAME: outer.begin(self.diloco.kept)}

    def begin(self, step: int, state: TrainState, loop: Loop) -> TrainState:
        """Return the state to begin with, once an exchange that was open is ended."""
        if self.exchange is None:
            return state
        with loop.phase(PHASE):
            return self.exchange.begin(step, state, loop.stopping, loop.workdir)

    def after_step(self, step: int, state: TrainState, loop: Loop) -> TrainState:
        """Return the state after the exchange that begins or ends after this step, if one does."""
        last = step == loop.last
        if self.exchange is None or not self.exchange.due(step, last, loop.stopping):
            return state
        with loop.phase(PHASE):
            return self.exchange.after(step, state, last, loop.stopping)

    def before_save(self, step: int, state: TrainState, loop: Loop) -> TrainState:
        """Return the state once an offer that it lacks is sent, or kept in the workdir."""
        if self.exchange is None or not self.exchange.unsaved(step):
            return state
        with loop.phase(PHASE):
            return self.exchange.saved(step, state, loop.stopping)

    def ended(self, loop: Loop) -> None:
        """Remove what was kept in the workdir."""
        if self.exchange is not None:
            self.exchange.ended(loop.workdir)

    def pop_fields(self) -> Mapping[str, float]:
        """Return what the exchanges have measured."""
        return {} if self.exchange is None else self.exchange.pop_fields()
