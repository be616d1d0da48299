"""The tokens that may be chosen, against plain numpy."""

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.hub.sampling import Sampling, choose, kept, penalized

VOCAB = 50
LOGITS = np.random.default_rng(0).standard_normal((200, VOCAB)).astype(np.float32) * 3


def allowed(logits, how):
    """The tokens of one row that may be chosen, one condition after the other."""
    left = np.argsort(-logits, kind="stable")[:how.top_k or VOCAB]
    scores = logits[left].astype(np.float64) / how.temperature
    chances = np.exp(scores - scores.max())
    chances /= chances.sum()
    together, found = 0.0, []
    for token, chance in zip(left, chances, strict=True):
        if found and (together >= how.top_p or chance < how.min_p * chances[0]):
            break
        found.append(int(token))
        together += chance
    return set(found)


@pytest.mark.parametrize("how", [
    Sampling(0.7, top_k=5), Sampling(1.3, top_p=0.8), Sampling(1.0, min_p=0.1), Sampling(0.9, top_k=10, top_p=0.6),
    Sampling(1.0, top_k=20, top_p=0.9, min_p=0.02), Sampling(1.0, top_p=1e-6)], ids=str)
def test_the_filters_are_those_of_numpy(how):
    order = np.argsort(-LOGITS, axis=-1, kind="stable")
    passed = np.asarray(kept(np.take_along_axis(LOGITS, order, -1) / how.temperature, how.numbers()))
    keys = jax.random.split(jax.random.key(1), len(LOGITS))
    chosen = np.asarray(choose(LOGITS, keys, how.numbers(), True))
    noise = np.asarray(jax.vmap(lambda key: jax.random.gumbel(key, (VOCAB,)))(keys))
    for row, logits in enumerate(LOGITS):
        want = allowed(logits, how)
        assert set(order[row][passed[row]].tolist()) == want
        assert chosen[row] == max(want, key=lambda token: logits[token] / how.temperature + noise[row, token])


def test_the_penalty_is_that_of_numpy():
    seen = np.random.default_rng(1).random(LOGITS.shape) < 0.3
    want = [[(x / 1.5 if x > 0 else x * 1.5) if s else x for x, s in zip(*row, strict=True)]
            for row in zip(LOGITS, seen, strict=True)]
    np.testing.assert_allclose(penalized(LOGITS, seen, np.float32(1.5)), np.float32(want), rtol=1e-6)


@pytest.mark.parametrize("keys", [dict(temperature=-1), dict(temperature=float("nan")), dict(top_k=-1), dict(top_p=0),
                                  dict(top_p=1.1), dict(min_p=-0.1), dict(repetition_penalty=0)], ids=str)
def test_what_is_out_of_range_is_refused(keys):
    with pytest.raises(jt.UserError, match=f"^{next(iter(keys))}: .* is out of range; give "):
        Sampling(**keys)
