"""Drawings of schedules: in a terminal, as SVG and as PNG."""

import importlib
from collections.abc import Iterator
from html import escape
from pathlib import Path

from jaxtrain.errors import UserError, install_extra
from jaxtrain.parallel.schedules.schedule import Op, Schedule

# A 256-color background for the terminal, a fill for drawings; later chunks are darker.
TERMINAL = {"F": (153, 75, 33), "B": (157, 114, 71), "W": (223, 215, 178)}
FILL = {"F": ("#a6cee3", "#5b9bc8", "#2f6f9f"), "B": ("#b2df8a", "#7cbf4f", "#4f8f2a"),
        "W": ("#fddbae", "#f7b26a", "#d98a35")}
SIDE = 28  # of a cell in SVG, in pixels


def text(schedule: Schedule, *, colour: bool = False) -> str:
    """Return the schedule as text, one line per stage and one column per tick."""
    cells = [["+".join(map(str, row[stage])) for row in schedule.ticks] for stage in range(schedule.stages)]
    width = max(len(cell) for line in cells for cell in line)
    lines = []
    for stage, line in enumerate(cells):
        shown = [cell.ljust(width) if cell else "." + " " * (width - 1) for cell in line]
        if colour:
            shown = [f"\033[30;48;5;{_shade(TERMINAL, row[stage][0])}m{cell}\033[0m" if row[stage] else cell
                     for cell, row in zip(shown, schedule.ticks, strict=True)]
        lines.append(f"stage {stage:<{len(str(schedule.stages - 1))}}  " + " ".join(shown))
    return "\n".join(line.rstrip() for line in lines)


def _shade(shades: dict[str, tuple], op: Op) -> str | int:
    return shades[op.kind][min(op.chunk, 2)]


def _boxes(schedule: Schedule) -> Iterator[tuple[int, float, float, Op]]:
    """Yield (left, top, height, operation), in cells; operations of one tick are stacked."""
    for tick, row in enumerate(schedule.ticks):
        for stage, cell in enumerate(row):
            for i, op in enumerate(cell):
                yield tick, stage + i / len(cell), 1 / len(cell), op


def svg(schedule: Schedule) -> str:
    """Return an SVG with one square per stage and tick, which several operations share."""
    width, height = schedule.length * SIDE, schedule.stages * SIDE
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {width + 2} {height + 2}" width="{width + 2}" '
             f'font-family="sans-serif" font-size="10" text-anchor="middle">',
             f"<title>{escape(schedule.name)}</title>",
             f'<rect width="{width}" height="{height}" fill="#f4f4f4" stroke="#999"/>']
    for tick, top, tall, op in _boxes(schedule):
        x, y, tall = tick * SIDE, top * SIDE, tall * SIDE
        lines += [f'<rect x="{x}" y="{y:g}" width="{SIDE}" height="{tall:g}" fill="{_shade(FILL, op)}" stroke="#fff"/>',
                  f'<text x="{x + SIDE / 2:g}" y="{y + tall / 2 + 3.5:g}">{op}</text>']
    return "\n".join([*lines, "</svg>"])


def write_svg(schedule: Schedule, path: str | Path) -> None:
    """Write that drawing into a file."""
    _write(path, f"{svg(schedule)}\n".encode())


def write_png(schedule: Schedule, path: str | Path) -> None:
    """Write the same drawing as a PNG, with matplotlib."""
    try:
        figures, patches = map(importlib.import_module, ("matplotlib.figure", "matplotlib.patches"))
    except ImportError as error:
        raise UserError("--output", "matplotlib is not installed",
                        f"{install_extra('plots')}, or use --output") from error
    figure = figures.Figure(figsize=(max(2, 0.35 * schedule.length), max(1, 0.35 * schedule.stages)))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, schedule.length), ylim=(schedule.stages, 0))
    axes.axis("off")
    for tick, top, tall, op in _boxes(schedule):
        axes.add_patch(patches.Rectangle((tick, top), 1, tall, facecolor=_shade(FILL, op), edgecolor="w"))
        axes.text(tick + 0.5, top + tall / 2, str(op), ha="center", va="center", fontsize=6)
    _write(path, b"")  # reports a path that cannot be written as a user error
    figure.savefig(path, dpi=150, format="png")


def _write(path: str | Path, content: bytes) -> None:
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise UserError(str(path), f"it cannot be written ({error.strerror})", "name a file in an existing directory"
                        ) from error
