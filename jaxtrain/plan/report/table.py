"""Show the layouts of a search: their ranking as text, and one layout explained part by part."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from jaxtrain.base.annotations import JsonObject
from jaxtrain.config.schema import Config
from jaxtrain.plan.cost import links
from jaxtrain.plan.cost.time import said
from jaxtrain.plan.estimate import Estimate
from jaxtrain.plan.report.answers_room import GATHER, answers_at_once, room_for_answers
from jaxtrain.plan.targets import Target, gigabytes

WIDTHS = (3, 68, 7, 9, 12, 6, 8, 14)


@dataclass(frozen=True)
class Choice:
    """One layout: the keys that define it, and its estimate."""

    overrides: dict[str, Any]
    estimate: Estimate

    @property
    def mesh(self) -> dict[str, int]:
        """The keys among the overrides that define the mesh."""
        return {key: value for key, value in self.overrides.items() if key.startswith("mesh.")}

    def __str__(self) -> str:
        return shown(self.overrides)


@dataclass
class Found:
    """The result of a search."""

    config: Config
    target: Target
    devices: int
    fitting: list[Choice] = field(default_factory=list)  # fastest first
    too_large: list[Choice] = field(default_factory=list)  # smallest first
    refused: list[tuple[dict[str, Any], str]] = field(default_factory=list)  # layouts that were not traced, and why
    least: tuple[int, str] | None = None  # how many devices could hold the state, if these cannot
    otherwise: Choice | None = None  # the best in another precision; a person must choose it, because numbers change

    @property
    def best(self) -> Choice | None:
        """The fastest layout that fits, or None."""
        return self.fitting[0] if self.fitting else None

    def pareto(self) -> list[Choice]:
        """Return the layouts that no other beats in both time and memory; for equal device counts, time is cost."""
        kept: list[Choice] = []
        for choice in self.fitting:  # each is slower than those before it, and stays if it is smaller
            if not kept or choice.estimate.bytes < kept[-1].estimate.bytes:
                kept.append(choice)
        return kept

    def why(self, choice: Choice) -> str:
        """Explain by how much a layout is too large, its largest part, and what would help."""
        guess = choice.estimate
        if guess.bytes <= guess.target.room:
            return f"{gigabytes(guess.host)} of {gigabytes(guess.target.host_room)} GB for each device in the hosts"
        phase, parts = guess.worst
        (part, size), *_ = parts.most_common(1)
        when = f" while answering ({phase})" if phase else ""
        text = f"{gigabytes(guess.bytes)} of {gigabytes(guess.target.room)} GB{when}; {part} {gigabytes(size)} GB"
        smaller = [other for other in (*self.fitting, *self.too_large)
                   if other.mesh == choice.mesh and other.estimate.bytes < guess.bytes]
        if smaller:
            best = min(smaller, key=lambda other: other.estimate.bytes)
            keys = " ".join(f"{key.partition('.')[2]}={value}" for key, value in best.overrides.items()
                            if choice.overrides.get(key) != value)
            text += f"; {keys} saves {gigabytes(guess.bytes - best.estimate.bytes)} GB"
        fewer = answers_at_once(guess)
        return f"{text}; {fewer} would fit" if fewer else text

    def __str__(self) -> str:
        return table(self)

    def add(self, choice: Choice) -> None:
        """Add a layout to those that fit or those that are too large."""
        (self.fitting if choice.estimate.fits else self.too_large).append(choice)

    def sort(self) -> None:
        """Sort the layouts: fitting ones by time, too large ones by memory; drop those that only waste memory.

        They differ from another only in activation checkpointing and accumulation, and are neither faster nor smaller.
        """
        self.fitting.sort(key=lambda choice: (choice.estimate.seconds, choice.estimate.bytes))
        kept, smallest = [], dict[Any, float]()
        for choice in self.fitting:
            rest = frozenset((choice.overrides | {"train.remat": "", "train.accumulation": 0}).items())
            if choice.estimate.bytes < smallest.get(rest, float("inf")):
                smallest[rest] = choice.estimate.bytes
                kept.append(choice)
        self.fitting = kept
        self.too_large.sort(key=lambda choice: choice.estimate.bytes)


def shown(overrides: JsonObject) -> str:
    """Format the keys of a layout, without those that change nothing."""
    always = ("train.remat", "optimizer.offload", GATHER)
    said = [f"{key.partition('.')[2]}={value}" for key, value in overrides.items()
            if value not in (0, 1) or key in always or (key, value) == ("optimizer.zero_stage", 1)]
    return " ".join(said) or "one device"


def table(found: Found, top: int = 10, tokens: float = 1e12) -> str:
    """Format the ranking, which layouts are best in time or memory, and which were too large and why."""
    if not found.fitting:
        lines = [f"nothing fits {found.devices} x {found.target.name}"]
        if found.least:
            count, alone = found.least
            lines[0] += f": {alone} alone need {count} devices"
    else:
        lines = [_row("", "layout", "GB", "step", "tokens/s", "MFU", "days", "cost")]
        pareto = {id(choice) for choice in found.pareto()}
        for number, choice in enumerate(found.fitting[:top], 1):
            e = choice.estimate
            lines.append(_row(f"{number}{'*' if id(choice) in pareto else ''}", str(choice), gigabytes(e.bytes),
                              f"{e.seconds:.3g} s", f"{e.tokens_per_second:,.0f}", e.mfu_said,
                              f"{e.days(tokens):,.1f}", f"${e.cost(tokens):,.0f}"))
        without = ", without the time in which answers are made" if found.config.rl.prompts else ""
        lines += ["", f"days and cost: of {tokens:.3g} tokens, at ${found.target.price:g} a device and hour{without}. "
                  "*: no other is both faster and smaller. The first:", "", f"  {keys(found, found.fitting[0])}", "",
                  explained(found.fitting[0].estimate)]
    if found.fitting and found.otherwise:
        e = found.otherwise.estimate
        lines += ["", f"With train.precision={e.config.train.precision} instead the first would take {e.seconds:.3g} s "
                  f"and {gigabytes(e.bytes)} GB{'' if e.fits else ', which does not fit'}; other numbers, too."]
    if found.too_large:
        lines += ["", f"{many(len(found.too_large), 'layout is', 'layouts are')} too large, such as"]
        lines += [f"  {choice}: {found.why(choice)}" for choice in found.too_large[:5]]
    if found.refused:
        lines += ["", f"{many(len(found.refused), 'mesh was', 'meshes were')} not searched closely or cannot be, such"
                  " as"]
        lines += [f"  {shown(overrides)}: {why}" for overrides, why in found.refused[:5]]
    return "\n".join(lines)


def keys(found: Found, choice: Choice) -> str:
    """Return the flags for this layout, besides those of the config that was searched."""
    said, before = choice.estimate.config.to_dict(), found.config.to_dict()
    changed = {key: said[key.partition(".")[0]][key.partition(".")[2]] for key in choice.overrides}
    usual = {key: before[key.partition(".")[0]][key.partition(".")[2]] for key in choice.overrides}
    return " ".join(f"--config.{key}={value}" for key, value in changed.items()
                    if value != usual[key] or (found.config.mesh.auto and value != 1))


def explained(e: Estimate) -> str:
    """Explain the memory and time of one layout by part, and its communication by link."""
    sizes = {axis: size for axis, size in e.mesh.items() if size > 1}
    lines = _memory_lines("memory of a device", e.memory, e)
    if e.host:
        lines.append(f"  {'in addition, in the hosts':<24}{gigabytes(e.host):>8} GB")
    if e.answering:
        phase, parts = max(e.answering.items(), key=lambda one: one[1].total())
        lines += _memory_lines(f"memory while it answers prompts ({phase})", parts, e)
        lines += [f"  ({other}: {gigabytes(size.total())} GB)" for other, size in e.answering.items() if other != phase]
    if e.worst[0] and not e.fits:
        lines.append(f"answers do not fit: {room_for_answers(e)}")
    without = ", without making the answers that it is trained on" if e.answering else ""
    lines.append(f"time of a step{without}: {e.seconds:.4g} s, {e.tokens_per_second:,.0f} tokens/s" +
                 (f", MFU {e.mfu_said}" if e.mfu_said else ""))
    lines += [f"  80 % interval, from runs that were timed: {e.interval_said}"] if e.interval else []
    lines += [f"  {e.rates_said}"] if e.rates_said else []
    if e.documents > 1 and e.mfu_said:
        lines.append(f"  with {e.documents} documents in a row, between which kernels skip pairs that MFU counts: MFU "
                     f"as computed {e.mfu_computed:.1%}")
    lines += [f"  {name:<40}{milliseconds(seconds):>10} ms" for name, seconds in e.time.parts.most_common()
              if seconds > 0.002 * e.seconds]
    lines.append(f"  {'(hidden behind computation, at no cost':<40}{milliseconds(e.time.hidden.total()):>10} ms)")
    if e.talked:
        mesh = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        mesh += f", attention over context by {e.strategy}" if e.strategy else ""
        lines.append(f"collectives of a step, results on one device, mesh {mesh}:")
        lines += [f"  {said(kind, axes):<40}{gigabytes(size):>10} GB  "
                  f"{links.crossed(axes, e.target, e.mesh).name}"
                  for (kind, axes), size in e.talked.most_common() if size > 1e-3 * e.talked.total()]
    return "\n".join(lines)


def _memory_lines(what: str, parts: Counter, e: Estimate) -> list[str]:
    room, size = e.target.room, parts.total()
    verdict = "" if size <= room and e.host <= e.target.host_room else ", which does not fit"
    return [f"{what}: {gigabytes(size)} of {gigabytes(room)} GB for programs{verdict}",
            *(f"  {name:<24}{gigabytes(part):>8} GB" for name, part in parts.most_common() if part > 0.002 * size)]


def many(number: int, one: str, more: str) -> str:
    """Return a number with the noun that fits it."""
    return f"{number} {one if number == 1 else more}"


def milliseconds(seconds: float) -> str:
    """Format milliseconds with at least two digits, since parts of a tiny model's step are far below one."""
    return f"{1e3 * seconds:.2f}" if seconds >= 1e-3 else f"{1e3 * seconds:.2g}"


def _row(*cells: str) -> str:
    return " ".join(cell.ljust(width) if i < 2 else cell.rjust(width)
                    for i, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))).rstrip()


def figures_of(guess: Estimate, tokens: float) -> dict[str, Any]:
    """Return the prediction for a layout, and what a run of so many tokens takes with it, as JSON has it."""
    return {"mesh": guess.mesh, "context_strategy": guess.strategy,
            "accumulation": guess.config.train.accumulation, "remat": guess.config.train.remat,
            "precision": guess.config.train.precision, "devices": guess.devices, "target": guess.target.name,
            "fits": guess.fits, "bytes": guess.bytes, "host_bytes": guess.host, "memory": dict(guess.memory),
            "seconds": guess.seconds, "seconds_interval": guess.interval,
            "rates_of": guess.target.rates_of or guess.target.name, "tokens_per_s": guess.tokens_per_second,
            "mfu": guess.mfu if guess.useful else None,
            "mfu_computed": guess.mfu_computed if guess.useful else None, "days": guess.days(tokens),
            "cost": guess.cost(tokens) if guess.target.price else None}
