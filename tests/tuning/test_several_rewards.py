"""Several rewards, penalties for length, and sampling until groups have unequal rewards.

A generator that writes the number of the call into the answers takes the place of the model.
"""

import json

import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.hub.generate import Generated
from jaxtrain.tuning import rollouts
from jaxtrain.tuning.answers import own_mesh
from jaxtrain.tuning.scorers import Scorers, _names
from tests.tuning.test_rollouts import config, files, on_four  # noqa: F401

pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once
ROUNDS = dict(rl__sampling_rounds=3, rl__group_size=4)


@pytest.fixture(scope="module")
def build(files):  # noqa: F811
    """Runs by their keys: building one takes longer than what is tested of it."""
    found = {}

    def build(**keys):
        name = json.dumps(keys)
        if name not in found:
            found[name] = jt.build(config(files, **keys))
        return found[name]

    return build


@pytest.fixture
def calls(monkeypatch):
    """The prompts and seeds of each call of the generator; the n-th answer of a call has one token more than n % 4."""
    made = []

    def generate(run, state, prompts, *, seed, **_):
        made.append(([bytes(prompt).decode() for prompt in prompts], seed))
        return [Generated(f"{len(made)} {n}", tuple(range(97, 98 + n % 4)), (-1.0,) * (1 + n % 4), "length")
                for n in range(len(prompts))]

    monkeypatch.setattr(own_mesh, "generate", generate)
    return made


def begun(run, folder=None, **scorers):
    return rollouts.Rollouts(run, run.data.records, Scorers(tuple(scorers), tuple(scorers.values())),
                             run.data.tokenizer, folder)


def first_batch(data, step=0):
    data.see(step, step)
    return data[step]


def by_answer(batch, name):
    return batch[name][batch["answers"] > 0]


def test_several_rewards_and_the_length_are_weighted_told_and_kept(build, files, calls, tmp_path):  # noqa: F811
    of_file = f"{files / 'reward.py'}:"
    run = build(rl__reward=f"{of_file}even, {of_file}big", rl__reward_weights=[1.0, 0.5], rl__max_new_tokens=4,
                rl__overlong_buffer=2, rl__overlong_penalty=3.0)
    data = begun(run, tmp_path, even=lambda answer, _: int(answer[-1]) % 2, big=lambda answer, _: float(answer[-1]))
    batch = first_batch(data)
    n = np.arange(8)
    wanted = n % 2 + 0.5 * n - 3.0 * np.clip((n % 4 + 1 - 2) / 2, 0, 1)
    np.testing.assert_allclose(by_answer(batch, "rewards"), wanted, rtol=1e-6)
    by_group = wanted.reshape(2, 4)
    advantages = (by_group - by_group.mean(1, keepdims=True)) / (by_group.std(1, ddof=1, keepdims=True) + 1e-4)
    np.testing.assert_allclose(by_answer(batch, "advantages"), advantages.reshape(-1), rtol=1e-5)
    told = data.pop_fields()
    assert [told[f"score_{name}"] for name in ("even", "big", "length")] == [0.5, 3.5, -0.375]
    assert told["equal_groups"] == 0
    lines = [json.loads(line) for line in (tmp_path / "1.jsonl").read_text().splitlines()]
    assert lines[3]["scores"] == {"even": 1.0, "big": 3.0} and lines[3]["reward"] == pytest.approx(wanted[3])


def some(alike):
    """A reward that is equal in these groups, by call and group."""
    def reward(answer, record):
        call, n = map(int, answer.split())
        return 1.0 if (call, n // 4) in alike else float(n)
    return reward


@pytest.mark.parametrize(("alike", "rounds", "taken"), [
    (set(), 1, [(1, 0), (1, 1)]), ({(1, 0)}, 2, [(1, 1), (2, 0)]), ({(1, 0), (1, 1), (2, 1)}, 3, [(2, 0), (3, 0)]),
    ({(1, 0), (1, 1), (2, 0), (2, 1), (3, 1)}, 3, [(3, 0), (1, 0)])])
def test_groups_with_equal_rewards_are_replaced_by_others(build, calls, tmp_path, alike, rounds, taken):
    run = build(**ROUNDS)
    data = begun(run, tmp_path, score=some(alike))
    data.see(5, 5)
    batch, told = data[5], data.pop_fields()
    assert len(calls) == rounds == told["sampling_rounds"]
    lines = [json.loads(line) for line in (tmp_path / "6.jsonl").read_text().splitlines()]
    assert [tuple(map(int, line["text"].split())) for line in lines] == [
        (call, 4 * group + n) for call, group in taken for n in range(4)]
    for line in lines:
        call, n = map(int, line["text"].split())
        assert line["prompt"] == calls[call - 1][0][n] == data.records[line["number"]]["prompt"]
    assert told["equal_groups"] == sum(group in alike for group in taken) / 2
    assert (by_answer(batch, "advantages").reshape(2, 4) != 0).any(1).tolist() == [one not in alike for one in taken]
    # Rounds are of other prompts and drawn with other seeds; a run that resumes makes the same.
    assert len({seed for _, seed in calls}) == rounds and len({str(asked) for asked, _ in calls}) == rounds
    before = calls.copy()
    calls.clear()
    again = begun(run, None, score=some(alike))
    again.see(5, 5)
    for name, column in again[5].items():
        np.testing.assert_array_equal(column, batch[name], err_msg=name)
    assert calls == before


def test_chosen_groups_are_read_again_with_their_prompts(build, calls, tmp_path):
    """With reuse, a run that resumes in the middle reads the answers that dynamic sampling chose."""
    run = build(rl__reuse=2, **ROUNDS)
    data = begun(run, tmp_path, score=some({(1, 0)}))
    batch = first_batch(data)
    calls.clear()
    resumed = begun(run, tmp_path, score=some({(1, 0)}))
    for name, column in first_batch(resumed, 1).items():
        np.testing.assert_array_equal(column, batch[name], err_msg=name)
    assert not calls
    text = (tmp_path / "1.jsonl").read_text()
    (tmp_path / "1.jsonl").write_text(text.replace('"say', '"tell', 1))
    with pytest.raises(jt.UserError, match="has answers to other prompts"):
        first_batch(begun(run, tmp_path, score=some(set())), 1)


@pytest.mark.parametrize(("keys", "message"), [
    (dict(rl__reward_weights=[1.0]), "rl.reward_weights: it is read with rl.reward naming several only"),
    (dict(rl__reward="a.py:f, b.py:g", rl__reward_weights=[1.0]),
     "rl.reward_weights: there are 1 weights for 2 rewards; give one for each in rl.reward"),
    (dict(rl__reward="a.py:f, b.py:g", rl__combine="normalize", rl__scale="none"),
     "rl.combine: normalize compares each reward with the mean and the standard deviation of its group; leave"),
    (dict(rl__reward="model:a, model:b"), "rl.reward: it names several reward models, and a run holds one; keep"),
    (dict(rl__overlong_buffer=7), "rl.overlong_buffer: 7 tokens are more than rl.max_new_tokens=6; give fewer"),
    (dict(rl__overlong_penalty=2.0), "rl.overlong_penalty: it is read with rl.overlong_buffer only"),
    (dict(rl__sampling_rounds=2, rl__baseline="value"), "rl.sampling_rounds: with rl.baseline=value groups of equal"),
    (dict(rl__surrogate="cispo", rl__clip=0.1), "rl.clip: it is read with rl.surrogate=ppo only")])
def test_settings_that_do_not_go_together_are_refused(files, keys, message):  # noqa: F811
    with pytest.raises(jt.UserError) as refusal:
        jt.build(config(files, **keys))
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize("name", ["a.py:f, b/c.py:g", "a.py:f,b.py:f, http://h/x", "model:w@3, a.py:f"])
def test_names_of_rewards(name):
    found = {"a.py:f, b/c.py:g": ("f", "g"), "a.py:f,b.py:f, http://h/x": ("f_1", "f_2", "url"),
             "model:w@3, a.py:f": ("model", "f")}[name]
    assert _names([one.strip() for one in name.split(",")]) == found
