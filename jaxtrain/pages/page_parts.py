"""The parts that self-contained pages have in common: the document around them, tables and paragraphs."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from jaxtrain.pages.style import STYLE

_LONGEST_WORD = 24  # characters; what is longer, such as a path, may be broken anywhere


def document(title: str, parts: Iterable[str]) -> str:
    """Return a whole page, which needs no network."""
    return "\n".join(['<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
                      '<meta name="viewport" content="width=device-width,initial-scale=1">',
                      f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>",
                      *parts, "</main></body></html>\n"])


def fragment(parts: Iterable[str]) -> str:
    """Return the same within a notebook, whose own style stays as it is."""
    style = STYLE.replace(":root{", ":scope{").replace("body{", ":scope{")
    return "\n".join([f'<div class="jaxtrain"><style>@scope (.jaxtrain){{{style}}}</style>', *parts, "</div>"])


def facts(named: Mapping[str, str]) -> str:
    """Return figures with their names, as many beside each other as there is room for."""
    return "\n".join(['<dl class="facts">', *(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>"
                                               for key, value in named.items()), "</dl>"])


def html_table(head: Sequence[str], rows: Sequence[Iterable[str]], words: int) -> str:
    """Return a table whose first `words` columns are text; on a phone each row becomes a block with its own labels."""
    def cell(i: int, text: str) -> str:
        label = "" if i < words else f' data-head="{escape(head[i])}"'
        names = ["text"] * (i < words) + ["rank"] * (i < words and not head[i])
        names += ["long"] * (i < words and max(map(len, text.split()), default=0) > _LONGEST_WORD)
        kind = f' class="{" ".join(names)}"' if len(names) > 1 else " class=text" if names else ""
        return f'<td role="cell"{kind}{label}>{escape(text)}</td>'

    if not rows:
        return "<p>None.</p>"
    titles = "".join(f'<th scope="col" role="columnheader"{" class=text" if i < words else ""}>{escape(title)}</th>'
                     for i, title in enumerate(head))
    return "\n".join(['<table class="wide" role="table">', f'<tr class="head" role="row">{titles}</tr>',
                      *(f'<tr role="row">{"".join(cell(i, text) for i, text in enumerate(row))}</tr>' for row in rows),
                      "</table>"])


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph; `kind`: its class in the style sheet."""
    return f"<p{f' class={kind}' if kind else ''}>{escape(text)}</p>"
