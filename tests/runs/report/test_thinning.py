"""Long curves are thinned without losing a spike, and averaged without being moved by one."""

import numpy as np

from jaxtrain.runs.report.thinning import averages, extremes


def test_no_spike_is_lost_whatever_the_length():
    noise = np.random.default_rng(0)
    for count in (1, 2, 1999, 2000, 2001, 123_457):
        values = noise.normal(size=count)
        spike, hole, gone = (count // 3, 2 * count // 3, count // 2)
        values[spike], values[hole] = 50.0, -50.0
        if count > 100:
            values[gone] = np.nan
        drawn = extremes(values, 2000)
        assert len(drawn) <= 2002 and (np.diff(drawn) > 0).all() and {spike, hole} <= {*drawn} and drawn[0] == 0
        assert drawn[-1] == count - 1 and (count <= 100 or gone not in drawn)
        if count <= 2000:
            assert len(drawn) == count - (count > 100)
    assert not len(extremes(np.array([np.nan]), 10)) and not len(extremes(np.empty(0), 10))


def test_means_are_those_of_equal_stretches():
    values = np.arange(100.0)
    np.testing.assert_allclose(averages(values, 20), np.arange(100.0).reshape(10, 10).mean(1))
    values[:15] = np.nan
    np.testing.assert_array_equal(averages(values, 20)[:2], [np.nan, 17.0])
    np.testing.assert_array_equal(averages(values, 100), values)
