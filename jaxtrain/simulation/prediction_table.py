"""Predictions as text: a table with a line for each choice, and a sentence for each number of devices."""

from collections.abc import Iterable, Sequence

from jaxtrain.observe.goodput import duration
from jaxtrain.simulation.predictions import Advice, Prediction, useful
from jaxtrain.simulation.published_runs import Case
from jaxtrain.simulation.replay import Replay

HEAD = ("devices", "a failure every", "snapshot every", "checkpoint every", "spares", "ETTR (10 to 90 %)", "saves",
        "lost work", "down", "gave up")


def lines(devices: int, advice: Advice) -> list[tuple[str, ...]]:
    """Return the rows of one number of devices: the tiers without spares, and the better one with spares."""
    bare = [one for one in advice.spares if one.setup.spares]
    return [row(devices, advice.mtbf, one) for one in [*advice.tiers, *bare]]


def row(devices: int, mtbf: float, one: Prediction) -> tuple[str, ...]:
    """Return a row of the table."""
    durations, checkpoint = one.setup.durations, one.setup.checkpoint
    step = durations.step + durations.data_wait

    def every(steps: int) -> str:
        return f"{steps:,} steps, {duration(steps * step)}" if steps else "none"

    return (f"{devices:,}", duration(mtbf), every(checkpoint.local_checkpoint_every), every(checkpoint.every),
            f"{one.setup.spares}", f"{one.middle:.1%} ({one.low:.1%} to {one.high:.1%})",
            f"{one.shares['checkpoint']:.1%}", f"{one.shares['lost_work']:.1%}",
            f"{sum(one.shares[name] for name in ('restart_gap', 'init', 'compile', 'restore')):.1%}",
            f"{one.gave_up:.1f}")


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, aligned."""
    found = [tuple(head), *map(tuple, rows)]
    widths = [max(len(line[i]) for line in found) for i in range(len(head))]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
            for line in found]
    return "\n".join([text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]])


def sentence(devices: int, advice: Advice) -> str:
    """Return the advice for so many devices, as a sentence."""
    best, bare = advice.best, advice.spares[0]
    checkpoint, slots = best.setup.checkpoint, best.setup.slots
    saves = f"checkpoint.every={checkpoint.every}"
    if checkpoint.local_checkpoint_every:
        saves = f"checkpoint.local_checkpoint_every={checkpoint.local_checkpoint_every} and {saves}"
    said = f"{devices:,} devices: {saves}"
    if not best.setup.spares:
        return f"{said}; spare machines would not do enough work for what they cost (predicted ETTR {best.middle:.1%})"
    gained = (best.middle - bare.middle) * slots
    spares = f"{best.setup.spares} spare machine{'s' * (best.setup.spares > 1)}"
    return (f"{said}; with {spares}, which do the work of {gained:,.1f} (predicted ETTR {best.middle:.1%}, "
            f"{bare.middle:.1%} without; {useful(best):.1%} of all machines do work that counts)")


def case_text(case: Case, found: dict[str, Prediction]) -> str:
    """Return what is predicted of a published run, beside what its report says."""
    shares = [one.effective for one in found.values()]
    rows = [(name, f"{one.effective:.1%}", f"{one.middle:.1%} ({one.low:.1%} to {one.high:.1%})",
             f"{one.failures:.0f}", f"{one.shares['lost_work']:.1%}") for name, one in found.items()]
    head = ("inputs", "productive share of all time", "ETTR (10 to 90 %)", "failures", "lost work")
    return "\n".join([f"published: {case.published}", grid(head, rows),
                      f"predicted: {min(shares):.1%} to {max(shares):.1%}", f"assumed: {case.assumed}"])


def replay_text(found: Replay) -> str:
    """Return how far the ledger of a simulated run is from that of the real one."""
    rows = [(name, f"{real:.1f}", f"{made:.1f}", f"{made / real - 1:+.1%}" if real else "-",
             f"{(made - real) / found.measured.life:+.2%}") for name, real, made in found.rows()[:-1]]
    last, real, made = found.rows()[-1]
    rows.append((last, f"{real:,.0f}", f"{made:,.0f}", f"{made / real - 1:+.1%}" if real else "-", ""))
    head = ("category", "measured, s", "simulated, s", "difference", "of the run's life")
    return "\n".join([
        grid(head, rows),
        f"{found.failures} failures; ETTR {found.measured.ettr:.1%} measured, {found.ettr[1]:.1%} simulated "
        f"({found.ettr[0]:.1%} to {found.ettr[2]:.1%}); categories differ by {found.misplaced:.1%} of the run's life "
        f"at most, those of a hundredth of it or more by {found.worst:.1%} of their seconds"])
