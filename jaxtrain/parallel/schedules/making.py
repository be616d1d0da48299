"""Builders of the papers' schedules, for any number of stages and micro-batches."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from jaxtrain.errors import UserError, nearest
from jaxtrain.parallel.schedules.schedule import KINDS, Cell, Op, Position, Schedule, straight, v_shape
from jaxtrain.parallel.schedules.schedule_checks import check_sizes, validate

NAMES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")

Place = Callable[[Op], bool]


def make(name: str, stages: int, microbatches: int, chunks: int = 1, *, paired: bool = False,
         latency: int = 1) -> Schedule:
    """Build and validate the schedule of this name."""
    if name not in NAMES:
        raise UserError("pipeline.schedule", f"{name!r} is not a schedule", nearest(name, NAMES))
    check_sizes(stages, microbatches, chunks, latency)
    if wrong := wrong_chunks(name, chunks):
        raise UserError("pipeline.chunks", *wrong)
    if paired and name.startswith("zb_"):
        raise UserError("pipeline.paired", f"{name} has one operation per tick", "leave it out, or use 1f1b")
    if name == "zb_v":
        return validate(_zb_v(Schedule(name, stages, microbatches, chunks, v_shape(stages), (), latency)))
    empty = Schedule(name, stages, microbatches, chunks, straight(stages, chunks), (), latency)
    return validate(_in_order(empty, paired))


def wrong_chunks(name: str, chunks: int) -> tuple[str, str] | None:
    """Return why a schedule cannot have this many chunks per stage, and what to do about it; None if it can."""
    if name == "interleaved" and chunks < 2:
        return f"interleaved has several chunks per stage, not {chunks}", "set it to 2 or more, or use 1f1b"
    if name in ("1f1b", "zb_h1") and chunks != 1:
        return f"{name} has 1 chunk per stage, not {chunks}", "set it to 1, or use interleaved"
    if name == "zb_v" and chunks != 2:
        return f"zb_v has 2 chunks per stage, not {chunks}", "set it to 2"
    return None


def forward_only(stages: int, microbatches: int, chunks: int = 1, *, latency: int = 1,
                 position: Position | None = None) -> Schedule:
    """Build a schedule of forwards only, for evaluation: what has entered leaves before more enters."""
    check_sizes(stages, microbatches, chunks, latency)
    position = position or straight(stages, chunks)
    done = [[0] * chunks for _ in range(stages)]

    def turn(stage: int, place: Place) -> None:
        for chunk in sorted(range(chunks), key=position[stage].__getitem__, reverse=True):
            if done[stage][chunk] < microbatches and place(Op("F", done[stage][chunk], chunk)):
                done[stage][chunk] += 1
                return

    return validate(_fill(Schedule("forward_only", stages, microbatches, chunks, position, (), latency), turn, "F"))


def _fill(empty: Schedule, turn: Callable[[int, Place], None], kinds: str) -> Schedule:
    """Fill a schedule tick by tick: each stage in turn places operations, until all are placed.

    `turn(stage, place)` offers operations; `place` accepts one whose inputs are ready and returns whether it did.
    """
    at: dict[tuple[int, Op], int] = {}
    ticks: list[tuple[Cell, ...]] = []
    total = len(kinds) * empty.stages * empty.microbatches * empty.chunks
    while len(at) < total:
        row: list[list[Op]] = [[] for _ in range(empty.stages)]
        for stage in range(empty.stages):

            def place(op: Op, stage: int = stage, cell: list[Op] = row[stage], tick: int = len(ticks)) -> bool:
                in_turn = not cell or KINDS.index(op.kind) > KINDS.index(cell[-1].kind)
                fits = in_turn and all((need.stage, need.op) in at and at[need.stage, need.op] + need.ticks <= tick
                                       for need in empty.needs(stage, op))
                if fits:
                    cell.append(op)
                    at[stage, op] = tick
                return fits

            turn(stage, place)
        ticks.append(tuple(map(tuple, row)))
        assert len(ticks) <= total * (1 + empty.latency), f"{empty.name} cannot go on"
    return replace(empty, ticks=tuple(ticks))


def _in_order(empty: Schedule, paired: bool) -> Schedule:
    """Give each stage warm-up forwards, then F and B alternately (W some B later), then what is left.

    The number of warm-up forwards determines everything else. They last until the first gradient returns: a round trip.
    """
    kinds = "FBW" if empty.name == "zb_h1" else "FB"
    p, v, hop, m = empty.stages, empty.chunks, empty.latency, empty.microbatches
    # A micro-batch returns to the first stage after hop x p ticks: groups of at least that many fill the time.
    groups = max(1, m // (hop * p))
    together = [range(*ends) for ends in pairwise(-(-m * i // groups) for i in range(groups + 1))]
    order = {"F": [(k, c) for group in together for c in range(v) for k in group],
             "B": [(k, c) for group in together for c in reversed(range(v)) for k in group]}
    order["W"] = order["B"]
    n = m * v
    done: list[dict[str, int]] = [dict.fromkeys(KINDS, 0) for _ in range(p)]

    def warmup(stage: int) -> int:
        if empty.name == "gpipe":
            return n
        # Unpaired, a stage does a forward every other tick, so half as many fill the trip. Interleaved, the trip begins
        # when the first group has passed all chunks but the last.
        way = hop * (p - 1 - stage)
        return way if v == 1 and not paired else 2 * way + (v - 1) * len(together[0])

    def due(stage: int) -> str:
        f, b, w = (done[stage][kind] for kind in KINDS)
        # The later a stage, the fewer activations wait for B and the more may wait for W: together as many as the first
        # stage holds. So gradients reach the first stage sooner, and W fills the end.
        if "W" in kinds and w < (b - hop * stage if b < n else n):
            return "W"
        return "F" if f < min(n, warmup(stage) + 1 + b) else "B"

    def turn(stage: int, place: Place) -> None:
        for _ in range(2 if paired else 1):
            if sum(done[stage].values()) == n * len(kinds):
                return
            kind = due(stage)
            if not place(Op(kind, *order[kind][done[stage][kind]])):
                return
            done[stage][kind] += 1

    return _fill(empty, turn, kinds)


def _zb_v(empty: Schedule) -> Schedule:
    """Schedule greedily in the memory of 1f1b: W when memory is short, else a forward, else B, else W.

    Among the orders of the four F and B, this one and its equivalents leave no stage idle between its first and last
    operation, from 2 x latency x stages micro-batches on. The first micro-batch returns to a stage just before its
    memory is full.
    """
    m = empty.microbatches
    room = 2 * (empty.latency * (empty.stages - 1) + 1)
    done: list[dict[tuple[str, int], int]] = [
        {(kind, chunk): 0 for kind in KINDS for chunk in range(2)} for _ in range(empty.stages)]

    def turn(stage: int, place: Place) -> None:
        mine = done[stage]
        held = sum(mine["F", chunk] - mine["W", chunk] for chunk in range(2))
        short = held >= room - 1 and mine["F", 1] < m
        forwards = (("F", 1), ("F", 0)) if held < room else ()
        # Of the chunks with W waiting, the one with more.
        weights = sorted((("W", chunk) for chunk in range(2)), key=lambda w: mine[w] - mine["B", w[1]])
        for kind, chunk in [*(weights if short else ()), *forwards, ("B", 0), ("B", 1), *weights]:
            count = mine[kind, chunk]
            if count < m and place(Op(kind, count, chunk)):
                mine[kind, chunk] += 1
                return

    return _fill(empty, turn, "FBW")
