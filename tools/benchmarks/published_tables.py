"""The tables of docs/planner-published.md, made from the rows and the recorded predictions."""

import re
from collections.abc import Callable

from jaxtrain.base.narrow_formats import BLOCKS
from tools.benchmarks import published_rows
from tools.benchmarks.published_predictions import Answer, summary
from tools.benchmarks.published_rows import ROOT

PAGE = ROOT / "docs" / "planner-published.md"
_PLACE = re.compile(r"(<!-- rendered: published (\w+) -->\n)(?:.*?)(<!-- end -->)", re.DOTALL)
GROUPS: dict[str, Callable[[Answer], str]] = {
    "half": lambda one: one.row.half, "source": lambda one: one.row.source.partition(",")[0],
    "target": lambda one: one.row.chip, "release": lambda one: f"{one.row.system} {one.row.release}".strip(),
    "precision": lambda one: one.row.precision,
    "layout": lambda one: layout(one), "sequence": lambda one: length(one.row.seq_len),
    "program": lambda one: program(one)}
LONG = 4096  # tokens of a row, beyond which attention's kernel decides


def layout(one: Answer) -> str:
    """Return which kinds of axes its mesh has."""
    mesh = one.row.mesh
    found = [axis for axis in ("stage", "expert", "tensor", "context") if mesh.get(axis, 1) > 1]
    return " + ".join(found) or "data, fsdp"


def length(tokens: int) -> str:
    """Return the class of a row's length."""
    return "up to 4,096" if tokens <= 4096 else "8,192" if tokens <= 8192 else "more"


def program(one: Answer) -> str:
    """Return in what the program of a row is known to differ from jaxtrain's, by what the row says of itself."""
    row = one.row
    if row.mesh.get("stage", 1) > 1:
        return "other pipeline"
    if one.line.get("experts"):
        return "other experts" if row.precision in BLOCKS else "alike, experts"
    return "other attention" if row.system == "llm-foundry" and row.seq_len > LONG else "alike, dense"


def by(kind: str, found: list[Answer]) -> str:
    """Return the table of errors by one of GROUPS, and by whether rows are held out."""
    told = [one for one in found if not one.refused]
    lines = [f"| {kind} | rows | median error | bias | within 20 % | inside the interval | held out: rows | median | "
             "within 20 % |", "|---|---|---|---|---|---|---|---|---|"]
    for name in sorted({GROUPS[kind](one) for one in told}):
        mine = [one for one in told if GROUPS[kind](one) == name]
        out = [one for one in mine if one.row.half == "held out"]
        lines.append(f"| {name} | {_cells(mine)} | {len(out)} | {_short(out)} |")
    if kind == "half":
        lines.append(f"| all | {_cells(told)} | | | |")
    return "\n".join(lines)


def _cells(found: list[Answer]) -> str:
    s = summary(found)
    inside = "" if s["inside"] != s["inside"] else f"{s['inside']:.0%}"
    return f"{s['rows']:.0f} | {s['median']:.1%} | {s['bias']:+.1%} | {s['near']:.0%} | {inside}"


def _short(found: list[Answer]) -> str:
    if not found:
        return "|"
    s = summary(found)
    return f"{s['median']:.1%} | {s['near']:.0%}"


def all_rows(found: list[Answer]) -> str:
    """Return the table of all rows with a prediction."""
    lines = ["| run | sequence | batch | layout | precision | remat | published tokens/s/device | predicted | error | "
             "half | assumed |", "|---|---|---|---|---|---|---|---|---|---|---|"]
    for one in found:
        row = one.row
        if one.refused:
            continue
        mesh = ", ".join(f"{axis} {size}" for axis, size in row.mesh.items())
        fits = "" if one.line["fits"] else ", does not fit"
        lines.append(f"| {row.name} | {row.seq_len} | {row.global_batch} | {mesh} | {row.precision} | {row.remat} | "
                     f"{one.published:,.0f} | {one.predicted:,.0f}{fits} | {one.error:+.1%} | {row.half} | "
                     f"{row.assumed} |")
    return "\n".join(lines)


def refused(found: list[Answer]) -> str:
    """Return the table of rows of which nothing is predicted, with what the planner says."""
    lines = ["| run | what the planner says |", "|---|---|"]
    lines += [f"| {one.row.name} | {one.refused.replace('|', '/')} |" for one in found if one.refused]
    return "\n".join(lines)


def sources() -> str:
    """Return the list of sources."""
    lines = ["| source | rows | as of |", "|---|---|---|"]
    for path in sorted(published_rows.FOLDER.glob("*.jsonl")):
        first = published_rows.header(path)
        count = sum(1 for _ in published_rows.of_source(path))
        name = f"[{first['source']}]({first['address']})" if "://" in first["address"] else first["source"]
        lines.append(f"| {name} | {count} | {first['read']} |")
    return "\n".join(lines)


def rendered(page: str, found: list[Answer]) -> str:
    """Return the page with its tables made anew."""
    def table(kind: str) -> str:
        if kind in GROUPS:
            return by(kind, found)
        return {"rows": lambda: all_rows(found), "refused": lambda: refused(found), "sources": sources}[kind]()

    return _PLACE.sub(lambda place: f"{place[1]}{table(place[2])}\n{place[3]}", page)
