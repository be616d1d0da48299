"""The inverse of a batch source: at which steps, and in which rows of their batches, stretches of tokens are drawn.

The work is that of the answer: for each stretch and epoch one permutation is inverted, whatever lies between.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.data.corpus.corruption import SparedRows
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.loading.bucketing import BucketedBatches
from jaxtrain.data.loading.curriculum import Curriculum, Part
from jaxtrain.data.loading.island_part import IslandPart
from jaxtrain.data.loading.loader import Batches
from jaxtrain.data.loading.modalities.spec_augment import AugmentedBatches
from jaxtrain.data.loading.shuffle import Order
from jaxtrain.data.packing.document_rows import DocumentRows
from jaxtrain.data.tracing.inverse_packing import spans
from jaxtrain.data.tracing.inverse_shuffle import place_of, places_of
from jaxtrain.data.tracing.stretches import Span, Stretch
from jaxtrain.errors import UserError

CHUNK = 2**16  # pairs of a row and an epoch that are inverted at a time


@dataclass(frozen=True)
class Sighting:
    """One row of one batch that has some of a stretch."""

    stretch: int  # its number among those asked for
    batch: int  # the number of the batch in the data; the step of a run that skips none
    row: int
    epoch: int  # over its source, counted from 0; from 0 again where data.stages has new_epoch
    span: Span  # `span.row` is the number of the row among those of its source
    lost: bool = False  # the row is corrupt, and has no loss (data.corrupt=skip_and_count)
    island: int | None = None  # whose row it is, where islands divide batches


def sightings(batches: BatchSource, stretches: Sequence[Stretch], stop: int) -> Iterator[Sighting]:
    """Yield where the batches before number `stop` have these stretches, in no particular order."""
    batches = batches.batches if isinstance(batches, AugmentedBatches) else batches
    stop = stop if batches.num_batches is None else min(stop, batches.num_batches)
    if isinstance(batches, Batches):
        found = _in_order(batches, stretches, stop)
    elif isinstance(batches, BucketedBatches):
        found = _in_buckets(batches, stretches, stop)
    elif isinstance(batches, Curriculum):
        found = _in_stages(batches, stretches, stop)
    elif isinstance(batches, IslandPart):
        found = _on_islands(batches, stretches, stop)
    else:
        raise UserError("data", f"batches of {type(batches).__name__} cannot be inverted", "trace a run on a corpus")
    yield from found


def held(batches: BatchSource, stretch: Stretch) -> bool:
    """Return whether a row has some of a stretch, so that it is seen once it is its turn."""
    if isinstance(batches, IslandPart | AugmentedBatches):
        return held(batches.whole if isinstance(batches, IslandPart) else batches.batches, stretch)
    if isinstance(batches, Curriculum):
        found = ((part.rows[source], batches.eras[part.stage.era].orders[source].length * part.per_unit)
                 for part in batches.parts for source, name in enumerate(batches.names) if name == stretch.source)
    else:
        assert isinstance(batches, Batches | BucketedBatches)
        found = iter([(batches.all_rows, len(batches.all_rows))])
    return any(span.row < count for rows, count in found for span in spans(rows, stretch))


def _rows_with(rows: object, stretches: Sequence[Stretch], source: str) -> dict[int, list[tuple[int, Span]]]:
    """Return the rows of a source that have stretches, each with what it has of which."""
    found: dict[int, list[tuple[int, Span]]] = {}
    for number, stretch in enumerate(stretches):
        for span in spans(rows, stretch) if stretch.source == source else ():
            found.setdefault(span.row, []).append((number, span))
    return found


def _lost(rows: object, number: int) -> bool:
    """Return whether a row is corrupt; it is read if such rows are spared."""
    if not isinstance(rows, SparedRows):
        return False
    rows.row(number, int(rows.lengths[number])) if isinstance(rows.rows, DocumentRows) else rows[number]
    return number in rows.lost


def _between(order: Order, units: Sequence[int], low: int, high: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield units and the places from `low` to `high` of the endless order that draw them, in epochs that matter."""
    many = np.asarray(units, np.int64)
    together = max(1, CHUNK // max(1, len(many)))
    begin, end = low // order.length, -(-high // order.length)
    for first in range(begin, end if len(many) and low < high else begin, together):
        some = np.arange(first, min(first + together, end))
        each = np.tile(many, len(some))
        places = places_of(order, each, np.repeat(some, len(many)))
        inside = (places >= low) & (places < high)
        if inside.any():
            yield each[inside], places[inside]


# ------------------------------------------------------------------------------------------------ rows in one order
def _in_order(batches: Batches, stretches: Sequence[Stretch], stop: int) -> Iterator[Sighting]:
    size, order = batches.global_batch_size, batches.order
    held = _rows_with(batches.all_rows, stretches, "")
    lost = {row: _lost(batches.all_rows, row) for row in held}
    for rows, places in _between(order, list(held), 0, stop * size):
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            for number, span in held[row]:
                yield Sighting(number, place // size, place % size, place // order.length, span, lost[row])


# ------------------------------------------------------------------------------------------------- mixtures and stages
def _in_stages(batches: Curriculum, stretches: Sequence[Stretch], stop: int) -> Iterator[Sighting]:
    for era in range(len(batches.eras)):
        parts = [part for part in batches.parts if part.stage.era == era]
        after = next((part.stage.start for part in batches.parts if part.stage.era > era), stop)
        ends = [*(part.stage.start for part in parts[1:]), after]
        for part, end in zip(parts, ends, strict=True):
            if part.stage.start < min(end, stop):
                yield from _in_stage(batches, part, min(end, stop), stretches)


def _in_stage(batches: Curriculum, part: Part, stop: int, stretches: Sequence[Stretch]) -> Iterator[Sighting]:
    """Yield what the steps of a stage before `stop` have."""
    era, per_step = batches.eras[part.stage.era], part.stage.batch // part.per_unit
    first, last = part.place, part.place_at(stop)
    for source, name in enumerate(batches.names):
        rows, order = part.rows[source], era.orders[source]
        held: dict[int, list[tuple[int, Span]]] = {}  # by unit
        for row, here in _rows_with(rows, stretches, name).items():
            held.setdefault(row // part.per_unit, []).extend(here)
        held = {unit: here for unit, here in held.items() if unit < order.length}  # the rest fills no unit
        low, high = (era.mixture.drawn(place)[source] for place in (first, last))
        for units, nths in _between(order, list(held), low, high):
            for unit, nth, place in zip(units.tolist(), nths.tolist(), era.mixture.find(source, nths).tolist(),
                                        strict=True):
                assert first <= place < last
                step, within = divmod(place - first, per_step)
                for number, span in held[unit]:
                    yield Sighting(number, part.stage.start + step, within * part.per_unit + span.row % part.per_unit,
                                   nth // order.length, span, _lost(rows, span.row))


# ------------------------------------------------------------------------------------------------------------- buckets
def _in_buckets(batches: BucketedBatches, stretches: Sequence[Stretch], stop: int) -> Iterator[Sighting]:
    held = _rows_with(batches.all_rows, stretches, "")
    lost = {row: _lost(batches.all_rows, row) for row in held}
    for epoch in range(-(-stop // batches.batches_per_epoch) if held else 0):
        for row, here in held.items():
            batch, within = _bucketed(batches, epoch, row)
            if batch < stop:
                for number, span in here:
                    yield Sighting(number, batch, within, epoch, span, lost[row])


def _bucketed(batches: BucketedBatches, epoch: int, row: int) -> tuple[int, int]:
    """Return the batch of an epoch that has a row, and where; a row that fills no batch moves to the next bucket."""
    bucket = next(b for b, members in enumerate(batches.members) if _index(members, row) is not None)
    at = _index(batches.members[bucket], row)
    assert at is not None
    while (place := place_of(batches.order[bucket], epoch, at)) >= batches.full[bucket] * batches.sizes[bucket]:
        at = len(batches.members[bucket + 1]) + place - batches.full[bucket] * batches.sizes[bucket]
        bucket += 1
    batch, within = divmod(place, batches.sizes[bucket])
    turn = place_of(batches.turns, epoch, batches.ends[bucket] - batches.full[bucket] + batch)
    return epoch * batches.batches_per_epoch + turn, within


def _index(members: np.ndarray, row: int) -> int | None:
    at = int(np.searchsorted(members, row))
    return at if at < len(members) and members[at] == row else None


# ------------------------------------------------------------------------------------------------------------- islands
def _on_islands(batches: IslandPart, stretches: Sequence[Stretch], stop: int) -> Iterator[Sighting]:
    for found in sightings(batches.whole, stretches, stop):
        island, row = divmod(found.row, batches.shape(found.batch)[0])
        yield Sighting(found.stretch, found.batch, row, found.epoch, found.span, found.lost, island)
