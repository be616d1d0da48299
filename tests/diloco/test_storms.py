"""Storms over islands as processes: nothing is lost and nothing applied twice, whatever is killed or cut."""

import pytest

from tests.diloco.storm import storm

pytest.importorskip("cryptography", reason="comes with the extra .[diloco]")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])  # with a store, and with one entry for each offer
def test_a_storm_loses_nothing(seed, tmp_path):
    storm(tmp_path, seed)


@pytest.mark.slow
def test_a_storm_in_which_the_port_is_shut_loses_nothing(tmp_path):
    storm(tmp_path, 2, fallback=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, 1, *range(3, 10)])
def test_many_storms_in_which_the_port_is_shut_lose_nothing(seed, tmp_path):
    storm(tmp_path, seed, fallback=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, *range(3, 30)])
def test_many_storms_lose_nothing(seed, tmp_path):
    storm(tmp_path, seed)
