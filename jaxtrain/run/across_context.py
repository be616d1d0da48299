"""The way in which attention of a run crosses the parts of its sequences, which mesh axis `context` makes."""

from typing import TYPE_CHECKING

from jaxtrain.parallel.strategies import Strategy
from jaxtrain.run.context_strategy import strategy

if TYPE_CHECKING:
    from jaxtrain.run import Run


def of(run: "Run") -> Strategy | None:
    """Return that of a run; None for models of the user's own, too."""
    settings = run.sharded.settings
    return None if run.own else strategy(run.config, run.mesh, run.sharded.rules, settings.precision, settings.platform)


def said(run: "Run") -> str:
    """Return it, and why `auto` means it, for the first line of a run; "" if there is none."""
    if not (chosen := of(run)):
        return ""
    return f"; attention over context by {chosen.name}" + (f", since {chosen.reason}" if chosen.reason else "")
