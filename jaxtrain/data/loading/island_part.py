"""An island's part of the training batches: some rows of each, so that all islands together train on the whole."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxtrain.config.schema import DataConfig
from jaxtrain.data.corpus.corpus import Corpus
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.loading.batches import train_batches
from jaxtrain.data.loading.epochs import passes
from jaxtrain.errors import UserError


class IslandPart:
    """A batch source of every row of another whose number in its batch leaves a given part."""

    def __init__(self, batches: BatchSource, index: int, count: int):
        """Take part `index` of `count` of each batch."""
        self.whole: Any = batches
        self._index, self.count = index, count
        self.num_batches = batches.num_batches

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        return self.rows(step, range(self.shape(step)[0]))

    def rows(self, step: int, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return only these rows of the island's batch at `step`."""
        return self.whole.rows(step, [self._row(step, index) for index in indices])

    def shape(self, step: int) -> tuple[int, int]:
        """Return the number of the island's rows, and of tokens per row, at this step."""
        rows, length = self.whole.shape(step)
        return rows // self.count, length

    def shapes_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the distinct shapes that the island's batches of these steps may have."""
        return [(rows // self.count, length) for rows, length in self.whole.shapes_of(start, stop)]

    def tokens(self, step: int) -> int:
        """Return the number of tokens in all of the island's batches before this step."""
        return self.whole.tokens(step) // self.count

    def epochs(self, step: int) -> dict[str, float]:
        """Return the number of epochs that all islands together make before this step."""
        return self.whole.epochs(step)

    def passes(self, step: int) -> float:
        """Return the number of epochs over all sources together that all islands together make before this step."""
        return passes(self.whole, step)

    def origin(self, step: int, index: int) -> Any:
        """Return the source of a row, the rows of that source, and its number there."""
        return self.whole.origin(step, self._row(step, index))

    def _row(self, step: int, index: int) -> int:
        return self._index * self.shape(step)[0] + index


def island_batches(config: DataConfig, corpus: Corpus, index: int, count: int) -> BatchSource:
    """Return the training batches of an island, whose own size is what the config says."""
    if config.stages or config.packing == "bucket":
        key = "stages" if config.stages else "packing"
        raise UserError(f"data.{key}", "islands divide batches of one shape only", "leave it out, or diloco.count")
    whole = replace(config, global_batch_size=count * config.global_batch_size)
    return IslandPart(train_batches(whole, corpus), index, count)
