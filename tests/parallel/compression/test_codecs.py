"""Codecs are what plain NumPy says, forget nothing, and send as many bytes as the formula says."""

import math

import jax
import numpy as np
import pytest

from jaxtrain.parallel.compression import codecs
from tests.parallel.compression import plain_codecs

SHAPE = (3, 37, 10)
N = math.prod(SHAPE)
CODECS = {
    "exact": codecs.make("exact"), "int8": codecs.make("int8", {"block": 64}), "int4": codecs.make("int4"),
    "top_k": codecs.make("top_k", {"ratio": 0.1, "block": 100}), "random_k": codecs.make("random_k", {"ratio": 0.1}),
    "power_sgd": codecs.make("power_sgd", {"rank": 2}, stacked=1)}
BYTES = {
    "exact": 4 * N, "int8": 18 * (64 + 4), "int4": 18 * (32 + 4), "top_k": 12 * 10 * (4 + 2),
    "random_k": 4 * N // 10 + 4, "power_sgd": 4 * 3 * 2 * (37 + 10)}


def arrays(many):
    """Return arrays that do not average out: one part is the same in all."""
    rng = np.random.default_rng(0)
    same = rng.normal(size=SHAPE)
    return [(same + rng.normal(size=SHAPE) * 10 ** rng.uniform(-1, 1, SHAPE)).astype(np.float32) for _ in range(many)]


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_is_what_plain_numpy_says(name):
    """Over several arrays: what arrives is the codec's of the array and the error so far, and no error is lost."""
    codec = CODECS[name]
    state, error, given, got = codec.begin(SHAPE), np.zeros(SHAPE, np.float32), 0.0, 0.0
    right = np.asarray(state.get("right", 0))
    step = jax.jit(codec.encode)
    for count, x in enumerate(arrays(6)):
        payload, state = step(x, state)
        assert sum(np.asarray(a).nbytes for a in payload.values()) == codec.size(SHAPE) == BYTES[name]
        arrived = np.asarray(codec.decode(payload, SHAPE))
        want, right = plain_codecs.arrived(codec, x + error, count, right)
        # Where a value lies half-way between two levels, either is right.
        np.testing.assert_allclose(arrived, want, atol=2e-5 * np.abs(x).max())
        error = x + error - arrived
        given, got = given + x, got + arrived
        if "error" in state:
            np.testing.assert_allclose(got + np.asarray(state["error"]), given, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CODECS if name != "exact"])
def test_the_mean_of_what_arrives_becomes_that_of_what_is_given(name):
    """The remembered error stays bounded, so its share of the sum falls as 1 / steps."""
    codec = CODECS[name]

    @jax.jit
    def many(x, state):
        def one(carry, _):
            state, got = carry
            payload, state = codec.encode(x, state)
            return (state, got + codec.decode(payload, SHAPE)), None
        return jax.lax.scan(one, (state, x * 0), None, length=400)[0]

    x = arrays(1)[0]
    _, got = many(x, codec.begin(SHAPE))
    off = np.linalg.norm(np.asarray(got) / 400 - x) / np.linalg.norm(x)
    assert off < {"int8": 1e-4, "int4": 2e-3}.get(name, 0.06), off


def test_the_error_of_a_value_is_half_a_level():
    for name, levels in (("int8", 127), ("int4", 7)):
        codec, x = CODECS[name], arrays(1)[0]
        payload, state = codec.encode(x, codec.begin(SHAPE))
        scales = np.repeat(np.asarray(payload["scales"]), codec.block)[:N].reshape(SHAPE)
        assert (np.abs(np.asarray(state["error"])) <= scales * 0.5001).all()
        assert np.abs(x).max() == pytest.approx(levels * scales.max())


def test_what_is_not_finite_arrives_as_such():
    x = arrays(1)[0]
    x[0, 0, 0], x[1, 2, 3] = np.inf, np.nan
    for name in ("int8", "int4", "top_k"):
        payload, _ = CODECS[name].encode(x, CODECS[name].begin(SHAPE))
        assert not np.isfinite(np.asarray(CODECS[name].decode(payload, SHAPE))).all()


def test_an_array_that_would_not_become_smaller_is_sent_as_it_is():
    assert codecs.for_shape(codecs.make("int8"), (8,)).name == "exact"
    assert codecs.for_shape(codecs.make("power_sgd"), (4, 1000)).name == "exact"
    assert codecs.for_shape(codecs.make("power_sgd"), (64, 64)).name == "power_sgd"
    assert codecs.make("power_sgd", stacked=1).matrices((5, 32, 8, 4)) == (5, 32, 32)


@pytest.mark.parametrize(("method", "settings", "word"), [
    ("int8", {"block": 3}, "block"), ("top_k", {"ratio": 0.0}, "ratio"), ("top_k", {"block": 2**17}, "block"),
    ("random_k", {"ratio": 1.5}, "ratio"), ("power_sgd", {"rank": 0}, "rank"), ("gzip", {}, "method")])
def test_wrong_settings_are_one_sentence(method, settings, word):
    with pytest.raises(ValueError, match=f"^{word}: "):
        codecs.make(method, settings)
