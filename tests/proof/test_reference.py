"""The tolerance: what rounding explains is allowed, and what it does not is not."""

import numpy as np
import pytest

from jaxtrain.proof import reference
from jaxtrain.proof.reference import Reference
from jaxtrain.proof.trial import GRADIENT, LOSS, OPTIMIZER, Quantity, Record

UNIT, COMPARED = 2.0**-24, 1e6
GRADIENT_KEY, CODES, LOSS_KEY = Quantity(GRADIENT, "w"), Quantity(OPTIMIZER, "codes"), Quantity(LOSS)


def measured(errors, truth):
    """A reference whose runs had these errors of the gradient."""
    spread = {GRADIENT_KEY: np.sqrt((errors**2).mean(0)), CODES: np.array([0.0, 0.0]), LOSS_KEY: np.array(0.0)}
    exact = {GRADIENT_KEY: truth, CODES: np.array([3.0, 5.0]), LOSS_KEY: np.array(2.0)}
    dtypes = {GRADIENT_KEY: np.empty(0, np.float32), CODES: np.empty(0, np.int8), LOSS_KEY: np.empty(0, np.float32)}
    return Reference([exact], [spread], dtypes, UNIT, None)


def worst(found, **changed):
    """Return the errors of a run whose quantities are exact but for these."""
    step = {key: np.asarray(changed.get(key.kind.partition(" ")[0], x)) for key, x in found.truth[0].items()}
    return reference.differences(found, Record([step], [[]]), 8, COMPARED)[0]


def test_one_more_draw_of_the_same_errors_is_never_out_and_a_hundred_times_as_much_always_is():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=20_000)
    sizes = UNIT * 10.0 ** rng.uniform(0, 3, size=truth.shape)  # elements with errors of all sizes
    found = measured(rng.normal(size=(reference.REPLICAS, len(truth))) * sizes, truth)
    for seed in range(20):
        again = truth + np.random.default_rng(seed + 1).normal(size=truth.shape) * sizes
        assert worst(found, gradient=again)[GRADIENT_KEY] < 1
    for at in (int(np.argmin(sizes)), int(np.argmax(sizes))):
        wrong = truth.copy()
        wrong[at] += 100 * max(sizes[at], np.median(sizes))
        assert worst(found, gradient=wrong)[GRADIENT_KEY] > 1


def test_the_square_of_noise_may_vary_as_squares_do():
    """A gradient that is zero but for rounding has a second moment whose errors are no larger than itself."""
    rng = np.random.default_rng(0)
    found = measured((1e-8 * rng.normal(size=(reference.REPLICAS, 5000))) ** 2, np.zeros(5000))
    for seed in range(20):
        again = (1e-8 * np.random.default_rng(seed + 1).normal(size=5000)) ** 2
        assert worst(found, gradient=again)[GRADIENT_KEY] < 1


def test_where_all_runs_agree_only_the_unit_of_rounding_is_allowed():
    truth = np.array([1.0, -0.5])
    found = measured(np.zeros((reference.REPLICAS, 2)), truth)
    assert worst(found, loss=2 * (1 + 8 * UNIT))[LOSS_KEY] < 1 < worst(found, loss=2 * (1 + 20 * UNIT))[LOSS_KEY]
    assert worst(found, optimizer=[3.0, 5.0])[CODES] == 0 < worst(found, optimizer=[3.0, 6.0])[CODES]
    assert worst(found, gradient=[1.0, np.nan])[GRADIENT_KEY] == np.inf
    assert worst(found, gradient=[1.0, -0.5, 0.0])[GRADIENT_KEY] == np.inf, "of another shape"


@pytest.mark.parametrize(("precision", "bits"), [("float32", 24), ("bfloat16", 8), ("float16", 11), ("fp8", 8)])
def test_the_unit_of_rounding_is_that_of_the_dtype(precision, bits):
    assert reference.unit_of(precision) == 2.0**-bits
