"""Draw a run for a terminal: the curve of its loss, how far it is, figures and what happened."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.pages.plain_text import plain

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ABOUT = {"time", "kind", "process", "host"}  # of an event, besides what it says
STYLES = {"running": "green", "finished": "cyan", "failed": "red", "silent": "yellow", "damaged": "red"}


@dataclass
class Reading:
    """The numbers of a run that a panel shows."""

    title: str
    step: int = 0
    last_step: int = 0
    state: str = ""
    left: str = ""  # the time to the last step, as words
    losses: Sequence[float] | np.ndarray = ()
    figures: Mapping[str, str] = field(default_factory=dict)  # the name of each, and its value as words
    notes: Sequence[str] = ()  # the newest events


def columns_of(values: Sequence[float] | np.ndarray, width: int) -> np.ndarray:
    """Return at most this many means of values in order, without those that are not finite; NaN where there are none.

    Fewer values than half of that are repeated.
    """
    values = np.asarray(values, float)
    values = np.repeat(values, max(1, width // max(1, len(values))))
    parts = np.array_split(values, min(width, len(values))) if len(values) else []
    return np.array([np.mean(finite) if len(finite := part[np.isfinite(part)]) else math.nan for part in parts])


def curve(means: np.ndarray, rows: int = 1) -> list[str]:
    """Return lines of blocks that draw a curve, a column for each value; one that is not finite is blank."""
    known = means[np.isfinite(means)]
    low, high = (known.min(), known.max()) if len(known) else (0.0, 0.0)
    full = 8 * rows
    # At least one eighth, so that the lowest value can be seen.
    heights = [1 + round((full - 1) * ((mean - low) / (high - low) if high > low else 0.5))
               if math.isfinite(mean) else 0 for mean in means.tolist()]
    return ["".join(_BLOCKS[min(8, max(0, height - 8 * row))] for height in heights) for row in reversed(range(rows))]


def figures_of(line: JsonMapping) -> dict[str, str]:
    """Return the figures that a line of metrics has, as words."""
    shown = {"loss": "{:.4f}", "reward": "{:.4f}", "grad_norm": "{:.3g}", "learning_rate": "{:.3g}",
             "tokens_per_s": "{:,.0f}", "examples_per_s": "{:,.0f}", "mfu": "{:.1%}",
             "step_time_s": "{:.3g} s", "goodput": "{:.1%}"}
    names = {"tokens_per_s": "tokens/s", "examples_per_s": "examples/s",
             "step_time_s": "step time", "grad_norm": "gradient", "learning_rate": "rate"}
    found = {names.get(key, key): text.format(line[key]) for key, text in shown.items() if _is_number(line.get(key))}
    if "loss" in line and not _is_number(line["loss"]):
        found = {"loss": "not finite", **found}
    if _is_number(line.get("data_wait_s")):
        found["data wait"] = f"{1000 * line['data_wait_s']:.1f} ms"
    return found


def note(event: JsonMapping) -> str:
    """Return an event as a line of text, without control characters."""
    then = event.get("time")
    at = time.strftime("%H:%M:%S ", time.localtime(then)) if _is_number(then) and abs(then) < 1e11 else ""
    about = " ".join(f"{key}={_short(value)}" for key, value in event.items() if key not in _ABOUT)
    return plain(f"{at}{event.get('kind')} {about}".rstrip()[:500])


def panel(reading: Reading, width: int, rows: int = 2, notes: int = 1) -> Any:
    """Return what rich draws of a run, so many columns wide.

    Args:
        reading: the run.
        width: columns.
        rows: lines of the curve.
        notes: lines of events at most.
    """
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    inside = width - 4
    lines = [_bar(reading, inside), *(_curve(reading.losses, inside, rows) if len(reading.losses) else [])]
    lines += _columns(reading.figures, inside)
    shown = list(reading.notes)[-notes:] if notes else []
    lines += [Text(plain(line), style="dim", no_wrap=True, overflow="ellipsis") for line in shown]
    title, room = plain(reading.title), max(8, width - 8 - len(reading.state))
    title = Text(title if len(title) <= room else f"…{title[1 - room:]}", "bold")
    if reading.state:
        title.append(f"  {reading.state}", STYLES.get(reading.state, ""))
    return Panel(Group(*lines), title=title, title_align="left", width=width)


def _bar(reading: Reading, width: int) -> Any:
    """Return the line that says how far a run is."""
    from rich.text import Text

    share = min(1.0, reading.step / reading.last_step) if reading.last_step else 0.0
    words = f" {reading.step:,}/{reading.last_step:,}  {share:.1%}" if reading.last_step else f" step {reading.step:,}"
    words += f"  {reading.left} left" if reading.left else ""
    room = max(0, width - len(words))
    done = round(room * share)
    return Text.assemble(("━" * done, "green"), ("━" * (room - done), "bright_black"), words)


def _curve(losses: Sequence[float] | np.ndarray, width: int, rows: int) -> list[Any]:
    """Return lines with the curve, and its highest and lowest value behind the first and the last one."""
    from rich.text import Text

    means = columns_of(losses, width - 8)
    known = means[np.isfinite(means)]
    labels = [""] * rows
    if len(known):
        labels[-1] = f"{known.min():.4g}"
        labels[0] = f"{known.max():.4g}"
    return [Text.assemble((line.ljust(width - 8), "cyan"), (f"{label:>8}", "dim"), no_wrap=True)
            for line, label in zip(curve(means, rows), labels, strict=True)]


def _columns(figures: Mapping[str, str], width: int) -> list[Any]:
    """Return lines of names and values in as many columns as there is room for."""
    from rich.text import Text

    cells, many, sizes = [(name, plain(words)) for name, words in figures.items()], 1, []
    for many in range(len(cells), 0, -1):
        sizes = [tuple(max(map(len, part)) for part in zip(*cells[column::many], strict=True))
                 for column in range(many)]
        if sum(name + value + 4 for name, value in sizes) - 3 <= width:
            break
    lines = []
    for start in range(0, len(cells), many):
        line = Text(no_wrap=True, overflow="ellipsis")
        for (name, words), (size, value) in zip(cells[start:start + many], sizes, strict=False):
            line.append(f"{name:<{size}} ", "dim").append(f"{words:<{value}}   ")
        line.rstrip()
        lines.append(line)
    return lines


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"[:120]


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
