"""Compressed progress is the same on all islands, and what a codec loses is sent later."""

import jax
import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.islands.payload import make_payload
from tests.islands.archipelago import numbers, outer_state
from tests.islands.test_island_runs import rows_of
from tests.islands.tiny_islands import agree, few, tiny, vector


@pytest.mark.parametrize("compression", ["int4", *(pytest.param(name, marks=pytest.mark.exhaustive)
                                                   for name in ("bfloat16", "int8", "top_k", "random_k"))])
def test_what_is_sent_in_few_bits_is_the_same_on_all_islands(compression):
    found = few(compression=compression)
    found.train(12)
    agree(found)
    exact = few()
    exact.train(12)
    moved, lost = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (
        jax.tree.map(lambda a, b: a - b, numbers(exact.states[0].params), numbers(tiny()[0].init().params)),
        jax.tree.map(lambda a, b: a - b, numbers(exact.states[0].params), numbers(found.states[0].params))))
    # top_k and random_k send one value of 40 in each exchange: the rest is remembered.
    share = {"bfloat16": 0.01, "int8": 0.02, "int4": 0.2, "top_k": 1, "random_k": 1}[compression]
    assert np.linalg.norm(lost) < share * np.linalg.norm(moved)


def test_parameters_of_another_model_or_compressed_otherwise_are_refused_in_one_sentence():
    vector = np.zeros(64, np.float32)
    for mine, other, size in (("none", "int8", 64), ("int8", "none", 64), ("int8", "int4", 64), ("none", "none", 32)):
        content, _ = make_payload(other).encode(vector)
        with pytest.raises(UserError, match=r"^islands.meeting: another island sent param"):
            make_payload(mine).decode(content, size)


@pytest.mark.parametrize("compression", ["top_k", "random_k"])
def test_what_a_codec_loses_is_sent_later(compression):
    """One island that sends few values: its parameters are the outer ones except for what is remembered.

    With random_k it sends other values in each exchange.
    """
    found = few(1, compression=compression, learning_rate=1.0, momentum=0.0)
    exchange, state, before, sent = found.exchanges[0], found.states[0], 0.0, []
    for step in range(1, 4):
        state, _ = found.steps[0](state, found.runs[0].place(rows_of(step, 0)))
        own, old = vector(state.params), vector(outer_state(state)["params"])
        state = exchange.finish(3 * step, exchange.offer(3 * step, state))
        outer = outer_state(state)
        np.testing.assert_allclose(own, vector(outer["params"]) - vector(outer["unsent"]) + before, atol=1e-6)
        before = vector(outer["unsent"])
        sent.append(np.flatnonzero(vector(outer["params"]) != old).tolist())
        assert np.count_nonzero(before) > 30
    assert len({*map(tuple, sent)}) == len(sent) or compression == "top_k", sent
