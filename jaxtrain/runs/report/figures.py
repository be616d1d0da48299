"""Figures of runs: a chart of curves, and `jt.plot`, which shows the usual charts in a notebook."""

import html
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain.base import arguments
from jaxtrain.errors import UserError, install_extra
from jaxtrain.observe.run_panel import columns_of, curve
from jaxtrain.runs.recorded_run import RecordedRun
from jaxtrain.runs.report import thinning
from jaxtrain.runs.report.run_curves import CHARTS, TAKEN_BACK, Chart, Curve, RunCurves, charts, names
from jaxtrain.runs.report.seed_statistics import Group

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

POINTS = 2000  # of a curve; with more than four runs fewer
# Distinguishable with any colour vision (after Okabe and Ito); the page has other shades of them in dark mode.
COLOURS = ("#1f5f99", "#b8480a", "#00795a", "#a3498f", "#7a6a00", "#2a8fb5", "#555c68", "#c02f2f")
_DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up")
_MARKS = {"restart": ("dot", -1), "rollback": ("dash", 7), "spike": ("dashdot", 4)}  # a dash and a colour
_WITHOUT_OUTLIERS = ("loss", "grad_norm", "throughput", "examples", "mfu", "step_time")
_LEAST_SPREAD = 0.02  # of the middle value: a curve is not shown in more detail than this
_MOST_MARKS, _MOST_MARKERS = 300, 100
_TALL, _BLOCKS = 280, 40  # pixels of a chart in a notebook, and characters of one in words


def graph_objects() -> Any:
    """Return the module plotly.graph_objects; raises a `UserError` that names the extra if it is missing."""
    try:
        return importlib.import_module("plotly.graph_objects")
    except ImportError:
        raise UserError("report", "the package plotly is not installed", install_extra("report")) from None


def figure(chart: Chart, runs: Sequence[RunCurves], groups: Sequence[Group] = ()) -> "Figure":
    """Return a chart of runs over steps.

    `meta` of each trace has what the page draws it by: `x`, its places on other axes; `colour`, the number of its
    colour; `role`, "raw", "mean" (which the page smooths), "line" or "mark".
    """
    layout = _layout(chart.unit)
    layout["yaxis"]["range"] = value_range(chart, runs)
    made = graph_objects().Figure(layout=layout)
    made.add_traces([trace for number, one in enumerate(runs) for trace in _traces(chart, one, number, len(runs))])
    if chart.name == "loss":
        made.add_traces([_band(group) for group in groups])
    return made


@dataclass(frozen=True)
class Plot:
    """Curves of runs that a notebook shows, without the network; `figure` is Plotly's, to change or to save."""

    figure: "Figure"
    text: str  # the same where there are no drawings

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.figure.to_html(full_html=False, include_plotlyjs=True)


def plot(workdir: str | Path, *more: str | Path) -> Plot:
    """Return the usual curves of one or several runs, which a notebook shows; needs the extra `report`."""
    for one in (workdir, *more):
        arguments.is_path("workdir", one, "give the workdir of a run")
    graph_objects()
    from plotly.subplots import make_subplots

    workdirs = [*map(Path, (workdir, *more))]
    runs = [RunCurves(RecordedRun(one), name) for one, name in zip(workdirs, names(workdirs), strict=True)]
    shown = [chart for chart in charts(runs) if chart in CHARTS]
    titles = [chart.title for chart in shown] or ["No steps yet"]
    made = make_subplots(len(titles), 1, subplot_titles=titles, vertical_spacing=0.3 / len(titles))
    seen = set()
    for row, chart in enumerate(shown, 1):
        for trace in list[Any](figure(chart, runs).data):
            if trace.meta["role"] == "mean":
                continue
            trace.update(showlegend=trace.name not in seen, legendgroup=trace.name, meta=None)
            seen.add(trace.name)
            made.add_trace(trace, row, 1)
        made.update_yaxes(title=chart.unit, range=value_range(chart, runs), row=row, col=1)
    made.update_layout(height=_TALL * len(titles), hovermode="x", template="plotly_white")
    words = "\n".join(_in_words(chart, one) for chart in shown for one in runs)
    return Plot(made, words or "no steps yet")


def value_range(chart: Chart, runs: Sequence[RunCurves]) -> list[float] | None:
    """Return the values that a chart shows at first, without outliers; None: all of them.

    Each curve is shown within three interquartile ranges of its middle half, so that neither the loss of the first
    steps nor one slow step makes the rest a flat line.
    """
    if chart.name not in _WITHOUT_OUTLIERS:
        return None
    curves = [values[np.isfinite(values)] for one in runs for key in chart.keys if (found := one.curve(key))
              for values in [found.values]]
    curves = [values for values in curves if len(values)]
    if not curves:
        return None
    ends = []
    for values in curves:
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
        reach = 3 * max(high - low, _LEAST_SPREAD * abs(middle))
        ends.append((max(values.min(), low - reach), min(values.max(), high + reach)))
    bottom, top = min(low for low, _ in ends), max(high for _, high in ends)
    everything = np.concatenate(curves)
    if bottom <= everything.min() and top >= everything.max():
        return None
    margin = 0.05 * (top - bottom)
    return [float(bottom - margin * (bottom > everything.min() or bottom - margin > 0)), float(top + margin)]


def _in_words(chart: Chart, run: RunCurves) -> str:
    """Return the curves of a run in a chart as blocks of text, with their first and last values."""
    lines = []
    for key in chart.keys:
        if (found := run.curve(key)) is not None and len(values := found.values[np.isfinite(found.values)]):
            drawn = curve(columns_of(values, _BLOCKS))[0]
            lines.append(f"{run.name}  {key:<16}{values[0]:>12,.4g} {drawn} {values[-1]:,.4g}")
    return "\n".join(lines)


def _layout(unit: str) -> dict[str, Any]:
    return {"template": "none", "hovermode": "x unified", "margin": {"l": 60, "r": 12, "t": 12, "b": 44},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "groupclick": "toggleitem"},
            "xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": unit}}}


def _traces(chart: Chart, one: RunCurves, number: int, count: int) -> list[Any]:
    """Return what a chart shows of one run, the number-th of `count`."""
    curves = [curve for key in chart.keys if (curve := one.curve(key))]
    if chart.name == "loss" and (gone := one.taken_back()):
        curves.append(gone)
    points = POINTS if count <= 4 else max(200, 4 * POINTS // count)
    made = []
    for place, curve in enumerate(curves):
        # Colours tell several runs apart. Dashes tell their curves apart where a chart has several of each run, and
        # otherwise the runs too.
        colour, dash = (place, place) if count == 1 else (number, place if len(chart.keys) > 1 else number)
        name, group = (curve.key, curve.key) if count == 1 else (
            f"{one.name} {curve.key}" if len(chart.keys) > 1 else one.name, one.name)
        keys = {"name": html.escape(name), "legendgroup": html.escape(group)}
        made += _curve(curve, keys, colour, dash, number if count > 1 else place, points)
    finite = np.concatenate([curve.values[np.isfinite(curve.values)] for curve in curves] or [np.empty(0)])
    if not len(finite):
        finite = np.ones(1)
    if chart.name in ("loss", "reward", "grad_norm"):
        prefix = "" if count == 1 else f"{one.name} "
        for kind, steps in one.marks().items():
            made.append(_lines(one.at(steps[-_MOST_MARKS:]), html.escape(f"{prefix}{kind}"), kind, finite))
    return made


def _curve(curve: Curve, named: dict[str, Any], colour: int, dash: int, symbol: int, points: int) -> list[Any]:
    """Return the traces of a curve: as it is, its means to be smoothed, and where it is not finite."""
    scatter = graph_objects().Scatter
    of_evaluation = curve.key.startswith("eval_")
    broken = np.flatnonzero(~np.isfinite(curve.values))
    rows = np.union1d(thinning.extremes(curve.values, points), broken[-_MOST_MARKS:])
    points_too = len(rows) == 1 or (of_evaluation and len(rows) <= _MOST_MARKERS)
    line = {"color": COLOURS[colour % len(COLOURS)], "dash": _DASHES[dash % len(_DASHES)]}
    role = "line" if of_evaluation or curve.key == TAKEN_BACK else "raw"
    keys = {**named, "line": line, "connectgaps": False}
    made = [scatter(**keys, **_places(curve.at(rows), role, colour), y=_compact(curve.values[rows]),
                    mode="lines+markers" if points_too else "lines",
                    marker={"symbol": _SYMBOLS[symbol % len(_SYMBOLS)], "size": 7})]
    if role == "raw":
        axes = {axis: thinning.averages(places, points) for axis, places in curve.axes.items()}
        made.append(scatter(**keys, **_places(axes, "mean", colour), y=_compact(
            thinning.averages(curve.values, points)), mode="lines", visible=False))
    if len(broken):
        finite = curve.values[np.isfinite(curve.values)]
        top = finite.max() if len(finite) else 1.0
        made.append(scatter(name=f"{named['name']}: not finite", legendgroup=named["legendgroup"], mode="markers",
                            **_places(curve.at(broken[-_MOST_MARKS:]), "mark", -1),
                            y=_compact(np.full(len(broken[-_MOST_MARKS:]), top)), hovertemplate="not finite",
                            marker={"symbol": "x", "size": 9, "color": COLOURS[7]}))
    return made


def _lines(axes: dict[str, np.ndarray], name: str, kind: str, values: np.ndarray) -> Any:
    """Return vertical lines over the range of some values, as one trace."""
    three = {axis: np.stack([places, places, np.full(len(places), np.nan)], 1).ravel() for axis, places in axes.items()}
    y = np.tile([values.min(), values.max(), np.nan], len(axes["step"]))
    dash, colour = _MARKS[kind]
    return graph_objects().Scatter(name=name, mode="lines", **_places(three, "mark", colour), y=_compact(y),
                                   hoverinfo="skip", line={"color": COLOURS[colour], "width": 1.2, "dash": dash})


def _band(group: Group) -> Any:
    """Return the mean over seeds of the evaluations of a group, with its interval."""
    return graph_objects().Scatter(
        name=html.escape(f"{group.name}: mean of {len(group.runs)}, 95 %"), mode="lines+markers",
        y=_compact(group.means), error_y={"array": _compact(group.margins), "thickness": 1.5, "width": 4},
        **_places(group.runs[0].at(group.steps), "line", -2), line={"color": "#1d2129", "width": 1.8},
        marker={"symbol": "cross", "size": 8})


def _places(axes: dict[str, np.ndarray], role: str, colour: int) -> dict[str, Any]:
    others = {axis: _compact(places) for axis, places in axes.items() if axis != "step"}
    step = axes["step"]
    whole = np.isfinite(step).all() and np.abs(step).max(initial=0) < 2**31
    return {"x": step.astype(np.int32) if whole else step,
            "meta": {"role": role, "colour": colour if colour < 0 else colour % len(COLOURS), "x": others}}


def _compact(values: np.ndarray) -> np.ndarray:
    """Return numbers as the page keeps them: seven digits."""
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float32)
