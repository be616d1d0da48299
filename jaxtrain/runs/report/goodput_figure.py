"""Draw where the time of runs went: their starts on the wall clock, with shares by category, and all events."""

import html
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from jaxtrain.base.annotations import JsonObject
from jaxtrain.observe.goodput import CATEGORIES, duration, settled
from jaxtrain.runs.recorded_run import RecordedRun
from jaxtrain.runs.report.figures import graph_objects
from jaxtrain.runs.report.run_curves import RunCurves

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# In the order in which a start usually spends its time, with a colour of the page and a pattern.
_DRAWN = {"init": (6, ""), "compile": (3, ""), "restore": (5, ""), "step": (0, ""), "data_wait": (1, "/"),
          "eval": (2, ""), "exchange": (3, "/"), "checkpoint": (4, ""), "lost_work": (7, "x"), "other": (6, "."),
          "restart_gap": (7, "/"), "idle": (6, "/")}
_MOST_EVENTS = 2000
_TEXT = 300  # characters of an event
_CLEAN = ("finished", "stopped")


def figure(runs: Sequence[RunCurves]) -> "Figure":
    """Return the time of runs, a row each; those of one run's events that are of one kind have a row of their own."""
    go = graph_objects()
    made = go.Figure(layout={
        "template": "none", "barmode": "overlay", "hovermode": "closest",
        "margin": {"l": 120, "r": 12, "t": 12, "b": 44},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "xaxis": {"type": "date", "title": {"text": "time (UTC)"}},
        "yaxis": {"autorange": "reversed", "type": "category"}})
    bars: dict[str, list[tuple[str, float, float, str]]] = {}
    for one in runs:
        for category, began, seconds, said in spans(one.run):
            bars.setdefault(category, []).append((html.escape(one.name), began, seconds, said))
    for category, (colour, pattern) in _DRAWN.items():
        if parts := bars.get(category):
            rows, began, seconds, said = zip(*parts, strict=True)
            made.add_trace(go.Bar(
                name=category, orientation="h", y=rows, base=[1000 * at for at in began], width=0.7,
                x=[1000 * length for length in seconds], text=said, textposition="none", hovertemplate="%{text}",
                marker={"pattern": {"shape": pattern, "size": 6}}, meta={"role": "bar", "colour": colour}))
    for one in runs:
        made.add_traces(_events(one, alone=len(runs) == 1))
    return made


def spans(run: RecordedRun) -> list[tuple[str, float, float, str]]:
    """Return the parts of a run's time: category, when it is drawn to begin, seconds, and a text.

    Within a start a category's seconds are drawn as one stretch, though they are spread over it.
    """
    found, end = [], None
    starts = run.account.incarnations if run.account else ()
    for number, (one, seconds) in enumerate(zip(starts, settled(starts), strict=True), 1):
        at = one.began
        if end is not None and at > end[0]:
            found.append((end[1], end[0], at - end[0], f"{end[1]}: {duration(at - end[0])} before start {number}"))
        for category in _DRAWN:
            if length := seconds[category]:
                found.append((category, at, length, f"start {number}, {category}: {duration(length)}"))
                at += length
        end = one.sign, "idle" if one.ended in _CLEAN else "restart_gap"
    return found


def said(event: JsonObject) -> str:
    """Return what an event says besides its time, kind, process and host."""
    rest = {key: value for key, value in event.items() if key not in ("time", "kind", "process", "host")}
    text = ", ".join(f"{key}={_text(value)}" for key, value in rest.items())
    return text if len(text) <= _TEXT else f"{text[:_TEXT]} …"


def _text(value: object) -> str:
    return value if isinstance(value, str) else f"{value:.5g}" if isinstance(value, float) else json.dumps(value)


def clock(seconds: Any) -> str:
    """Return a wall-clock time as text, in UTC; "" for what is none."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def _events(one: RunCurves, alone: bool) -> list[Any]:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for event in one.run.events[-_MOST_EVENTS:]:
        if clock(event.get("time")):
            kinds.setdefault(html.escape(event["kind"]), []).append(event)
    return [graph_objects().Scatter(
        name=kind if alone else html.escape(one.name), showlegend=False, mode="markers",
        x=[1000 * event["time"] for event in events], y=[kind if alone else html.escape(one.name)] * len(events),
        text=[html.escape(said(event)) for event in events],
        hovertemplate=f"{kind.replace('%', '&#37;')}<br>%{{x}}<br>%{{text}}<extra></extra>",
        marker={"symbol": "diamond", "size": 9, "line": {"width": 1}}, meta={"role": "event", "colour": -2})
        for kind, events in kinds.items()]


assert set(_DRAWN) == set(CATEGORIES)
