"""Compressed progress is the same on all islands, and what a codec loses is sent later."""

import chex
import jax
import numpy as np
import pytest

from jaxtrain.config.sections.diloco_keys import DilocoConfig
from jaxtrain.diloco import outer_exchange
from jaxtrain.diloco.payload import LowRank, make_payload
from jaxtrain.errors import UserError
from jaxtrain.parallel.compression import codecs, payload_bytes
from jaxtrain.plan.cost import island_time
from tests.diloco import plain_power_sgd
from tests.diloco.archipelago import numbers, outer_state
from tests.diloco.test_island_runs import rows_of
from tests.diloco.tiny_islands import agree, few, tiny, vector
from tests.tiers import exhaustive, slow


@pytest.mark.parametrize("compression", ["int4", *slow("power_sgd"), *exhaustive("bfloat16", "int8", "top_k",
                                                                                 "random_k")])
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
    share = {"bfloat16": 0.01, "int8": 0.02, "int4": 0.2, "top_k": 1, "random_k": 1, "power_sgd": 0.6}[compression]
    assert np.linalg.norm(lost) < share * np.linalg.norm(moved)


def test_parameters_of_another_model_or_compressed_otherwise_are_refused_in_one_sentence():
    def payload(compression, rank, rows):
        config = DilocoConfig(count=2, compression=compression, rank=rank)
        return make_payload(config, [(None, (rows, 8)), (None, (3,))])

    small, large = ("power_sgd", 1, 8), ("power_sgd", 2, 8)
    for mine, other in ((("none", 4, 8), ("int8", 4, 8)), (("int8", 4, 8), ("none", 4, 8)), (("none", 4, 8),) * 2,
                        (("int8", 4, 8), ("int4", 4, 8)), (small, large), (small, ("none", 4, 8)),
                        (small, ("int8", 4, 8)), (("int8", 4, 8), small), (small, ("power_sgd", 1, 9))):
        rows = other[2] + (mine == other)
        content, _ = payload(*other[:2], rows).encode(np.zeros(8 * rows + 3, np.float32))
        with pytest.raises(UserError, match=r"^diloco.meeting: another island sent param"):
            payload(*mine).decode(content)


@pytest.mark.parametrize("compression", ["top_k", "random_k", "power_sgd"])
def test_what_a_codec_loses_is_sent_later(compression):
    """One island that sends few values: its parameters are the outer ones except for what is remembered.

    With random_k it sends other values in each exchange.
    """
    found = few(1, compression=compression, learning_rate=1.0, momentum=0.0)
    exchange, state, before, sent = found.exchanges[0], found.states[0], 0.0, []
    for step in range(1, 4):
        state, _ = found.steps[0](state, found.runs[0].sharded.place(rows_of(step, 0)))
        own, old = vector(state.params), vector(outer_state(state)["params"])
        state = exchange.finish(3 * step, exchange.offer(3 * step, state))
        outer = outer_state(state)
        np.testing.assert_allclose(own, vector(outer["params"]) - vector(outer["unsent"]) + before, atol=1e-6)
        before = vector(outer["unsent"])
        sent.append(np.flatnonzero(vector(outer["params"]) != old).tolist())
        assert np.count_nonzero(before) > 30
    assert len({*map(tuple, sent)}) == len(sent) or compression != "random_k", sent


PARTS = [(("layers", "embed", "mlp"), (3, 37, 10)), (("norm",), (37,)), (None, (20, 6, 5)),
         (("layers", "norm"), (3, 9)), (("every_layer", "embed", "mlp"), (2, 30, 8))]


def progress(count):
    """Arrays of which a part is the same in all, as an island's progress from exchange to exchange."""
    rng, same = np.random.default_rng([1, count]), np.random.default_rng(0)
    return [(same.normal(size=shape) + rng.normal(size=shape)).astype(np.float32) for _, shape in PARTS]


def test_factors_and_what_they_lack_are_those_of_plain_numpy():
    """Over several exchanges; vectors and matrices that would not become smaller arrive whole."""
    config = DilocoConfig(count=2, compression="power_sgd", rank=3)
    payload, plain, unsent = make_payload(config, PARTS), plain_power_sgd.Sender(3), None
    assert [codec.name for codec, _ in payload._parts.values()] == ["power_sgd", "exact", "power_sgd", "exact",
                                                                    "power_sgd"]
    for count in range(4):
        given = progress(count)
        content, unsent = payload.encode(np.concatenate([x.ravel() for x in given]), unsent, count)
        arrived = plain.sent({str(i): x for i, x in enumerate(given)}, lambda path: path[0].key in "034")
        lacking = {path[0].key: x for path, x in plain.unsent.items()}
        for got, want in ((payload.decode(content), arrived), (unsent, lacking)):
            want = np.concatenate([want[str(i)].ravel() for i in range(len(PARTS))])
            np.testing.assert_allclose(got, want, atol=2e-5)
    assert np.linalg.norm(unsent) > 1


def test_factors_of_full_rank_lose_no_more_than_float32_does():
    payload = LowRank([(codecs.make("power_sgd", {"rank": 37}, stacked=1), (3, 37, 10)), (codecs.Codec(), (5,))])
    given = np.random.default_rng(0).normal(size=3 * 37 * 10 + 5).astype(np.float32)
    content, unsent = payload.encode(given)
    np.testing.assert_allclose(payload.decode(content), given, atol=2e-6)
    np.testing.assert_allclose(unsent, given - payload.decode(content), atol=0)
    assert np.abs(unsent).max() < 2e-6


def test_factors_are_multiplied_and_added_one_after_the_other():
    """Each operation is rounded by itself, so that no processor makes other bits of them."""
    rng = np.random.default_rng(0)
    payload = LowRank([(codecs.make("power_sgd", {"rank": 5}, stacked=1), (2, 50, 40))])
    content, _ = payload.encode(rng.normal(size=2 * 50 * 40).astype(np.float32))
    (_, factors, _), = payload_bytes.from_bytes(content).values()
    want = np.zeros((2, 50, 40), np.float32)
    for rank in range(5):
        want = want + factors["left"][:, :, None, rank] * factors["right"][:, None, :, rank]
    np.testing.assert_array_equal(payload.decode(content), want.ravel())


def test_at_full_rank_islands_are_those_that_compress_nothing():
    """Their matrices would not become smaller, and are sent whole: progress is, instead of parameters."""
    found, exact = few(compression="power_sgd", rank=8), few()
    for one in (found, exact):
        one.train(12)
    np.testing.assert_allclose(found.losses, exact.losses, rtol=1e-6)
    np.testing.assert_allclose(vector(found.states[0].params), vector(exact.states[0].params), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("section", [{}, dict(mode="gossip"), dict(every=4, fragments=2, rank=2)], ids=str)
def test_the_bytes_of_factors_are_those_that_are_planned(section):
    """But for the headers."""
    found = few(2, compression="power_sgd", **section)
    run, every = found.runs[0], found.config.every
    found.train(every)
    sent = sum(len(content) - 8 - int.from_bytes(content[4:8], "little") for content in found.meeting.contents.values())
    planned = island_time.progress_bytes(found.config, run.abstract.params, run.layout.axes)
    assert planned == {1: 4 * (3 + 8 + 8 + 2), 2: 4 * (2 * (3 + 8) + 8 * 2)}[found.config.rank]
    whole = 4 * 40 if found.config.mode == "gossip" else 0
    assert sent == 2 * (planned + whole)
    modes = island_time.modes(found.config, 1.0, 40, 1e9, progress=planned)
    name = {"sync": "DiLoCo", "gossip": "gossip"}[found.config.mode]
    assert next(one.sent for one in modes if one.name == name) * every * 2 == pytest.approx(sent)


def test_all_processes_of_an_island_take_what_the_first_one_made(monkeypatch):
    """The hosts of others may round a product of matrices otherwise."""
    first, other = (few(1, compression="power_sgd") for _ in range(2))
    (payload,), told = other.exchanges[0]._replica.payloads, []
    encode = payload.encode

    def rounded_otherwise(vector, unsent=None, count=0):
        content, lacking = encode(np.nextafter(vector, np.float32(9)), unsent, count)
        return content, lacking

    monkeypatch.setattr(payload, "encode", rounded_otherwise)
    monkeypatch.setattr(outer_exchange, "of_first", lambda vector: told.append(vector) or vector)
    first.train(3)
    assert len(told) == 2
    monkeypatch.setattr(outer_exchange, "of_first", lambda vector: told.pop(0))
    other.train(3)
    chex.assert_trees_all_equal(numbers(other.states[0].params), numbers(first.states[0].params))
    chex.assert_trees_all_equal(outer_state(other.states[0]), outer_state(first.states[0]))
    assert other.meeting.log == first.meeting.log
