"""Write a plan as one self-contained page: the best layout, why it wins, the ranking, and where memory and time go."""

import shlex
from collections import Counter
from html import escape
from pathlib import Path

from jaxtrain.config.load import diff, load_config
from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError
from jaxtrain.pages.page_parts import document, facts, fragment, html_table, paragraph
from jaxtrain.plan.cost.time import said
from jaxtrain.plan.estimate import Estimate
from jaxtrain.plan.report import scaling
from jaxtrain.plan.report.bars import Bar, Look, chart
from jaxtrain.plan.report.curves import curves
from jaxtrain.plan.report.reasons import duration, reasons
from jaxtrain.plan.report.table import Choice, Found, keys, shown
from jaxtrain.plan.targets import gigabytes

HIDDEN = "hidden: the same collective, at no cost"


def write(found: Found, path: str | Path, source: str, top: int = 10, tokens: float = 1e12) -> None:
    """Write the page to a file; `source` is the FILE[:variant] of the config."""
    writable(path)
    text = page(found, source, load_config(source), top, tokens)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError("--output", f"{path} cannot be written ({error.strerror})", "name another file") from error


def writable(path: str | Path, flag: str = "--output") -> None:
    """Raise a UserError if the file of this flag cannot be written, before the search rather than after it."""
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        raise UserError(flag, f"{path} cannot be written", "name a file in an existing folder")


def page(found: Found, source: str, base: Config, top: int = 10, tokens: float = 1e12) -> str:
    """Return the page: all layouts as tables, and bars for the first `top`; `base` is the config of `source` alone."""
    target, data = found.target, found.config.data
    file, _, variant = source.partition(".py:")
    name = f"{Path(file).stem}{f' ({variant})' if variant else ''} on {found.devices:,} × {target.name}"
    parts = [f"<h1>Training plan: {escape(name)}</h1>", paragraph(
        f"Steps of {data.global_batch_size:,} rows of {data.seq_len:,} tokens, config {source}. Predicted from the "
        f"traced step and the target's figures ({target.source}); nothing was run.", "soft"),
        *_winner(found, command(found.best, source, base) if found.best else "", tokens),
        "<h2>Layouts that fit, fastest first</h2>", _ranking(found, tokens), *_time(found, top), *_memory(found, top),
        *_efficiency(found), *_others(found)]
    return document(f"Training plan: {name}", parts)


def communication(guess: Estimate) -> dict[str, float]:
    """Return the seconds of every collective of a step that computation does not hide."""
    names = {*guess.time.hidden, *(said(kind, axes) for kind, axes in guess.talked)}
    return {name: seconds for name, seconds in guess.time.parts.items() if name in names}


def in_notebook(found: Found, top: int = 5, tokens: float = 1e12) -> str:
    """Return the same for a cell of a notebook: of the first `top` layouts, without those that do not fit."""
    best = keys(found, found.best) if found.best else ""
    return fragment([*_winner(found, best, tokens), "<h2>Layouts that fit, fastest first</h2>",
                     _ranking(found, tokens, top), *_time(found, top), *_memory(found, top)])


def _winner(found: Found, use: str, tokens: float) -> list[str]:
    """`use`: the command or the keys that choose the best layout."""
    if found.best is None:
        least = f" {found.least[1]} alone need {found.least[0]} devices." if found.least else ""
        return ["<h2>Nothing fits</h2>", paragraph(f"No layout fits {found.devices} × {found.target.name}.{least}")]
    e = found.best.estimate
    exposed = sum(communication(e).values())
    figures = {"time of a step": duration(e.seconds),
               **({"80 % interval": e.interval_said} if e.interval else {}),
               **({"rates": e.rates_said} if e.rates_said else {}),
               "tokens/s": f"{e.tokens_per_second:,.0f}",
               **({"MFU": e.mfu_said} if e.mfu_said else {}),
               "memory of a device": f"{gigabytes(e.bytes)} of {gigabytes(e.target.room)} GB",
               "computation": f"{1 - exposed / e.seconds:.1%}", "exposed communication": f"{exposed / e.seconds:.1%}",
               f"{tokens:.3g} tokens take": f"{e.days(tokens):,.1f} days",
               f"at ${e.target.price:g} a device and hour": f"${e.cost(tokens):,.0f}"}
    if e.host:
        figures["in the hosts, for each device"] = f"{gigabytes(e.host)} GB"
    return ['<section class="card">', f'<p class="layout">{escape(f"{found.best}")}</p>', facts(figures),
            "<h3>Train with it</h3>", f'<pre class="command">{escape(use)}</pre>', "<h3>Why this one</h3>",
            '<ul class="reasons">', *(f"<li>{escape(reason)}</li>" for reason in reasons(found)), "</ul></section>"]


def _ranking(found: Found, tokens: float, top: int | None = None) -> str:
    pareto = {id(choice) for choice in found.pareto()}
    rows = []
    for number, choice in enumerate(found.fitting[:top], 1):
        e = choice.estimate
        exposed = sum(communication(e).values())
        rows.append((f"{number}{'*' if id(choice) in pareto else ''}", f"{choice}", gigabytes(e.bytes),
                     duration(e.seconds), duration(e.seconds - exposed), _some(exposed), _some(e.time.hidden.total()),
                     f"{e.tokens_per_second:,.0f}", e.mfu_said,
                     f"{e.days(tokens):,.1f}", f"{e.cost(tokens):,.0f}"))
    head = ("", "layout", "memory, GB", "step", "computation", "exposed", "hidden", "tokens/s", "MFU", "days",
            "cost, $")
    return html_table(head, rows, 2) + (paragraph(
        "* No other is both faster and smaller. A step is computation plus exposed communication; hidden communication "
        f"passes behind computation and costs no time. Days and cost are of {tokens:.3g} tokens.", "soft")
        if rows else "")


def _time(found: Found, top: int) -> list[str]:
    best = [(f"{choice}", choice.estimate) for choice in found.fitting[:top]]
    if not best:
        return []
    bars = [Bar(name, e.time.parts, e.time.hidden) for name, e in best]
    talk = [Bar(name, Counter(communication(e)), e.time.hidden) for name, e in best]
    warm = {name for bar in talk for name in (*bar.parts, *bar.hidden)}
    look = Look.of(bars, warm, ("Computation", "Communication, by collective and mesh axis"), duration)
    page = ["<h2>Where the time of a step goes</h2>", paragraph(
        "Solid parts add up to the step. Hatched ones are communication hidden behind computation, to the same scale."),
        chart(bars, look, hidden=HIDDEN)]
    if any(bar.parts.total() or bar.hidden for bar in talk):
        page += ["<h2>Communication alone</h2>", paragraph(
            "The same exposed (solid) and hidden (hatched) communication, to a scale of its own."),
            chart(talk, look.only(warm), hidden=HIDDEN)]
    return page


def _memory(found: Found, top: int) -> list[str]:
    best, large = found.fitting[:top], found.too_large[:3 if found.fitting else top]
    if not (best or large):
        return []
    bars = [Bar(f"{choice}{phase and f', answering ({phase})'}", parts) for choice in (*best, *large)
            for phase, parts in (("", choice.estimate.memory), *choice.estimate.answering.items())]
    limits = [("what a program may use", found.target.room), ("what a device has", found.target.memory)]
    look = Look.of(bars, {"parameters", "optimizer", "frozen parameters", "averaged parameters",
                          "what compression lost", "dense weights and masks"},
                   ("Activations, gradients and buffers", "State, kept between steps"),
                   lambda size: f"{gigabytes(size)} GB")
    unfit = f", then the {len(large)} smallest that do not" if large else ""
    answers = " and of each phase of answering" if found.config.rl.prompts else ""
    return ["<h2>Where the memory of a device goes</h2>", paragraph(
        f"At the worst moment of a step{answers}: the first {len(best)} that fit{unfit}."),
        chart(bars, look, limits if found.target.usable < 1 else limits[1:])]


def _efficiency(found: Found) -> list[str]:
    series = scaling.scaled(found)
    if not series:
        return []
    xs = sorted({point.devices for points in series.values() for point in points})
    mfu, speed, rows = {}, {}, []
    for name, points in series.items():
        fitting = [(point, point.choice.estimate) for point in points if point.choice]
        mfu[name] = {point.devices: e.mfu for point, e in fitting if e.useful}
        speed[name] = {point.devices: e.tokens_per_second / point.devices for point, e in fitting}
        for point in points:
            e = point.choice.estimate if point.choice else None
            numbers = (f"{e.mfu:.1%}" if e.useful else "", f"{e.tokens_per_second / e.devices:,.0f}",
                       duration(e.seconds), gigabytes(e.bytes)) if e else ("", "", "", "")
            rows.append((name, f"{point.choice}" if point.choice else f"excluded: {point.why}", f"{point.devices:,}",
                         f"{point.batch:,}", *numbers))
    return ["<h2>Other numbers of devices</h2>", paragraph(
        f"The fastest layout ({found.best}) at a quarter to four times as many devices, with data or fsdp multiplied, "
        f"whichever is then faster; nothing else of the mesh changes, so other layouts may be faster there. "
        f"“{scaling.SAME}”: {found.config.data.global_batch_size:,} rows a step, accumulated in fewer or more parts "
        f"as there are more or fewer devices; “{scaling.ALONG}”: the batch grows and shrinks with the devices."),
        '<div class="pair">', curves("MFU", xs, mfu, percent=True),
        curves("tokens/s a device", xs, speed, percent=False), "</div>",
        html_table(("batch", "layout", "devices", "rows", "MFU", "tokens/s a device", "step", "memory, GB"), rows, 2)]


def _others(found: Found) -> list[str]:
    reasons_: dict[str, list[str]] = {}
    for overrides, why in found.refused:
        reasons_.setdefault(why, []).append(shown(overrides))
    return ["<h2>Too large</h2>",
            html_table(("layout", "why"), [(f"{choice}", found.why(choice)) for choice in found.too_large], 2),
            "<h2>Not searched in detail</h2>",
            html_table(("why", "layouts"), [(why, "; ".join(layouts)) for why, layouts in reasons_.items()], 2)]


def _some(seconds: float) -> str:
    return duration(seconds) if seconds else "0"


def command(choice: Choice, source: str, base: Config) -> str:
    """Return the command that trains with exactly this layout; `base` is the config that `source` alone gives.

    Every key that differs is in it: those of the layout, and those that were given to the planner.
    """
    changed = diff(choice.estimate.config, base)
    words = [f"--config={source}", *(f"--config.{key}={value}" for key, (value, _) in changed.items())]
    return " ".join(["python -m jaxtrain.main", *map(shlex.quote, words)])
