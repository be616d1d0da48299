"""Rows are found where Grain draws them."""

import numpy as np
import pytest

from jaxtrain.data.loading.bucketing import SMALL, Permutation
from jaxtrain.data.loading.shuffle import Order, index_shuffle, permuted
from jaxtrain.data.tracing import inverse_shuffle
from jaxtrain.data.tracing.inverse_shuffle import inverse, place_of, places_of
from jaxtrain.errors import UserError
from tests.tiers import slow


@pytest.mark.parametrize("count", [1, 4097, *slow(2, 255, 256, 65535, 65536, 65537, 65538, 131073, 262145)])
def test_every_place_of_an_epoch(count):
    drawn = [permuted(place, count - 1, 5) for place in range(count)] if count > 1 else [0]
    assert inverse(np.array(drawn), count, np.full(count, 5)).tolist() == list(range(count))


@pytest.mark.parametrize("count", [50, 300, 5000, *slow(2, 11)])
def test_tables_and_walks_agree(count):
    rng = np.random.default_rng(count)
    numbers, seeds = rng.integers(0, count, 20), rng.integers(0, 3, 20)
    walked, tabled = (undone(numbers.astype(np.uint64), count - 1, seeds, 8).tolist() for undone in (
        inverse_shuffle._by_walking, inverse_shuffle._by_table))
    drawn = [index_shuffle()(place, count - 1, seed, 4) for place, seed in zip(walked, seeds.tolist(), strict=True)]
    assert walked == tabled and drawn == numbers.tolist()


@pytest.mark.parametrize("count", [70_001, 2**31, 2**32 + 1, 10**10, 10**12])
def test_random_places_of_large_orders(count):
    rng = np.random.default_rng(0)
    places, seeds = rng.integers(0, count, 50), rng.integers(0, 2**32, 50)
    drawn = np.array([permuted(place, count - 1, seed)
                      for place, seed in zip(places.tolist(), seeds.tolist(), strict=True)])
    assert inverse(drawn, count, seeds).tolist() == places.tolist()


@pytest.mark.parametrize("shuffle", [True, False])
def test_orders_and_permutations(shuffle):
    order, places = Order(5000, 7, shuffle, era=1), np.arange(12_345, 12_445)
    assert places_of(order, order.rows(places), places // 5000).tolist() == places.tolist()
    for count in (10, SMALL + 1):
        permutation = Permutation(count, 7, 2, shuffle)
        assert [place_of(permutation, 3, permutation(3, place)) for place in range(8)] == list(range(8))


def test_another_shuffle_is_noticed(monkeypatch):
    monkeypatch.setattr(inverse_shuffle, "permuted", lambda place, last, seed: last - place)
    with pytest.raises(UserError, match="not the one that can be inverted"):
        inverse(np.arange(5), 70_000, np.arange(5))
