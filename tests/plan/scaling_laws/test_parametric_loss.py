"""The scaling law: known constants come back, bands hold them, and the optimum is what a search finds."""

import functools

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

import jaxtrain as jt
from jaxtrain.plan.scaling_laws import parametric_loss
from jaxtrain.plan.scaling_laws.parametric_loss import Fit, Law, Point, fit

CHINCHILLA = Law(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)  # Hoffmann et al., arXiv 2203.15556, equation 10


def runs(noise=0.0, law=CHINCHILLA, sizes=4):
    rng = np.random.default_rng(1)
    return [Point(n, d, law.loss(n, d) * np.exp(rng.normal(scale=noise)))
            for n in np.geomspace(1e7, 3e9, sizes) for d in np.geomspace(3e8, 1e11, 4)]


@functools.cache
def fitted(noise):
    return fit(runs(noise), samples=30)


def test_the_constants_of_runs_without_noise_come_back():
    other = Law(E=0.9, A=2000.0, B=90.0, alpha=0.5, beta=0.2)
    for law in (CHINCHILLA, other):
        found = fit(runs(law=law), samples=0).law
        for name in ("E", "A", "B", "alpha", "beta"):
            assert getattr(found, name) == pytest.approx(getattr(law, name), rel=0.02), (name, found)


def test_the_true_values_are_in_the_bands_of_runs_with_noise():
    found = fitted(0.003)
    for value in (lambda law: law.E, lambda law: law.alpha, lambda law: law.beta,
                  lambda law: law.loss(7e10, 1.4e12), lambda law: law.optimum(1e22)[0]):
        low, high = found.band(value)
        assert low < value(CHINCHILLA) < high
        assert high - low < 0.8 * value(CHINCHILLA)
    assert found.law.alpha == pytest.approx(0.34, abs=0.03) and found.law.beta == pytest.approx(0.28, abs=0.03)


def test_a_seed_gives_the_same_bands():
    assert fit(runs(0.003), samples=3).samples == fitted(0.003).samples[:3]


def test_one_run_that_failed_hardly_counts():
    points = runs()
    points[5] = Point(points[5].parameters, points[5].tokens, 2 * points[5].loss)
    assert fit(points, samples=0).law.alpha == pytest.approx(0.34, abs=0.01)


def test_powers_beyond_all_numbers_are_no_traceback():
    """Samples of a few noisy runs have such powers; such a law of all runs is refused."""
    rng = np.random.default_rng(11)
    points = [Point(10.0**(7 + i % 3), 10.0**(9 + (i // 3 + i) % 3), rng.lognormal(1, 0.1)) for i in range(6)]
    assert all(np.isfinite(law.A) and np.isfinite(law.B) for law in fit(points, samples=25, seed=11).samples)
    steep = Law(E=1.0, A=1.0, B=1.0, alpha=-40.0, beta=0.3)
    assert steep.loss(1e12, 1e12) == float("inf") and np.isnan(steep.optimum(1e20)[0])
    laws = [Law(E, 406.4, 410.7, 0.34, 0.28) for E in np.arange(1, 3, 0.02)]
    there, some = 3e11, [law.loss(3e11, 3e11) for law in laws]
    for lost, more in ((0, [steep] * 3), (3, [])):  # some samples that say nothing make a band wider
        low, high = Fit(CHINCHILLA, laws + more, points, lost).band(lambda law: law.loss(there, there))
        assert (low, high) == (some[2], some[-3])
    assert Fit(CHINCHILLA, laws, points, 6).band(lambda law: law.loss(there, there)) == (-np.inf, np.inf)
    assert Fit(CHINCHILLA, [steep], points).band(lambda law: law.optimum(1e20)[0]) == (-np.inf, np.inf)
    assert np.isnan(Law(E=1.0, A=1e300, B=1e-300, alpha=0.1, beta=0.1).optimum(1e20)[0])
    step = [Point(n, d, 5.0 if n < 1e12 else 1.0) for n in (1e12 * (1 - 1e-6), 1e12, 1e12 * (1 + 1e-6))
            for d in (1e9, 1e10, 1e11)]
    with pytest.raises(jt.UserError, match="RUNS: no law with constants that are numbers fits them"):
        fit(step, samples=0)


def test_the_optimum_is_the_published_one():
    """Its powers of the budget are those of the paper's table 2, a=0.46 and b=0.54, up to the constants' rounding."""
    small, large = CHINCHILLA.optimum(1e20), CHINCHILLA.optimum(1e24)
    powers = [np.log10(after / before) / 4 for before, after in zip(small, large, strict=True)]
    assert powers == pytest.approx([0.46, 0.54], abs=0.01)
    for flops in (1e20, 5.76e23):
        best = minimize_scalar(lambda n, flops=flops: CHINCHILLA.loss(np.exp(n), flops / 6 / np.exp(n)),
                               bounds=(15, 30), method="bounded", options={"xatol": 1e-9})
        parameters, tokens = CHINCHILLA.optimum(flops)
        assert parameters == pytest.approx(np.exp(best.x), rel=1e-3) and 6 * parameters * tokens == pytest.approx(flops)


def test_slopes_are_those_of_the_objective():
    table = np.log([[p.parameters, p.tokens, p.loss] for p in runs(0.01)])
    x, step = np.array([5.0, 6.0, 0.4, 0.3, 0.3]), 1e-6
    value, slope = parametric_loss._objective(x, table)
    for i in range(5):
        aside = [parametric_loss._objective(x + step * sign * np.eye(5)[i], table)[0] for sign in (1, -1)]
        assert slope[i] == pytest.approx((aside[0] - aside[1]) / 2 / step, rel=1e-4)
    assert value > 0


@pytest.mark.parametrize(("points", "message"), [
    (runs()[:5], "RUNS: 5 finished runs are too few for the five constants of a scaling law; give 6 or more"),
    ([Point(1e7, d, 3.0) for d in range(1, 9)], "RUNS: all 8 have one size, and a power of it cannot be told"),
    ([Point(n, 1e9, 3.0) for n in range(1, 9)], "RUNS: all 8 have one number of tokens"),
    ([Point(n % 2 + 1, n + 1, 3.0) for n in range(8)], "RUNS: there are only two of a size"),
])
def test_runs_that_cannot_tell_are_refused(points, message):
    with pytest.raises(jt.UserError, match=message):
        fit(points)
