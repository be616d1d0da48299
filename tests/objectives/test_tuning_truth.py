"""Losses of preferences, labels and policy gradients are TRL's (tuning_truth.py), and so are their gradients."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.sections.tuning_keys import PreferenceConfig, RLConfig
from jaxtrain.objectives import kto, policy_gradient, preference, reward_model
from jaxtrain.objectives.reference_policy import REFERENCE, Segments
from jaxtrain.tuning.rewards import advantages_of, with_lengths
from jaxtrain.tuning.values import Valued, known_of
from tests.objectives.tuning_numbers import LENGTH, PAIRS, numbers, scores_of, values

TRUTH = json.loads(Path(__file__).with_name("tuning_truth.json").read_text())
MASK, POLICY, REFERENCED, SAMPLED, ADVANTAGES = numbers(2 * PAIRS)


def test_trl_made_the_truth():
    assert TRUTH["versions"].keys() == {"torch", "trl", "ppo"}


def compare(mean, name, kind):
    truth = TRUTH[kind][name]
    loss, gradient = jax.value_and_grad(mean)(jnp.asarray(POLICY, jnp.float32))
    assert float(loss) == pytest.approx(truth["loss"], rel=1e-5)
    want = np.where(MASK, truth["gradient"], 0)  # TRL sums what is behind an answer too, where a model gives zeros
    scale = np.abs(want).max()
    np.testing.assert_allclose(gradient, want, atol=1e-5 * scale)


@pytest.mark.parametrize("name", TRUTH["preference"])
def test_preferences(name):
    settings = PreferenceConfig(**TRUTH["preference"][name]["keys"])

    def rows(x):  # the chosen and the rejected answer of a pair behind each other
        return jnp.concatenate([x[:PAIRS], x[PAIRS:]], 1)

    def mean(policy):
        segments = rows(jnp.asarray(MASK * np.repeat([[1], [2]], PAIRS, 0)))
        batch = {"answers": rows(jnp.asarray(MASK, jnp.float32)), "policy": rows(policy), "rewards": rows(policy),
                 REFERENCE: rows(jnp.asarray(REFERENCED, jnp.float32)),
                 "positions": rows(jnp.broadcast_to(jnp.arange(LENGTH), MASK.shape))}
        of_rows = reward_model._of_rows if settings.reward_head else preference._of_rows
        return of_rows(settings, batch, Segments(segments, ()))[0] / PAIRS

    compare(mean, name, "preference")


@pytest.mark.parametrize("name", TRUTH["kto"])
def test_kto(name):
    settings, mask = PreferenceConfig(**TRUTH["kto"][name]["keys"]), jnp.asarray(MASK, jnp.float32)
    segments = Segments(jnp.asarray(MASK, jnp.int32), ())
    sign = 1 if (SAMPLED.sum() > REFERENCED.sum()) == (name == "kto") else -1
    positions = jnp.broadcast_to(jnp.arange(LENGTH), MASK.shape)
    others = {"answers": mask, "policy": jnp.asarray(sign * SAMPLED, jnp.float32), "positions": positions,
              REFERENCE: mask * sign * REFERENCED}
    total, count = kto._mismatched(others, segments)
    z = max(float(total / count), 0)
    assert z == pytest.approx(TRUTH["kto"][name]["kl"], rel=1e-5) and (z > 0) == (name == "kto")
    desirable = jnp.arange(2 * PAIRS)[:, None] % 3 > 0

    def mean(policy):
        batch = {"answers": mask, "policy": policy, REFERENCE: jnp.asarray(REFERENCED, jnp.float32),
                 "labels": mask * desirable, kto.BASELINE: jnp.full(MASK.shape, z)}
        return kto._of_rows(settings, batch, segments)[0] / (2 * PAIRS)

    compare(mean, name, "kto")


@pytest.mark.parametrize("name", TRUTH["policy_gradient"])
def test_policy_gradients(name):
    keys = dict(TRUTH["policy_gradient"][name]["keys"])
    mask = MASK & ~np.isin(np.arange(len(MASK)), keys.pop("truncated", []))[:, None]
    settings = RLConfig(prompts="a", reward="b", max_new_tokens=20, **keys)
    learnt = jnp.asarray(mask, jnp.float32)

    def mean(policy):
        batch = {"learnt": learnt, "policy": policy, "entropy": learnt, "sampled": jnp.asarray(SAMPLED, jnp.float32),
                 "advantages": learnt * jnp.asarray(ADVANTAGES, jnp.float32)[:, None], "rewards": learnt,
                 "answers": learnt} | ({REFERENCE: jnp.asarray(REFERENCED, jnp.float32)} if settings.kl else {})
        divisor = mask.sum() if settings.loss == "dapo" else len(mask)
        return policy_gradient._of_rows(settings, batch, Segments(jnp.asarray(MASK, jnp.int32), ()))[0] / divisor

    compare(mean, name, "policy_gradient")


@pytest.mark.parametrize("name", TRUTH["rewards"])
def test_several_rewards_and_lengths(name):
    settings = RLConfig(prompts="a", reward="b, c", **TRUTH["rewards"][name]["keys"])
    scores = with_lengths(settings, *scores_of(len(TRUTH["rewards"][name]["advantages"]) // settings.group_size,
                                               settings.group_size))
    np.testing.assert_allclose(advantages_of(settings, scores), TRUTH["rewards"][name]["advantages"], atol=1e-9)


@pytest.mark.parametrize("name", TRUTH["ppo"])
def test_critics(name):
    truth, (before, now) = TRUTH["ppo"][name], values(2 * PAIRS)
    settings = RLConfig(prompts="a", reward="b", baseline="value", clip_high=0.0, **truth["keys"])
    answers = [Valued("", (), None, "stop", values=tuple(row[there])) for row, there in zip(before, MASK, strict=True)]
    known = known_of(settings, ADVANTAGES, answers)  # these are the rewards
    found = {key: np.zeros(MASK.shape) for key in ("advantages", "returns")}
    for key, array in found.items():
        array[MASK] = np.concatenate([one[key] for one in known])
        np.testing.assert_allclose(array, np.where(MASK, truth[key], 0), rtol=1e-6, atol=1e-7)
    learnt = jnp.asarray(MASK, jnp.float32)
    arrays = {key: jnp.asarray(x, jnp.float32) for key, x in (found | {"values": before, "sampled": SAMPLED}).items()}

    def mean(policy, expected):
        batch = arrays | dict.fromkeys(("learnt", "rewards", "answers", "entropy"), learnt) | {
            "policy": policy, "expected": expected}
        loss, sums = policy_gradient._of_rows(settings, batch, Segments(jnp.asarray(MASK, jnp.int32), ()))
        return loss / MASK.sum(), {key: sums[key] / MASK.sum() for key in policy_gradient.VALUE_METRICS}

    (loss, told), gradients = jax.value_and_grad(mean, (0, 1), has_aux=True)(
        *(jnp.asarray(x, jnp.float32) for x in (POLICY, now)))
    assert float(loss) == pytest.approx(truth["loss"], rel=1e-5)
    assert {key: float(x) for key, x in told.items()} == pytest.approx(
        {key: truth[key] for key in policy_gradient.VALUE_METRICS}, rel=1e-5)
    for got, key in zip(gradients, ("gradient", "values"), strict=True):
        np.testing.assert_allclose(got, truth[key], atol=1e-5 * np.abs(truth[key]).max())
