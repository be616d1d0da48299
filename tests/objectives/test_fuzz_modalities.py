"""A few drawn cases of families that are not decoders of text; tests/objectives/fuzz.py runs more."""

import random

import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.validation import explains
from tests.objectives import fuzz_modalities

# Clips with gradients in 8 bits, events over context with little trained, pairs in micro-batches; then others.
SLOW, ALL = (8, 17, 25), 8


def drawn(seed: int):
    """The first case that is not refused, of those that this seed draws; refusals must be explained."""
    rng = random.Random(1000 + seed)
    while True:
        keys = fuzz_modalities.draw(rng, 8)
        try:
            jt.build(fuzz_modalities.config_of(keys), devices=8)
            return keys
        except jt.UserError as refusal:
            assert explains(refusal), f"refused, but no row of jaxtrain/validation.py says why: {refusal}"


@pytest.mark.parametrize("seed", [*(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW),
                                  *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(ALL))])
def test_a_drawn_case_has_the_numbers_of_the_formulas(seed):
    keys = drawn(seed)
    try:
        fuzz_modalities.check(keys)
    except AssertionError as error:
        pytest.fail(f"{error}, with {keys}")


@pytest.mark.exhaustive
def test_a_gradient_that_is_off_by_a_thousandth_fails(monkeypatch):
    truth, keys = fuzz_modalities.truth, drawn(4) | {"train.precision": "float32"}

    def off(*args):
        params, loss, grads = truth(*args)
        return params, loss, grads | {"labels": grads["labels"] * np.float32(1.001)}

    monkeypatch.setattr(fuzz_modalities, "truth", off)
    with pytest.raises(AssertionError, match=r"(gradient|norm) is off by"):
        fuzz_modalities.check(keys)
