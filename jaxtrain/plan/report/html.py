"""Write a plan as one self-contained page: the ranking, where memory and time go, and other numbers of devices."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from jaxtrain.errors import UserError
from jaxtrain.plan.estimate import gigabytes
from jaxtrain.plan.report import scaling
from jaxtrain.plan.report.device_drawing import bars, curves
from jaxtrain.plan.report.table import Found, shown

GB, MS = 1e9, 1e-3
STYLE = """body{font:15px/1.45 sans-serif;color:#222;max-width:60em;margin:2em auto;padding:0 1em}
h2{margin-top:2em}table{border-collapse:collapse;font-size:13px;width:100%}td,th{padding:3px 8px;text-align:right;
border-bottom:1px solid #ccc;vertical-align:top}.text{text-align:left;overflow-wrap:anywhere}
svg{max-width:100%;height:auto}@media print{body{font-size:11px;max-width:none;margin:0}table{font-size:10px}
svg,tr{break-inside:avoid}h2{break-after:avoid}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}"""


def write(found: Found, path: str | Path, title: str, top: int = 10, tokens: float = 1e12) -> None:
    """Write the page to a file."""
    writable(path)
    text = page(found, title, top, tokens)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError("--html", f"{path} cannot be written ({error.strerror})", "name another file") from error


def writable(path: str | Path) -> None:
    """Raise a UserError if the page cannot be written, before the search rather than after it."""
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        raise UserError("--html", f"{path} cannot be written", "name a file in an existing folder")


def page(found: Found, title: str, top: int = 10, tokens: float = 1e12) -> str:
    """Return the page with all layouts as tables, and bars for the first `top`."""
    target, data = found.target, found.config.data
    best, large = found.fitting[:top], found.too_large[:3 if found.fitting else top]
    name = escape(f"{title} on {found.devices} × {target.name}")
    parts = [f"<h1>{name}</h1>", _words(
        f"Predicted from the traced step and the target's figures ({target.source}), for steps of "
        f"{data.global_batch_size:,} rows of {data.seq_len:,} tokens. Days and cost are of {tokens:.3g} tokens, at "
        f"${target.price:g} an hour for a device."),
        "<h2>Layouts that fit, fastest first</h2>", _ranking(found, tokens)]
    if best or large:
        limits = [("a program may use", target.room), ("a device has", target.memory)]
        parts += ["<h2>Memory of a device, by part</h2>", _words(
            f"At the worst moment of a step. The first {len(best)} that fit, then the {len(large)} smallest that do "
            "not."), bars([(f"{choice}", choice.estimate.memory) for choice in (*best, *large)], "GB", GB,
                                  limits if target.usable < 1 else limits[1:])]
    if best:
        parts += ["<h2>Time of a step, by part</h2>",
                  _words("Communication hidden behind computation costs nothing and is not drawn."),
                  bars([(f"{choice}", choice.estimate.time.parts) for choice in best], "ms", MS, []),
                  *_efficiency(found)]
    reasons: dict[str, list[str]] = {}
    for overrides, why in found.refused:
        reasons.setdefault(why, []).append(shown(overrides))
    parts += ["<h2>Too large</h2>",
              _table(("layout", "why"), [(f"{choice}", found.why(choice)) for choice in found.too_large], 2),
              "<h2>Not searched in detail</h2>",
              _table(("why", "layouts"), [(why, "; ".join(layouts)) for why, layouts in reasons.items()], 2)]
    return "\n".join(['<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
                      f"<title>{name}</title><style>{STYLE}</style></head><body>", *parts, "</body></html>\n"])


def _ranking(found: Found, tokens: float) -> str:
    pareto = {id(choice) for choice in found.pareto()}
    rows = []
    for number, choice in enumerate(found.fitting, 1):
        e = choice.estimate
        rows.append((f"{number}{'*' if id(choice) in pareto else ''}", f"{choice}", gigabytes(e.bytes),
                     f"{e.seconds:.3g}", f"{e.time.hidden / MS:,.1f}", f"{e.tokens_per_second:,.0f}", f"{e.mfu:.1%}",
                     f"{e.days(tokens):,.1f}", f"{e.cost(tokens):,.0f}"))
    head = ("", "layout", "memory, GB", "step, s", "hidden, ms", "tokens/s", "MFU", "days", "cost, $")
    return _table(head, rows, 2) + (_words("* No other is both faster and smaller.") if rows else "")


def _efficiency(found: Found) -> list[str]:
    series = scaling.scaled(found)
    xs = sorted({point.devices for points in series.values() for point in points})
    mfu, speed, rows = {}, {}, []
    for name, points in series.items():
        fitting = [(point, point.choice.estimate) for point in points if point.choice]
        mfu[name] = {point.devices: e.mfu for point, e in fitting}
        speed[name] = {point.devices: e.tokens_per_second / point.devices for point, e in fitting}
        for point in points:
            e = point.choice.estimate if point.choice else None
            numbers = (f"{e.mfu:.1%}", f"{e.tokens_per_second / e.devices:,.0f}", f"{e.seconds:.3g}",
                       gigabytes(e.bytes)) if e else ("", "", "", "")
            rows.append((name, f"{point.choice}" if point.choice else f"left out: {point.why}", f"{point.devices:,}",
                         f"{point.batch:,}", *numbers))
    return ["<h2>Other numbers of devices</h2>", _words(
        f"The fastest layout ({found.best}) at a quarter to four times as many devices, with data or fsdp multiplied, "
        f"whichever is then faster; nothing else of the mesh changes, so other layouts may be faster there. "
        f"“{scaling.SAME}”: {found.config.data.global_batch_size:,} rows a step, accumulated in fewer or more parts "
        f"as there are more or fewer devices; “{scaling.ALONG}”: the batch grows and shrinks with the devices."),
        curves("MFU", xs, mfu, percent=True), curves("tokens/s a device", xs, speed, percent=False),
        _table(("batch", "layout", "devices", "rows", "MFU", "tokens/s a device", "step, s", "memory, GB"), rows, 2)]


def _table(head: Iterable[str], rows: Sequence[Iterable[str]], words: int) -> str:
    """Return a table whose first `words` columns are text and the others numbers."""
    def line(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}{' class=text' if i < words else ''}>{escape(cell)}</{tag}>"
                                for i, cell in enumerate(cells)) + "</tr>"

    if not rows:
        return "<p>None.</p>"
    return "\n".join(["<table>", line(head, "th"), *(line(row, "td") for row in rows), "</table>"])


def _words(text: str) -> str:
    return f"<p>{escape(text)}</p>"
