"""The number of steps that so many epochs take."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest

from jaxtrain.config.schema import DataConfig
from jaxtrain.data.loading.batch_function import BatchFunction
from jaxtrain.data.loading.batches import train_batches
from jaxtrain.data.loading.epochs import passes, steps_in
from jaxtrain.data.loading.island_part import IslandPart
from jaxtrain.data.loading.loader import Batches
from jaxtrain.errors import UserError
from tests.data.loading.test_curriculum import corpora, own_cache  # noqa: F401 (a fixture)


def test_they_are_rounded_up_to_whole_steps():
    rng = random.Random(0)
    for _ in range(200):
        rows, size, epochs = rng.randint(1, 400), rng.randint(1, 40), rng.choice([0.01, 0.1, 0.3, 1, 2, 3.7, 50])
        batches = Batches([{}] * rows, global_batch_size=size, seed=0)
        assert steps_in(batches, epochs) == max(1, math.ceil(epochs * rows / size - 1e-9)), (rows, size, epochs)


def test_a_step_that_completes_an_epoch_but_for_a_rounding_error_completes_it():
    assert 49 * (1 / 49) < 1
    assert steps_in(SimpleNamespace(num_batches=None, passes=lambda step: step * (1 / 49)), 1) == 49


def mixture(**keys):
    return DataConfig(**{"seq_len": 16, "global_batch_size": 8} | keys)


def test_an_epoch_of_a_mixture_is_as_many_rows_as_its_sources_hold_together(own_cache):  # noqa: F811
    corpus = corpora(random.Random(1), ["a", "b"])
    sources = {"a": {"source": "a", "weight": 3}, "b": {"source": "b"}}
    batches = train_batches(mixture(mixture=sources), corpus)
    rows = sum(len(train_batches(mixture(), corpus.part(name)).all_rows) for name in ("a", "b"))
    assert steps_in(batches, 1) == math.ceil(rows / 8) and steps_in(batches, 2.5) == math.ceil(2.5 * rows / 8)
    assert batches.epochs(steps_in(batches, 1))["a"] > 1 > batches.epochs(steps_in(batches, 1))["b"]
    part = IslandPart(batches, 0, 2)  # of which another island makes the other half
    assert passes(part, 5) == passes(batches, 5) and steps_in(part, 1) == steps_in(batches, 1)


def test_a_mixture_that_ends_earlier_is_refused(own_cache):  # noqa: F811
    corpus = corpora(random.Random(1), ["a", "b"])
    batches = train_batches(mixture(mixture={name: {"source": name, "epochs": 1} for name in "ab"}), corpus)
    with pytest.raises(UserError, match=rf"^train.epochs: the data end at step {batches.num_batches}, after "):
        steps_in(batches, 1.5)
    assert steps_in(batches, 0.5) <= batches.num_batches


def test_the_shapes_of_stages_count(own_cache):  # noqa: F811
    corpus = corpora(random.Random(1), ["a"])
    plain = {"mixture": {"a": {"source": "a"}}}
    later = mixture(stages=[{"from_step": 3, "global_batch_size": 24}], **plain)
    one, two = (train_batches(config, corpus) for config in (mixture(**plain), later))
    assert steps_in(two, 2) == 3 + math.ceil((steps_in(one, 2) - 3) / 3)


def test_batches_of_ones_own():
    def batch(step):
        return {"x": np.zeros((2, 4))}
    five = BatchFunction(batch, num_batches=5)
    several = SimpleNamespace(num_batches=None, epochs=lambda step: {"a": 0.0, "b": 0.0})
    assert steps_in(five, 1) == 5 and steps_in(five, 0.5) == 3
    for batches, words in (
            (BatchFunction(batch), "the batches given by data= have no known length; give train.steps, or give"),
            (five, "the data end at step 5, after 1 epochs; give fewer"),
            (several, "count epochs over a, b, each"),
            (SimpleNamespace(num_batches=None, epochs=lambda step: {"": 0.0}), "2 epochs take more than ")):
        with pytest.raises(UserError, match=words):
            steps_in(batches, 2)
