"""Objects that a notebook shows as a drawing and a terminal as text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from jaxtrain.errors import UserError
from jaxtrain.pages.page_parts import fragment


@dataclass(frozen=True)
class Drawing:
    """A drawing for a cell of a notebook, and the same in words."""

    html: str
    text: str
    svg: Callable[[], str]

    def save(self, path: str | Path) -> None:
        """Write the drawing into an SVG file."""
        if Path(path).suffix != ".svg":
            raise UserError("path", f"{Path(path).name} is not the name of an SVG file", "give one that ends in .svg")
        Path(path).write_text(f"{self.svg()}\n")

    def _repr_html_(self) -> str:
        return fragment([self.html])

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Cell:
    """A cell of a grid; those of one colour belong together."""

    text: str
    below: str = ""  # smaller
    colour: int = 0


@dataclass(frozen=True)
class Grid:
    """A table of coloured cells with a title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]

    def html(self) -> str:
        """Return it as HTML, which fits a narrow screen by scrolling."""
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in self.columns)
        lines = [f'<div class="scroll"><table class="grid">{caption}<tr><td></td>{head}</tr>']
        for name, cells in self.rows:
            shown = "".join(f'<td style="background:{fill(cell.colour)}">{escape(cell.text)}'
                            f"{f'<small>{escape(cell.below)}</small>' if cell.below else ''}</td>" for cell in cells)
            lines.append(f'<tr><th scope="row">{escape(name)}</th>{shown}</tr>')
        return "\n".join([*lines, "</table></div>"])


def fill(colour: int) -> str:
    """Return the colour of a cell; neighbouring numbers differ much."""
    return f"hsl({colour * 67 % 360} 70% 55% / 35%)"
