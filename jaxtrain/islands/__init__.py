"""Training on islands that talk seldom: each an ordinary run, joined by an ordered log of outer updates."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the coordinator works without JAX
    from jaxtrain.run import Run


def with_exchange(run: Run) -> Run:
    """Return the run with what exchanges its progress with other islands, if its config has any."""
    if not run.config.islands.count or run.exchange is not None:
        return run
    from jaxtrain.config.schema import hash_of
    from jaxtrain.islands.meeting_places import open_meeting
    from jaxtrain.islands.outer_exchange import Exchange

    kind = hash_of({name: run.settings.get(name, {}) for name in ("model", "lora")})
    return replace(run, exchange=Exchange(run.config.islands, run.abstract, run.layout.axes,
                                          open_meeting(run.config.islands), run.batch_source.tokens, kind))
