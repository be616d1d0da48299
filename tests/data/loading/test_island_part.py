"""Islands' parts of a batch: together the whole, once."""

import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.config.schema import DataConfig
from jaxtrain.data.loading.island_part import IslandPart, island_batches
from jaxtrain.errors import UserError

WHOLE = jt.BatchFunction(lambda step: {"x": np.arange(8).reshape(8, 1) + 100 * step}, tokens_per_row=5, num_batches=3)


def test_together_they_are_the_whole_batch():
    parts = [IslandPart(WHOLE, i, 4) for i in range(4)]
    for step in range(3):
        np.testing.assert_array_equal(np.concatenate([part[step]["x"] for part in parts]), WHOLE[step]["x"])
    np.testing.assert_array_equal(parts[2].rows(1, [1])["x"], [[105]])
    assert parts[0].shape(0) == (2, 5) and parts[0].shapes_of(0, 3) == [(2, 5)]
    assert parts[0].tokens(3) * 4 == WHOLE.tokens(3) and parts[0].num_batches == 3


def test_batches_of_several_shapes_are_refused():
    with pytest.raises(UserError, match=r"data.packing: islands divide batches of one shape"):
        island_batches(DataConfig(packing="bucket"), None, 0, 2)
