"""Each backend of grouped matmuls on the conformance suite, on CPUs, where kernels are interpreted."""

import jax.numpy as jnp
import pytest

from jaxtrain.kernels import grouped_conformance as suite
from jaxtrain.kernels import grouped_matmul
from tests.kernels.interpreted import needs_mosaic
from tools.device import grouped_conformance

NAMED = pytest.mark.parametrize("name", suite.CASES)


def conforms(backend, name, run=suite.differentiated):
    """Compare results and gradients in float32 with float64, if the backend takes the case; "auto" refuses none."""
    case = suite.CASES[name]
    if backend in suite.backends(case, jnp.float32):
        assert suite.complaints(case, run(backend), jnp.float32) == []
        return True
    return False


@NAMED
@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_a_backend_conforms(backend, name):
    assert conforms(backend, name)


@needs_mosaic
@pytest.mark.slow
@NAMED
def test_the_kernels_for_hopper_conform(name, interpreted):
    assert conforms("mosaic", name) == ("odd" not in name)


@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_gradients_by_hand_conform(backend):
    assert conforms(backend, "rows behind the last group", suite.by_hand)


def test_half_precision_is_rounded_once():
    case = suite.CASES["bounds beside multiples of 64"]
    assert suite.complaints(case, suite.differentiated("triton"), jnp.bfloat16) == []


WRONG = {  # what kernels of others were found to do
    "reads what lies behind the last group": lambda y, dx, dw, sizes: (y.at[-1].add(1e-3), dx, dw),
    "leaves the gradient of an empty group": lambda y, dx, dw, sizes: (y, dx, jnp.where(
        (sizes == 0)[:, None, None], 1.0, dw)),
    "returns what is not a number": lambda y, dx, dw, sizes: (y, dx * jnp.nan, dw),
    "rounds bounds to tiles": lambda y, dx, dw, sizes: (jnp.roll(y, 1, 0), dx, dw)}


@pytest.mark.parametrize("fault", WRONG)
def test_the_suite_sees_faults(fault):
    """A suite that finds nothing in a wrong kernel says nothing about a right one."""
    def run(rows, weights, sizes, dy):
        return WRONG[fault](*suite.differentiated("xla")(rows, weights, sizes, dy), sizes)

    assert suite.complaints(suite.CASES["rows behind the last group"], run, jnp.float32)


@pytest.mark.slow
def test_it_is_a_command(capsys):
    assert grouped_conformance.main(["--backend=xla"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 * len(suite.CASES) and all(line.endswith(": right") for line in said)


def test_every_kernel_that_auto_may_choose_is_judged():
    assert set(grouped_matmul.KERNELS) == {"mosaic", "triton"}, "add it to the tests above"
