"""Storms over islands as processes: nothing is lost and nothing applied twice, whatever is killed or cut."""

import pytest

from tests.islands.storm import storm

pytest.importorskip("cryptography", reason="comes with the extra .[islands]")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])  # with a store, and with one entry for each offer
def test_a_storm_loses_nothing(seed, tmp_path):
    storm(tmp_path, seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, *range(3, 30)])
def test_many_storms_lose_nothing(seed, tmp_path):
    storm(tmp_path, seed)
