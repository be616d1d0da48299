"""A few drawn cases of families that are not decoders of text; tests/objectives/fuzz.py runs more."""

import random

import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.run.validation import explains
from tests.objectives import fuzz_modalities
from tests.tiers import exhaustive, slow


# Pairs in micro-batches through a pipeline; then events over context with little trained, clips with gradients in 8
# bits, and others.
@pytest.mark.parametrize("seed", [*slow(42), *exhaustive(17, 268, *range(8))])
def test_a_drawn_case_has_the_numbers_of_the_formulas(seed):
    rng, done = random.Random(1000 + seed), None
    while not done:  # the first case that is not refused
        keys = fuzz_modalities.draw(rng, 8)
        try:
            done = fuzz_modalities.check(keys)
        except jt.UserError as refusal:
            assert explains(refusal), f"refused, but no row of jaxtrain/run/validation.py says why: {refusal}"
        except AssertionError as error:
            pytest.fail(f"{error}, with {keys}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "keys"), [
    ("siglip", {"mesh.fsdp": 2, "mesh.context": 2, "mesh.tensor": 2, "mesh.context_strategy": "ring"}),
    ("whisper", {"mesh.data": 2, "mesh.tensor": 2, "train.accumulation": 2}),
    ("clips", {"mesh.fsdp": 2, "mesh.tensor": 2, "train.remat": "attention"}),
    ("image_flow", {"mesh.context": 4, "train.remat": "full"})])
def test_kernels_have_the_numbers_of_the_formulas(family, keys):
    given = {f"mesh.{axis}": 1 for axis in fuzz_modalities.AXES} | {
        "family": family, "batch": 0, "train.precision": "float32", "optimizer.name": "adamw", "mesh.rules": "fsdp_tp",
        "train.accumulation": 1, "train.attention": "splash", "mesh.context_strategy": "ulysses"}
    shape = fuzz_modalities.SHAPES[family][-1 if family != "whisper" else 0]
    fuzz_modalities.check(given | {f"model.{key}": value for key, value in shape.items()} | keys)


@pytest.mark.exhaustive
def test_a_gradient_that_is_off_by_a_thousandth_fails(monkeypatch):
    truth, keys = fuzz_modalities.truth, fuzz_modalities.draw(random.Random(1032), 8)
    assert keys["family"] == "image_flow" and keys["train.precision"] == "float32"

    def off(*args):
        params, loss, grads = truth(*args)
        return params, loss, grads | {"labels": grads["labels"] * np.float32(1.001)}

    monkeypatch.setattr(fuzz_modalities, "truth", off)
    with pytest.raises(AssertionError, match=r"(gradient|norm) is off by"):
        fuzz_modalities.check(keys)
