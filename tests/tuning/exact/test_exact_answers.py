"""Answers that the step draws itself: to the last bit its own, whatever drafted them, on any mesh."""

import json

import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.hub.generate import generate
from jaxtrain.tuning.answers.own_mesh import OwnMesh
from jaxtrain.tuning.exact.exact_objective import MISMATCH, SAID
from tests.numerics import reference
from tests.tiers import exhaustive, slow
from tests.tuning.test_rollouts import files, on_four  # noqa: F401

pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once
ROWS, LENGTH = 8, 20


def config(files, family="llama", **keys):  # noqa: F811
    return reference.tiny(family, **(dict(
        model__vocab_size=264, model__max_seq_len=32, data__seq_len=LENGTH, data__global_batch_size=ROWS,
        mesh__data=2, mesh__tensor=2, train__steps=4, train__progress=False, optimizer__warmup_steps=0,
        optimizer__schedule="constant", checkpoint__every=2, rl__prompts=str(files / "prompts.jsonl"),
        rl__reward=f"{files / 'reward.py'}:even",
        rl__group_size=4, rl__max_new_tokens=6, rl__exact=True, train__precision="bfloat16") | keys))


def made(run, state):
    """The first batch, and what is measured of it."""
    run.data.forget()
    run.see(0, state)
    return run.data[0], run.data.pop_fields()


@pytest.mark.parametrize("loss", ["dapo", *slow("grpo", "dr_grpo")])
def test_answers_are_the_steps_own_whoever_drafted_them(files, monkeypatch, loss):  # noqa: F811
    """Passes that draw leave no trace in the state, whatever the loss divides by."""
    run = jt.build(config(files, rl__temperature=0.8, rl__loss=loss, optimizer__weight_decay=0.5))
    state = run.init()
    batch, told = made(run, state)
    learnt = batch["weights"] > 0
    assert told["exact_passes"] >= 1 and learnt.sum() > 20

    # Drafts with other random numbers are wrong nearly everywhere, and so are replaced token by token.
    sampled = OwnMesh.sampled
    monkeypatch.setattr(OwnMesh, "sampled", lambda own, state, prompts, seed, drawn=None: sampled(
        own, state, prompts, seed + 1, drawn))
    other, more = made(run, state)
    assert more["exact_passes"] > told["exact_passes"] and more["exact_changed_tokens"] > 20
    for name in batch:
        np.testing.assert_array_equal(other[name], batch[name], name)

    # What the step says as it is trained with the answers is what they were sampled with.
    _, metrics = run.step(state, run.sharded.place(batch))
    said = np.asarray(metrics[SAID]).reshape(ROWS, LENGTH)
    np.testing.assert_array_equal(said[learnt], batch["sampled"][learnt])
    assert float(metrics[MISMATCH]) == 0 == float(metrics["kl_sampled"]) and float(metrics["grad_norm"]) > 0


@pytest.mark.parametrize(("family", "keys"), slow(
    ("llama", dict(mesh__data=1, mesh__tensor=1, mesh__stage=2, mesh__fsdp=2)),
    ("qwen3", dict(mesh__data=1, mesh__context=2, train__accumulation=2)),
    ("mixtral", dict(mesh__tensor=1, mesh__expert=2)),
    ("llama", dict(train__precision="float32")),
) + exhaustive(
    ("deepseek_v3", dict(mesh__data=1, mesh__fsdp=2, train__remat="full", optimizer__zero_stage=3)),
    ("bamba", dict(mesh__tensor=1, mesh__context=2)),
    ("gpt_oss", dict(mesh__data=1, mesh__expert=2, train__accumulation=4)),
    ("gemma3", dict(mesh__data=1, mesh__stage=2, pipeline__schedule="1f1b", data__global_batch_size=8))))
def test_log_probabilities_are_the_trainers_to_the_last_bit(files, family, keys):  # noqa: F811
    run = jt.build(config(files, family, **keys))
    state = run.init()
    batch, _ = made(run, state)
    if keys.get("train__precision") == "float32":  # then the sampler draws the same tokens
        prompts = [run.data.prompts[n] for n in run.data._numbers(0)]
        seed = int(np.random.SeedSequence([run.data.seed, 0]).generate_state(1)[0])
        plain = generate(run, state, prompts, max_new_tokens=6, seed=seed, logprobs=True, tempered=True,
                         tokenizer=run.data.tokenizer)
        for row, answer in enumerate(plain):
            at = np.flatnonzero(batch["weights"][row])
            assert [*answer.tokens, *(answer.end or ())[:1]] == batch["targets"][row, at].tolist()
            np.testing.assert_allclose(batch["sampled"][row, at][:len(answer.tokens)], answer.logprobs, atol=1e-5)
    # The same loss and gradients as of the objective that says nothing.
    plain = jt.build(config(files, family, **keys | {"rl__exact": False}))
    without = {name: batch[name] for name in plain.objective.batch_spec}
    (loss, grads), (want, wanted) = run.value_and_grad(state, batch), plain.value_and_grad(state, without)
    assert float(loss) == pytest.approx(float(want), abs=1e-6)
    assert reference.worst(grads, wanted)[0] < (1e-5 if keys.get("train__precision") == "float32" else 0.02)
    _, metrics = run.step(state, run.sharded.place(batch))
    learnt = batch["weights"] > 0
    said = np.asarray(metrics[SAID]).reshape(ROWS, LENGTH)
    np.testing.assert_array_equal(said[learnt], batch["sampled"][learnt])
    assert float(metrics[MISMATCH]) == 0


@pytest.mark.slow
def test_a_run_is_exact_at_each_step_and_goes_on_from_its_files(files, tmp_path):  # noqa: F811
    jt.train(config(files), tmp_path / "whole")
    half = config(files, train__steps=2)
    jt.train(half, tmp_path / "parts")
    jt.train(config(files), tmp_path / "parts")
    lines = [[json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
             for name in ("whole", "parts")]
    for one in lines:
        trained = [line for line in one if "loss" in line]
        assert len(trained) == 4 and all(line[MISMATCH] == 0 and line["exact_s"] > 0 for line in trained)
        assert not {"said", "drawn"} & trained[0].keys()
    assert [line["grad_norm"] for line in lines[0] if "loss" in line] == [
        line["grad_norm"] for line in lines[1] if "loss" in line]


def test_rounds_of_sampling_are_refused(files):  # noqa: F811
    with pytest.raises(jt.UserError, match=r"^rl.exact: .* rl.sampling_rounds chooses them .*; leave one of them out"):
        config(files, rl__sampling_rounds=2)
