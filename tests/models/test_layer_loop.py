"""Layers that differ by their numbers: which are computed together, without branches, and to the same numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.models.layer_loop import loop, period_of
from tests.numerics import reference
from tests.tiers import exhaustive, slow


def test_kinds_begin_anew_after_their_period():
    assert [period_of(kinds) for kinds in ("LLGLLGL", "GGG", "GLLL", "L")] == [3, 1, 4, 1]


@pytest.mark.parametrize("unroll", [0, 1, 2])
@pytest.mark.parametrize("kinds", ["", "LLLLL", "LGLGL", "GGLLL", "LLGLLGL"])
def test_every_layer_is_applied_in_order_as_one_of_its_kind(kinds, unroll):
    weights = jnp.arange(1.0, len(kinds or "12345") + 1)

    def step(x, weight, number):
        assert (number is None) == (not kinds)
        return 3 * x + weight, (weight, jnp.asarray(0 if number is None else kinds[number - 2] == "G"))

    x, (seen, everywhere) = loop(step, jnp.asarray(0.5), weights, unroll, kinds, first=2)
    want = 0.5
    for weight in weights:
        want = 3 * want + weight
    assert x == want
    np.testing.assert_array_equal(seen, weights)
    np.testing.assert_array_equal(everywhere, [kind == "G" for kind in kinds] or [False] * 5)


@pytest.mark.parametrize(("family", "keys"), [
    ("gemma3", dict(model__num_layers=5, train__unroll=1)),  # L G L G L
    *slow(("qwen2", dict(model__num_layers=4, train__unroll=1))),  # G L L L
    *exhaustive(("gemma3", dict(model__num_layers=5, train__unroll=0)), ("gpt_oss", dict(train__unroll=1)),
                ("gemma3", dict(model__num_layers=6, train__unroll=2, train__remat="full"))),
])
def test_no_branch_is_left_and_the_numbers_are_those_of_plain_layers(family, keys):
    run = reference.build(family, (1, 2, 1), **keys)
    text = run.lower().as_text()
    assert text.count("stablehlo.case") + text.count("stablehlo.if") <= 1, "more than whether to update at all"
    reference.check(run, family, steps=2)


@pytest.mark.slow
def test_a_pipeline_learns_the_kind_when_it_runs():
    run = reference.build("gemma3", (1, 1, 1), mesh__stage=2, model__num_layers=4, train__accumulation=2)
    reference.check(run, "gemma3", steps=2)
