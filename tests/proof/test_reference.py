"""The tolerance: what rounding explains is allowed, and what it does not is not."""

import types

import numpy as np
import pytest

from jaxtrain.proof import reference
from jaxtrain.proof.reference import Reference
from jaxtrain.proof.trial import GRADIENT, LOSS, OPTIMIZER, UPDATE, Quantity, Record

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


def of_adam(size, gradient_error):
    """A reference whose gradients are of these sizes, and all of whose runs made the same first update of Adam."""
    update, moment = Quantity(UPDATE, "w"), Quantity(OPTIMIZER, "0/mu/w")
    gradient = np.array(size)
    truth = {GRADIENT_KEY: gradient, moment: 0.1 * gradient, update: 1 - 0.01 * np.sign(gradient)}
    zero = np.zeros(gradient.shape)
    spread = {GRADIENT_KEY: np.where(gradient == 0, 0.0, gradient_error), moment: zero, update: zero}
    start = types.SimpleNamespace(params={"w": np.ones(gradient.shape, np.float32)})
    found = Reference([truth], [spread], {key: np.empty(0, np.float32) for key in truth}, UNIT, start)

    def error(at):
        """Return the error of an update of the other sign at this element."""
        other = truth[update].copy()
        other[at] = 2 - other[at] + 0.01 * (gradient[at] == 0)
        return reference.differences(found, Record([truth | {update: other}], [[]]), 8, COMPARED)[0][update]
    return error


def test_an_update_may_have_either_sign_where_the_gradient_is_no_larger_than_its_error():
    error = of_adam([1.0, -0.5, 1e-3, 0.0], gradient_error=3e-4)
    assert error(2) < 1
    assert error(0) > 100 and error(1) > 100, "their signs are sure"
    assert error(3) > 100, "a gradient that is exactly zero in all runs"
    assert of_adam([1.0, -0.5, 1e-3, 0.0], gradient_error=1e-7)(2) > 100, "the sign is sure in more precise runs"


@pytest.mark.parametrize(("precision", "bits"), [("float32", 24), ("bfloat16", 8), ("float16", 11), ("fp8", 8)])
def test_the_unit_of_rounding_is_that_of_the_dtype(precision, bits):
    assert reference.unit_of(precision) == 2.0**-bits
