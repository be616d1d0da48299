"""A few drawn cases of families that are not decoders of text; tests/objectives/fuzz.py runs more."""

import random

import pytest

import jaxtrain as jt
from jaxtrain.validation import explains
from tests.objectives import fuzz_modalities

SLOW, ALL = (0, 1, 2), 9


def drawn(seed: int):
    """The first case that is not refused, of those that this seed draws; refusals must be explained."""
    rng = random.Random(1000 + seed)
    while True:
        keys = fuzz_modalities.draw(rng, 8)
        try:
            return keys, fuzz_modalities.check(keys)
        except jt.UserError as refusal:
            assert explains(refusal), f"refused, but no row of jaxtrain/validation.py says why: {refusal}"
        except AssertionError as error:
            pytest.fail(f"{error}, with {keys}")


@pytest.mark.parametrize("seed", [
    pytest.param(seed, marks=pytest.mark.slow if seed in SLOW else pytest.mark.exhaustive) for seed in range(ALL)])
def test_a_drawn_case_has_the_numbers_of_the_formulas(seed):
    drawn(seed)
