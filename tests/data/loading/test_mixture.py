"""Places of a mixture: exact shares in every block, each source in its own order without gaps, limits kept."""

import math
import random

import numpy as np
import pytest

from jaxtrain.data.loading.mixture import BLOCK, Mixture
from jaxtrain.errors import UserError

ENDLESS = [math.inf] * 3
FIXED = [0, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0], [
    750000000000, 750000000001, 250000000000, 750000000002, 750000000003, 750000000004,
    250000000001, 750000000005, 250000000002, 750000000006, 750000000007, 750000000008]


def test_every_block_has_the_shares_that_the_weights_say():
    mixture = Mixture("abc", [(0, [0.7, 0.2, 0.1])], ENDLESS, seed=3)
    sources, _ = mixture.locate(np.arange(20 * BLOCK))
    counts = [np.bincount(block, minlength=3).tolist() for block in sources.reshape(20, BLOCK)]
    assert counts == [[2867, 819, 410]] * 20  # 2867.2, 819.2 and 409.6 of 4096
    assert len({tuple(block) for block in sources.reshape(20, BLOCK).tolist()}) == 20


def test_any_stretch_has_nearly_these_shares():
    """Shares hold within blocks too, which is the purpose of spreading. A random order would be off by dozens."""
    sources, _ = Mixture("abc", [(0, [5, 3, 2])], ENDLESS, seed=1).locate(np.arange(3 * BLOCK))
    for start in range(0, 2 * BLOCK, 97):
        for length in (16, 100, 1000):
            counts = np.bincount(sources[start: start + length], minlength=3)
            assert (abs(counts - np.array([0.5, 0.3, 0.2]) * length) < 3).all()


def test_values_are_fixed():
    """A run that is resumed with a later version must draw what it would have drawn."""
    sources, units = Mixture("ab", [(0, [3, 1])], [math.inf] * 2, seed=0).locate(np.arange(10**12, 10**12 + 12))
    assert sources.tolist() == FIXED[0] and units.tolist() == FIXED[1]


@pytest.mark.parametrize("case", range(40))
def test_random_mixtures_give_each_source_in_order_without_gaps(case):
    rng = random.Random(case)
    count = rng.randint(1, 5)
    starts = [0, *sorted(rng.sample(range(1, 30_000), rng.randint(0, 4)))]
    weights = []
    for start in starts:
        shares = [rng.choice([0, rng.uniform(0.01, 1)]) for _ in range(count)]
        shares[rng.randrange(count)] = 1.0
        weights.append((start, shares))
    limits = [rng.choice([math.inf, rng.randint(1, 20_000)]) for _ in range(count)]
    mixture = Mixture([str(i) for i in range(count)], weights, limits, seed=case)
    last = int(min(mixture.end, 50_000))
    sources, units = mixture.locate(np.arange(last))
    for i, limit in enumerate(limits):
        mine = units[sources == i]
        assert (mine == np.arange(len(mine))).all() and len(mine) <= limit
    for start, stop, (_, shares) in zip(starts, [*starts[1:], last], weights, strict=True):
        assert not set(sources[start:min(stop, last)]) & {i for i, share in enumerate(shares) if not share}
    for place in [0, last, *rng.sample(range(last + 1), min(last, 20))]:
        if place < mixture.end:
            assert mixture.drawn(place) == tuple(np.bincount(sources[:place], minlength=count).tolist())
            cut = mixture.locate(np.arange(place, min(place + 33, last)))
            assert (cut[0] == sources[place: place + 33]).all() and (cut[1] == units[place: place + 33]).all()
    if mixture.end < math.inf:  # whoever still had a weight then had given all
        drawn = np.bincount(sources, minlength=count)
        latest = max(range(len(starts)), key=lambda i: starts[i] * (starts[i] <= last))
        assert all(drawn[i] == limits[i] for i, share in enumerate(weights[latest][1]) if share)


def test_a_source_that_has_given_all_leaves_its_share_to_the_others():
    mixture = Mixture("ab", [(0, [1, 1])], [100, math.inf], seed=0)
    sources, _ = mixture.locate(np.arange(1000))
    assert (sources == 0).sum() == 100 and set(sources[:190]) == {0, 1} and set(sources[210:]) == {1}


def test_a_weight_too_small_for_a_block_is_refused():
    with pytest.raises(UserError, match=r"data.mixture.b.weight: 0.0001 of all rows is less than one of 4096"):
        Mixture("ab", [(0, [1, 0.0001])], ENDLESS[:2], seed=0)


@pytest.mark.parametrize("limits", [(math.inf, math.inf, 900), (5000, 900, 0)])
def test_the_place_of_a_unit_is_found(limits):
    mixture = Mixture("abc", [(0, (1, 0.2, 3)), (700, (0, 1, 2)), (9000, (5, 1, 1))], limits, seed=3)
    places = np.arange(int(min(mixture.end, 12_000)))
    sources, units = mixture.locate(places)
    for source in range(3):
        mine = sources == source
        assert mixture.find(source, units[mine]).tolist() == places[mine].tolist()
        if limits[source] < math.inf:  # there are no more
            assert mixture.find(source, np.arange(int(limits[source]), int(limits[source]) + 5)).tolist() == [-1] * 5
