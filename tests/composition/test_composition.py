"""A handful of random combinations in every run; `python -m tests.composition.fuzz --cases=N --seed=S` runs more."""

import functools
import random
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.kernels.chunks import chunk_kernels
from jaxtrain.run.validation import explains
from jaxtrain.train_step import precision
from tests.composition import fuzz

SLOW, ALL = 1, 12


@pytest.fixture(autouse=True)
def what_cases_set(monkeypatch):
    """Put back what cases set: what interprets kernels of states, and the dtype beside narrow formats."""
    monkeypatch.setattr(chunk_kernels, "INTERPRET", "")
    monkeypatch.setitem(precision.DTYPES, "bfloat16", jnp.bfloat16)


@functools.cache
def case(seed: int):
    """The first config that is not refused, of those that this seed draws; refusals must be explained."""
    rng = random.Random(1000 + seed)
    while True:
        keys = fuzz.draw(rng, 8)
        try:
            jt.build(fuzz.config_of(keys), devices=8)
            return keys
        except jt.UserError as refusal:
            assert explains(refusal), f"refused, but no row of jaxtrain/run/validation.py says why: {refusal}"


def check(seed):
    try:
        fuzz.check(case(seed))
    except AssertionError as error:
        pytest.fail(f"{error}, with {case(seed)}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SLOW))
def test_any_combination_gives_the_numbers_of_one_device(seed):
    check(seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(SLOW, ALL))
def test_more_combinations_give_the_numbers_of_one_device(seed):
    check(seed)


@pytest.mark.exhaustive
def test_combinations_on_sixteen_devices():
    command = [sys.executable, "-m", "tests.composition.fuzz", "--cases=3", "--seed=5", "--devices=16"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.exhaustive
def test_a_gradient_that_is_off_by_a_thousandth_fails(monkeypatch):
    truth = fuzz._truth

    def off(*args):
        params, loss, grads, *rest = truth(*args)
        grads = dict(grads, norm=jax.tree.map(lambda g: g * np.float32(1.001), grads["norm"]))
        return params, loss, grads, *rest

    keys = fuzz.draw(random.Random(0), 1) | {"train.precision": "float32", "train.accumulation": 1, "train.freeze": []}
    fuzz.check(keys)
    monkeypatch.setattr(fuzz, "_truth", off)
    with pytest.raises(AssertionError, match=r"gradient( of value_and_grad)? is off by .* at .*norm"):
        fuzz.check(keys)


def test_a_zero_bubble_schedule_defers_no_gradient_of_a_convolution():
    """Its kernel is no product's weight: reading it as one ended in a traceback."""
    keys = {"mesh.stage": 2, "pipeline.schedule": "zb_h1", "model.num_layers": 4, "family": "bamba"}
    run = jt.build(fuzz.config_of(keys | {"data.seq_len": fuzz.SEQ, "model.max_seq_len": fuzz.SEQ}), devices=2)
    assert run.lower()
