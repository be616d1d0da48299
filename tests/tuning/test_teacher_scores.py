"""On-policy distillation: advantages are a teacher's log-probabilities less those of sampling, and the policy nears it.
"""

import json

import jax
import numpy as np
import pytest

import jaxtrain as jt
from tests.objectives import tuned
from tests.tuning.test_rollouts import config, files, on_four  # noqa: F401

pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once
NO_REWARD = dict(rl__reward="", rl__group_size=1)


@pytest.fixture(scope="module")
def teacher(files):  # noqa: F811
    """A workdir of the same model, of other initial parameters that learnt a text."""
    text = files / "text.txt"
    text.write_text("say 1: yes, and say 2: no.\n" * 200)
    jt.train(config(files, rl__prompts="", rl__reward="", rl__group_size=8, rl__max_new_tokens=64,
                    data__source=str(text), train__steps=20, train__seed=5, optimizer__learning_rate=1e-2),
             files / "teacher")
    return files / "teacher"


@pytest.mark.slow
def test_advantages_are_the_teachers_log_probabilities_less_those_of_sampling(files, teacher):  # noqa: F811
    run = jt.build(config(files, rl__teacher=str(teacher), rl__teacher_weight=0.5, rl__staleness=1))
    run.see(0, run.init())
    batch, told = run.data[0], run.data.pop_fields()
    loaded, state = jt.load_model(teacher, {"mesh.data": 4})
    module, gaps = loaded.module(state), []
    for row in range(len(batch["tokens"])):
        learnt = np.flatnonzero(batch["weights"][row])
        size = learnt[-1] + 1
        logits = np.asarray(jax.nn.log_softmax(module(batch["tokens"][row][None, :size])[0]))
        gaps.append(logits[learnt, batch["targets"][row][learnt]] - batch["sampled"][row][learnt])
        by_reward = batch["advantages"][row][learnt] - 0.5 * gaps[-1]
        np.testing.assert_allclose(by_reward, by_reward[0], atol=2e-5)  # that of the answer, at each of its tokens
    assert told["reverse_kl"] == pytest.approx(-np.concatenate(gaps).mean(), rel=1e-4)
    assert np.std([gap.mean() for gap in gaps]) > 0.01 and told["teacher_s"] > 0


@pytest.mark.slow
def test_a_policy_nears_its_teacher_and_a_run_that_goes_on_is_the_same(files, teacher, tmp_path):  # noqa: F811
    keys = dict(rl__teacher=str(teacher), **NO_REWARD, data__global_batch_size=32, train__steps=30, rl__reuse=2,
                optimizer__learning_rate=1e-2, checkpoint__every=15)
    whole = jt.train(config(files, **keys), tmp_path / "whole")
    lines = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    gaps = [line["reverse_kl"] for line in lines if "reverse_kl" in line]
    assert np.mean(gaps[-3:]) < 0.6 * gaps[0], gaps
    parts = jt.train(config(files, **keys), tuned.resumed(tmp_path / "whole", tmp_path / "parts", 30))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), whole.params,
                                     parts.params))


@pytest.mark.parametrize(("keys", "message"), [
    (dict(rl__teacher_weight=2.0), "rl.teacher_weight: it is read with rl.teacher only"),
    (dict(rl__teacher="TEACHER", rl__temperature=0.7), "rl.temperature: a teacher predicts at temperature 1, and"),
    (dict(rl__teacher="TEACHER", rl__sampling_rounds=2), "rl.sampling_rounds: with rl.teacher groups of equal"),
    (dict(rl__teacher="TEACHER", rl__reward="", rl__baseline="value"), "rl.baseline: a value head learns to expect"),
    (dict(rl__teacher="none"), "WORKDIR: there is no folder none"),
    (dict(rl__teacher="TEACHER", model__max_seq_len=64, data__seq_len=48), "data.seq_len: 48 tokens exceed the tea")])
def test_what_does_not_go_with_a_teacher_is_refused(files, teacher, keys, message):  # noqa: F811
    keys = {key: str(teacher) if value == "TEACHER" else value for key, value in keys.items()}
    with pytest.raises(jt.UserError) as refusal:
        jt.build(config(files, **keys))
    assert str(refusal.value).startswith(message)
