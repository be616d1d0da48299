"""KTO: loss, gradients and metrics of the plain formula, on any mesh; and runs from labelled answers."""

import json

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.commands import prepare
from tests.numerics import reference
from tests.objectives import plain_kto as plain
from tests.objectives import tuned
from tests.objectives.tuned import resumed
from tests.tiers import exhaustive, slow_if

pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once
KTO = dict(preference__loss="kto", preference__beta=0.5, data__packing="answers")
WEIGHED = dict(preference__desirable_weight=1.3, preference__undesirable_weight=0.4)
CASES = {
    "tensor": ("llama", dict(mesh=(1, 2, 4))),
    "one device": ("gpt2", WEIGHED),
    "at the bound": ("gpt2", WEIGHED),
    "all axes, accumulation": ("gpt2", dict(mesh=(2, 2, 2), train__accumulation=2, optimizer__zero_stage=2)),
    "ring": ("llama", dict(mesh=(1, 2, 2), mesh__context=2, mesh__context_strategy="ring")),
    "1f1b, context": ("llama", dict(mesh=(1, 2, 1), mesh__stage=2, mesh__context=2, **WEIGHED)),
    "zero-bubble, adapters": ("llama", dict(mesh=(1, 1, 2), mesh__stage=2, pipeline__schedule="zb_h1", lora__rank=3)),
    "experts": ("mixtral", dict(mesh=(1, 2, 2), mesh__expert=2, optimizer__zero_stage=3)),
}
# The other meshes are those of the tests of preferences; test_tuning_truth.py has the bound.
SLOW = ("all axes, accumulation",)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=slow_if(name in SLOW)) for name in CASES])
def test_loss_and_gradients_are_those_of_the_formula(name):
    family, keys = CASES[name]
    run = reference.build(family, **(KTO | keys))
    c, batch = run.config, plain.batch()
    metrics, told = tuned.check(
        run, lambda policy, before: plain.loss(c.preference, c.model, policy, before, batch, c.train.accumulation),
        batch, scaled=1.1 if name == "at the bound" else 0.8)
    assert (float(told["kl"]) > 1e-3) == (name != "at the bound"), "the case says nothing about the divergence"
    for what, value in told.items():
        assert float(metrics[what]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), what


def records(labelled):
    """Prompts and answers: "yes" is desirable, "no" is not."""
    if not labelled:
        return [{"prompt": f"say {i % 7}:", "chosen": f" yes {i % 7}", "rejected": f" no {i % 5}"} for i in range(40)]
    return [{"prompt": f"say {i % 7}:", "completion": f" {'yes' if i % 3 else 'no'} {i % 5}", "label": i % 3 > 0}
            for i in range(80)]


@pytest.mark.parametrize("labelled", exhaustive(True, False), ids=["labels", "pairs"])
def test_a_run_learns_from_labels_and_from_pairs_and_goes_on(labelled, tmp_path):
    tmp_path.joinpath("answers.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records(labelled)))
    made = [f"--input={tmp_path}/answers.jsonl", f"--output={tmp_path}/corpus", "--eval_fraction=0.2"]
    assert prepare.main(made) == 0
    config = reference.tiny("llama", **KTO, **dict(
        model__vocab_size=258, model__max_seq_len=64, data__seq_len=64, data__source=str(tmp_path / "corpus"),
        data__global_batch_size=4, train__steps=8, train__progress=False, lora__rank=2, checkpoint__every=4,
        optimizer__warmup_steps=0, mesh__data=2))
    run = jt.build(config, devices=jax.devices()[:2])
    whole = jt.train(run, tmp_path / "whole")
    parts = jt.train(run, resumed(tmp_path / "whole", tmp_path / "parts", last=8))
    assert jax.tree.all(jax.tree.map(np.array_equal, *map(jax.device_get, (whole.params, parts.params))))
    lines = [json.loads(line) for line in tmp_path.joinpath("whole/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == pytest.approx(0.5) and lines[0]["kl"] == lines[0]["reward_margin"] == 0
    assert lines[-2]["loss"] < 0.5 and lines[-2]["reward_margin"] > 0 and 0 < lines[0]["desirable"] < 1
    assert lines[-1].keys() == {"step", "eval_loss", "eval_reward_margin", "eval_kl"}
    assert lines[-1]["eval_loss"] < 0.5 and lines[-1]["eval_reward_margin"] > 0


@pytest.mark.parametrize(("keys", "message"), [
    (KTO | dict(data__packing="pairs"), "preference.loss: kto needs rows of whole answers, not data.packing=pairs; s"),
    (dict(data__packing="answers"), "data.packing: answers hold rejected answers too, which next-token prediction w"),
    (KTO | dict(preference__loss="dpo"), "preference.loss: dpo needs rows of whole pairs, not data.packing=answers; "),
    (KTO | dict(preference__margin=0.1), "preference.margin: preference.loss='kto' does not read it; leave it out, or"),
    (KTO | dict(preference__desirable_weight=-1.0), "preference.desirable_weight: -1.0 is negative; give 0 or more"),
])
def test_mistakes_are_told_in_one_line(keys, message):
    with pytest.raises(jt.UserError) as refusal:
        reference.build("llama", **keys)
    assert f"{refusal.value}".startswith(message)
