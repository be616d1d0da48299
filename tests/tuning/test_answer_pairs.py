"""Preference losses of a run's own answers: what rows hold, that their reward rises, and what is refused."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.hub.generate import Generated
from jaxtrain.tuning.answer_pairs import AnswerPairs
from jaxtrain.tuning.rollout_files import Round
from tests.objectives import plain_preference
from tests.tuning.test_rollouts import config, files, on_four  # noqa: F401

pytestmark = pytest.mark.usefixtures("cache")
PAIRS = dict(preference__loss="dpo", data__seq_len=32, data__global_batch_size=4)


@pytest.mark.slow
def test_rows_hold_the_best_and_the_worst_answer_of_each_group(files):  # noqa: F811
    run = jt.build(config(files, **PAIRS))
    run.see(0, state := run.init())
    batch, (one, *_) = run.data[0], run.data._rounds.values()
    assert len(one.answers) == 16 and len(set(one.numbers)) == 4
    for row in range(4):
        column = {name: array[row] for name, array in batch.items()}
        answers, prompt = one.answers[4 * row:4 * row + 4], run.data.prompts[one.numbers[4 * row]]
        rewards = [sum(map(ord, answer.text)) % 2 for answer in answers]
        if len(set(rewards)) == 1:
            assert not any(array.any() for array in column.values())
            continue
        for segment, wanted in ((1, max(rewards)), (2, min(rewards))):
            best = answers[rewards.index(wanted)]
            ids, at = [*prompt, *best.tokens, *(best.end or ())[:1]], np.flatnonzero(column["segments"] == segment)
            assert column["tokens"][at].tolist() == ids[:-1] and column["targets"][at].tolist() == ids[1:]
            assert column["positions"][at].tolist() == list(range(len(at)))
            assert column["weights"][at].tolist() == [0] * (len(prompt) - 1) + [1] * (len(ids) - len(prompt))
    pairs = int(batch["segments"].max(1).astype(bool).sum())
    assert 0 < pairs < 4, "every case is to be there"

    def loss(policy):
        return plain_preference.loss(run.config.preference, run.config.model, policy, params, batch)[0]

    params = jax.device_get(state.params)
    moved = jax.tree.map(lambda w: w * np.float32(1.1), params)
    placed = jax.tree.map(lambda w, was: jax.device_put(w, was.sharding), moved, state.params)
    value, gradient = run.value_and_grad(replace(state, params=placed), batch)
    want, wanted = jax.value_and_grad(loss)(moved)
    assert float(value) == pytest.approx(float(want), rel=1e-5)
    for got, right in zip(jax.tree.leaves(jax.device_get(gradient)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-3, atol=1e-5 * np.abs(right).max() + 1e-8)
    _, metrics = run.step(state, run.batch(0))
    assert float(metrics["loss"]) == pytest.approx(math.log(2), rel=1e-5), "the policy is its reference still"
    assert float(metrics["pairs"]) == pairs


@pytest.mark.parametrize(("masks", "rewards", "pair"), [
    (False, [1, 3, 2, 0], (1, 3)), (True, [1, 3, 2, 0], (2, 0)), (False, [0.1 + 0.2, 0.3, 0.3, 0.3], None),
    (True, [1, 5, 1, 7], None)])
def test_answers_that_were_cut_off_are_in_no_pair_where_they_are_not_trained_on(masks, rewards, pair):
    """The second answer and the last one reached the limit; sums that differ by rounding are equal."""
    answers = [Generated("", (7 + n,), (-1.0,), "length" if n % 2 else "stop") for n in range(4)]
    own = AnswerPairs.__new__(AnswerPairs)
    own.mask_truncated, own.seq_len, own.prompts = masks, 8, [[5, 6]]
    row = own._pair(Round([0] * 4, answers, 0), np.array(rewards, float), range(4))
    wanted = [] if pair is None else [6, 7 + pair[0], 6, 7 + pair[1]]
    assert row["targets"].tolist() == wanted + [0] * (8 - len(wanted))
    assert row["segments"].tolist() == ([] if pair is None else [1, 1, 2, 2]) + [0] * (8 - len(wanted))


@pytest.mark.slow
def test_rewards_rise(files, tmp_path):  # noqa: F811
    (tmp_path / "early.py").write_text("def early(answer, record):\n    return sum(c < 'P' for c in answer) / 6\n")
    run = jt.build(config(files, **PAIRS | dict(
        rl__reward=f"{tmp_path}/early.py:early", data__global_batch_size=16, optimizer__learning_rate=1e-2,
        optimizer__schedule="constant", train__steps=12)))
    state, rewards = run.init(), []
    for step in range(12):
        run.see(step, state)
        state, _ = run.step(state, run.batch(step))
        rewards.append(run.data.pop_fields()["reward"])
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1, rewards


@pytest.mark.parametrize(("keys", "why"), [
    (dict(preference__loss="kto"), r"preference\.loss: kto does not learn from pairs of answers to rl\.prompts"),
    (dict(preference__reference="precomputed"), r"preference\.reference: answers to rl\.prompts are not known before"),
    (dict(rl__kl=0.1), r"rl\.kl: preference\.loss=dpo does not read it"),
    (dict(rl__max_new_tokens=16), r"rl\.max_new_tokens: 16 leaves no room for a prompt in data\.seq_len=32 of two"),
])
def test_what_is_refused(keys, why, files):  # noqa: F811
    with pytest.raises(jt.UserError, match=why):
        config(files, **PAIRS | keys)
