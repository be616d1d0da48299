"""The order of rows is Grain's, wherever one looks."""

import grain
import numpy as np
import pytest

from jaxtrain.data.loading.shuffle import Order
from jaxtrain.errors import UserError


@pytest.mark.parametrize("length", [
    23, *(pytest.param(length, marks=pytest.mark.slow) for length in (1, 2, 10**6, 2**33 + 1))])
@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_it_is_that_of_grains_own_pipeline(length, seed):
    pipeline = grain.MapDataset.source(range(length)).seed(seed)
    places = np.concatenate([np.arange(50), np.random.default_rng(0).integers(0, 2**50, 50),
                             [length - 1, length, 2**32, 2**29 * length]])
    rows = Order(length, seed).rows(places)
    shuffled = pipeline.shuffle().repeat()
    assert rows.tolist() == [shuffled[place] for place in places.tolist()] and rows.dtype == np.int64
    straight = pipeline.repeat()
    assert Order(length, seed, shuffle=False).rows(places).tolist() == [straight[place] for place in places.tolist()]


def test_each_epoch_is_another_permutation():
    epochs = Order(23, 0).rows(np.arange(230)).reshape(10, 23)
    assert (np.sort(epochs) == np.arange(23)).all() and len({tuple(epoch) for epoch in epochs.tolist()}) == 10


@pytest.mark.parametrize("length", [2**16, 2**16 + 1, *(pytest.param(length, marks=pytest.mark.slow) for length in (
    2**16 + 2, 2**17 + 1, 2**18 + 1, 2**20 + 1))])
def test_no_row_is_lost_or_repeated(length):
    """Grain's own permutation of 2^16 + 1 or 2^18 + 1 numbers has one twice."""
    rows = Order(length, 3).rows(np.arange(length, 2 * length))
    assert np.bincount(rows, minlength=length).tolist() == [1] * length


def test_few_places_or_none():
    order = Order(23, 5)
    places = np.array([7, 10**12, 3])
    assert order.rows(places).tolist() == [order.rows(places[i: i + 1])[0] for i in range(3)]
    assert order.rows(places[:0]).shape == (0,)


def test_what_cannot_be_ordered():
    with pytest.raises(UserError, match=r"data\.seed"):
        Order(5, -1)
    with pytest.raises(ValueError, match="no rows"):
        Order(0, 0)
