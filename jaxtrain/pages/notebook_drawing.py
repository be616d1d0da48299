"""Objects that a notebook shows as a drawing and a terminal as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from jaxtrain.pages.page_parts import fragment


@dataclass(frozen=True)
class Drawing:
    """A drawing for a cell of a notebook, and the same in words."""

    html: str
    text: str

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


def grid(title: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[Cell]]]) -> str:
    """Return a table of coloured cells with a title; it fits a narrow screen by scrolling."""
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    lines = [f'<div class="scroll"><table class="grid">{caption}<tr><td></td>{head}</tr>']
    for name, cells in rows:
        shown = "".join(f'<td style="background:hsl({cell.colour * 67 % 360} 70% 55% / 35%)">{escape(cell.text)}'
                        f"{f'<small>{escape(cell.below)}</small>' if cell.below else ''}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{shown}</tr>')
    return "\n".join([*lines, "</table></div>"])
