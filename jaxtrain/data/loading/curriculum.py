"""Batches from several sources or stages, still a pure function of the data, the config and the step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.config.data_stages import Source, Stage
from jaxtrain.data.loading.loader import Rows, take
from jaxtrain.data.loading.mixture import Mixture
from jaxtrain.data.loading.readahead import ReadAhead
from jaxtrain.data.loading.shuffle import Order
from jaxtrain.errors import UserError


@dataclass(frozen=True)
class _Era:
    """A range of stages during which the order of each source's units stays the same."""

    mixture: Mixture
    orders: list[Order]
    epochs: list[float]  # over each source, before this era


@dataclass(frozen=True)
class Part:
    """A stage, and the position at which it begins."""

    stage: Stage
    place: int  # of the era, where the stage begins
    tokens: int  # in all batches before the stage
    rows: list[Rows]
    per_unit: int  # rows in a unit

    def place_at(self, step: int) -> int:
        """Return the number of units of the era that begin before this step."""
        return self.place + (step - self.stage.start) * self.stage.batch // self.per_unit


class Curriculum:
    """Batches by step, like loader.Batches, for stages over several sources.

    `rows(name, seq_len)` returns the rows of a source; a unit is `unit / seq_len` consecutive rows.
    """

    def __init__(self, sources: Sequence[Source], stages: Sequence[Stage], rows: Callable[[str, int], Rows], seed: int,
                 threads: int = 0):
        self.names = [source.name for source in sources]
        limits = [source.epochs or math.inf for source in sources]
        seeds = [seed if not name else _seed(seed, name) for name in self.names]
        self.eras: list[_Era] = []
        self.parts: list[Part] = []
        tokens, epochs = 0, [0.0] * len(self.names)
        for era in range(stages[-1].era + 1):
            mine = [stage for stage in stages if stage.era == era]
            after = next((stage.start for stage in stages if stage.era > era), math.inf)
            stops = [*(stage.start for stage in mine[1:]), after]
            orders = [Order(len(rows(name, mine[0].unit)), one, True, era) for name, one in
                      zip(self.names, seeds, strict=True)]
            place, weights = 0, []
            for stage, stop in zip(mine, stops, strict=True):
                self.parts.append(Part(stage, place, tokens, [rows(name, stage.seq_len) for name in self.names],
                                         stage.unit // stage.seq_len))
                weights.append((place, [stage.weights[name] for name in self.names]))
                if stop < math.inf:
                    place = self.parts[-1].place_at(int(stop))
                    tokens += (int(stop) - stage.start) * stage.batch * stage.seq_len
            left = [limit if limit == math.inf else math.floor((limit - before) * order.length + 1e-6)
                    for limit, before, order in zip(limits, epochs, orders, strict=True)]
            mixture = Mixture(self.names, weights, left, seed)
            self.eras.append(_Era(mixture, orders, epochs))
            if mixture.end < math.inf and place >= mixture.end:
                break  # later stages have nothing to draw from
            epochs = self._epochs(self.eras[-1], place)
        self.num_batches = self._count()
        self._ahead = ReadAhead(self._read, threads) if threads else None

    def shape(self, step: int) -> tuple[int, int]:
        """Return the number of rows, and of tokens per row, at this step."""
        stage = self._at(step).stage
        return stage.batch, stage.seq_len

    def shapes_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the distinct shapes of the batches of steps `start` to `stop`."""
        begins = [part.stage.start for part in self.parts if start < part.stage.start < stop]
        return list(dict.fromkeys(self.shape(step) for step in [start, *begins] if step < stop))

    def tokens(self, step: int) -> int:
        """Return the number of tokens in all batches before this step."""
        part = self._at(step)
        return part.tokens + (step - part.stage.start) * part.stage.batch * part.stage.seq_len

    def epochs(self, step: int) -> dict[str, float]:
        """Return the number of epochs over each source before this step."""
        part = self._at(step)
        return dict(zip(self.names, self._epochs(self.eras[part.stage.era], part.place_at(step)), strict=True))

    def passes(self, step: int) -> float:
        """Return the number of epochs over all sources together before this step: each counts by its length."""
        part = self._at(step)
        era = self.eras[part.stage.era]
        lengths = [order.length for order in era.orders]
        done = self._epochs(era, part.place_at(step))
        return sum(length * epochs for length, epochs in zip(lengths, done, strict=True)) / sum(lengths)

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        return self.rows(step, range(self.shape(step)[0]))

    def rows(self, step: int, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return only these rows of the global batch at `step`."""
        return self._ahead.rows(step, indices) if self._ahead else self._read(step, indices)

    def _read(self, step: int, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        part, (sources, numbers) = self._at(step), self.locate(step, indices)
        batch: dict[str, np.ndarray] = {}
        for source in np.unique(sources):
            mine = sources == source
            for name, column in take(part.rows[source], numbers[mine]).items():
                if name not in batch:
                    batch[name] = np.empty((len(sources), *column.shape[1:]), column.dtype)
                batch[name][mine] = column
        return batch

    def _check(self, step: int, indices: Sequence[int] | np.ndarray) -> None:
        if step < 0 or (self.num_batches is not None and step >= self.num_batches):
            raise IndexError(f"batch {step} of {self.num_batches}")
        part, within = self._at(step), np.asarray(indices)
        for index in within[(within < 0) | (within >= part.stage.batch)]:
            raise IndexError(f"row {index} of a batch of {part.stage.batch}")

    def locate(self, step: int, indices: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each of these rows of the batch, the index of its source and its number within that source."""
        self._check(step, indices)
        part, within = self._at(step), np.asarray(indices, np.int64)
        units, pieces = np.divmod(within, part.per_unit)
        sources, nths = self.eras[part.stage.era].mixture.locate(part.place_at(step) + units)
        numbers = np.empty(len(within), np.int64)
        for source in np.unique(sources):
            mine = sources == source
            order = self.eras[part.stage.era].orders[source]
            numbers[mine] = order.rows(nths[mine]) * part.per_unit + pieces[mine]
        return sources, numbers

    def origin(self, step: int, index: int) -> tuple[str, Rows, int | None]:
        """Return the source of a row, the rows of that source, and its number there."""
        sources, numbers = self.locate(step, [index])
        return self.names[sources[0]], self._at(step).rows[sources[0]], int(numbers[0])

    def _at(self, step: int) -> Part:
        return next(part for part in reversed(self.parts) if part.stage.start <= max(step, 0))

    def _epochs(self, era: _Era, place: int) -> list[float]:
        drawn = era.mixture.drawn(place)
        return [before + units / order.length for before, units, order in
                zip(era.epochs, drawn, era.orders, strict=True)]

    def _count(self) -> int | None:
        """Return the number of batches until all sources reach their limits; None: endless."""
        end = self.eras[-1].mixture.end
        if end == math.inf:
            return None
        part = next((part for part in reversed(self.parts) if part.stage.era == len(self.eras) - 1
                     and part.place < end), None)
        count = part.stage.start + int(end - part.place) * part.per_unit // part.stage.batch if part else 0
        if not count:
            raise UserError("data.mixture", "its sources hold less than one batch within their limits",
                            "raise their weights or epochs")
        return count


def _seed(seed: int, name: str) -> int:
    """Return the seed of one source, which does not depend on the other sources."""
    return int(np.random.SeedSequence([seed, *name.encode()]).generate_state(1)[0])
