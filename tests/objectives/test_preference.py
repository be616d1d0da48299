"""Preferences: loss, gradients and margins of the plain formulas, on any mesh; and what is kept of the reference."""

import json
from functools import partial
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.commands import export, generate, prepare
from jaxtrain.hub.weights import safetensors_files
from jaxtrain.models.lora import scale
from jaxtrain.objectives.preference import LOSSES, Pairs
from jaxtrain.run import for_run
from jaxtrain.train_step import partition
from jaxtrain.trainer.early_stop import check_best
from tests.numerics import reference
from tests.numerics.plain_lora import merged
from tests.objectives import plain_preference as plain
from tests.objectives import tuned
from tests.objectives.tuned import resumed
from tests.tiers import slow_if
from tests.tiny import devices

pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once
DPO = dict(preference__loss="dpo", preference__beta=0.5, data__packing="pairs")
REWARD = dict(preference__loss="reward", preference__beta=0.1)
CASES = {
    "tensor, ipo": ("llama", dict(mesh=(1, 2, 4), preference__loss="ipo")),
    "one device": ("gpt2", dict(preference__label_smoothing=0.2)),
    "all axes, robust": ("gpt2", dict(mesh=(2, 2, 2), train__accumulation=2, optimizer__zero_stage=2,
                                      preference__loss="robust", preference__label_smoothing=0.2)),
    "ring, simpo": ("llama", dict(mesh=(1, 2, 2), mesh__context=2, mesh__context_strategy="ring",
                                  preference__loss="simpo", preference__margin=0.3)),
    "remat, hinge": ("qwen3", dict(mesh=(1, 2, 2), train__remat="full", train__loss_chunks=2,
                                   preference__loss="hinge")),
    "1f1b, context": ("llama", dict(mesh=(1, 2, 1), mesh__stage=2, mesh__context=2)),
    "zero-bubble, adapters": ("llama", dict(mesh=(1, 1, 2), mesh__stage=2, pipeline__schedule="zb_h1", lora__rank=3)),
    "experts, orpo": ("mixtral", dict(mesh=(1, 2, 2), mesh__expert=2, optimizer__zero_stage=3,
                                      preference__loss="orpo")),
    "reward model, one device": ("gpt2", REWARD),
    "reward model, all axes": ("llama", dict(mesh=(2, 2, 2), train__accumulation=2, optimizer__zero_stage=2, **REWARD,
                                             preference__center=0.1)),
    "reward model, ring": ("llama", dict(mesh=(1, 2, 2), mesh__context=2, mesh__context_strategy="ring",
                                         **REWARD, preference__margin=0.3)),
    "reward model, 1f1b, context": ("gpt2", dict(mesh=(1, 2, 1), mesh__stage=2, mesh__context=2, **REWARD)),
    "reward model, zero-bubble, adapters": ("llama", dict(mesh=(1, 1, 2), mesh__stage=2, lora__rank=3,
                                                          pipeline__schedule="zb_h1", **REWARD)),
    "reward model, experts": ("mixtral", dict(mesh=(1, 2, 2), mesh__expert=2, optimizer__zero_stage=3, **REWARD)),
    "adapters": ("qwen2", dict(mesh=(2, 2, 1), mesh__context=2, mesh__context_strategy="gather", lora__rank=2)),
}
# The others have meshes that are in these, too, and each loss has a quick test of its formula.
SLOW = ("1f1b, context", "reward model, all axes")


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=slow_if(name in SLOW)) for name in CASES])
def test_loss_and_gradients_are_those_of_the_formula(name):
    family, keys = CASES[name]
    run = reference.build(family, **(DPO | keys))
    c, batch = run.config, plain.batch()
    metrics, told = tuned.check(run, lambda policy, before: plain.loss(c.preference, c.model, policy, before, batch),
                                  batch)
    assert ("kl" in metrics) == (c.preference.loss in ("dpo", "robust", "ipo", "hinge", "apo_zero", "apo_down"))
    for name, value in told.items():
        assert float(metrics[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_and_its_gradient_are_those_of_the_formula_of_a_pair(loss):
    """Only sums over answers are needed, so that all cases are quick."""
    c = SimpleNamespace(loss=loss, beta=0.3, margin=0.2, label_smoothing=0.1, rpo_alpha=0.0)
    rng = np.random.default_rng(0)
    policy, before = (tuple(-rng.uniform(1, 9, (2, 16)).astype(np.float32)) for _ in range(2))
    sizes = tuple(rng.integers(2, 9, (2, 16)).astype(np.float32))

    def both(of):
        each = jax.jit(jax.value_and_grad(lambda policy: of(policy).sum()))
        return jax.tree.leaves(each(policy))

    for got, want in zip(both(lambda policy: LOSSES[loss].of(c, Pairs(policy, before, sizes))),
                         both(lambda policy: plain.of_pairs(c, policy, before, sizes)[0]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module", autouse=True)
def on_four():
    """All runs have four devices, with which they take less time than with eight."""
    with devices(4):
        yield


CORPUS = [{"prompt": f"say {i % 7}:", "chosen": f" yes {i % 7}", "rejected": f" no {i % 5}"} for i in range(60)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    folder.joinpath("pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in CORPUS))
    (folder / "text.txt").write_text("".join(record["prompt"] + record["chosen"] + "\n" for record in CORPUS * 20))
    assert prepare.main([f"--input={folder}/pairs.jsonl", f"--output={folder}/corpus", "--eval_fraction=0.2"]) == 0
    return folder / "corpus"


def tiny(corpus, **keys):
    """The config of a run of six steps on four devices."""
    return reference.tiny("llama", **(dict(
        model__vocab_size=258, model__max_seq_len=64, data__seq_len=64, data__source=str(corpus),
        data__global_batch_size=4, train__steps=6, train__progress=False, lora__rank=2, checkpoint__every=3,
        optimizer__warmup_steps=0, mesh__data=2, mesh__tensor=2) | keys))


@pytest.fixture(scope="module")
def compared(corpus):
    """A run that learns from pairs: its keys, its workdir, its state and that of the run that it began with."""
    folder = corpus.parent / "compared"
    text = dict(data__source=str(corpus.parent / "text.txt"), train__steps=2)
    base = jt.train(tiny(corpus, **text), folder / "base")
    tuned = dict(DPO, train__init_from=str(folder / "base"))
    run = jt.build(tiny(corpus, **tuned))
    return tuned, run, folder / "whole", jt.train(run, folder / "whole"), base


@pytest.mark.slow
def test_a_run_from_another_learns_and_goes_on_with_the_same_reference(corpus, compared, tmp_path):
    """The reference is what the run began with, also after a stop, and for adapters that are trained further."""
    (tuned, run, workdir, whole, base), config = compared, partial(tiny, corpus)
    for metric in ("eval_reward_accuracy", "eval_perplexity"):  # higher is better; not reported
        with pytest.raises(jt.UserError, match=r"checkpoint\.best: (a higher .* is better|there is no metric)"):
            check_best(jt.build(config(**tuned, checkpoint__best=metric)))
    for metric in ("eval_loss", "highest:eval_reward_accuracy"):
        check_best(jt.build(config(**tuned, checkpoint__best=metric)))
    parts = jt.train(run, resumed(workdir, tmp_path / "parts", last=6))
    chex.assert_trees_all_equal(whole.params, parts.params)
    chex.assert_trees_all_equal(parts.frozen["reference"], base.params)
    lines = [json.loads(line) for line in workdir.joinpath("metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == pytest.approx(np.log(2)) and lines[0]["reward_margin"] == lines[0]["kl"] == 0
    assert lines[-2]["loss"] < np.log(2) and lines[-2]["reward_margin"] > 0 and "perplexity" not in lines[-2]
    assert lines[-1].keys() == {"step", "eval_loss", "eval_reward_accuracy", "eval_reward_margin", "eval_kl"}
    assert lines[-1]["eval_reward_accuracy"] == 1 and lines[-1]["eval_loss"] < np.log(2)


@pytest.mark.exhaustive  # test_reference_sums.py goes on with such a run elsewhere
def test_a_run_goes_on_elsewhere_with_the_same_reference(corpus, compared, tmp_path):
    tuned, _, workdir, whole, _ = compared
    state = jt.train(tiny(corpus, **tuned, mesh__data=1, mesh__fsdp=2), resumed(workdir, tmp_path / "work", last=6))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5),
                 *map(jax.device_get, (whole.params, state.params)))


@pytest.fixture(scope="module")
def rewarded(corpus):
    """A language model in `base`, a reward model that began with it in `whole`, its run, and their states."""
    folder, config = corpus.parent, partial(tiny, corpus)
    base = jt.train(config(**text_of(corpus)), folder / "base")
    run = jt.build(config(**SCORED, train__init_from=str(folder / "base")))
    return folder, run, base, jt.train(run, folder / "whole")


SCORED = dict(data__packing="pairs", preference__loss="reward", preference__center=0.01)


def text_of(corpus):
    return dict(data__source=str(corpus.parent / "text.txt"), train__steps=2, lora__rank=0)


@pytest.mark.exhaustive
def test_a_reward_model_gives_answers_their_rewards(corpus, rewarded):
    """The reward is what its module gives at the last token before the one that ends an answer."""
    folder, _, _, state = rewarded
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "say 1:"}) + "\n")
    keys = text_of(corpus) | dict(train__init_from=str(folder / "base"), data__global_batch_size=8,
                                  rl__prompts=str(folder / "prompts.jsonl"), rl__max_new_tokens=6)
    scored = tiny(corpus, **keys, rl__reward=f"model:{folder}/whole")
    run = jt.build(scored)
    run.see(0, run.init())
    batch = run.data[0]
    model = jt.build(tiny(corpus, **SCORED)).module(state)
    for row in range(8):
        size, first = int(batch["segments"][row].sum()), batch["answers"][row].argmax()
        ended = batch["targets"][row, size - 1] == run.data.tokenizer.eod
        ids = [*batch["tokens"][row, :size], *([] if ended else batch["targets"][row, size - 1:size])]
        want = model.reward_head(model.hidden(np.array([ids], np.int32)))[0, -1]
        assert batch["rewards"][row, first] == pytest.approx(float(want), rel=1e-4)
    assert len(set(batch["rewards"][batch["answers"] > 0].tolist())) > 4
    kept = run.data.identity["reward_model"]
    assert kept["step"] == 6 and len(kept["fingerprint"]) == 16
    began = {"own_parts": {"data": {"identity": {"reward_model": kept | {"step": 1}}}}}
    (folder / "resumed").mkdir()
    (folder / "resumed" / "run.json").write_text(json.dumps(began))
    with pytest.raises(jt.UserError, match=r"whole has no checkpoint of step 1 that was found good"):
        for_run(jt.build(scored), folder / "resumed")
    with pytest.raises(jt.UserError, match=r"rl\.reward: .*base has no reward model; give a run of preference"):
        jt.build(tiny(corpus, **keys, rl__reward=f"model:{folder}/base"))


@pytest.mark.slow
def test_a_reward_model_begins_with_a_language_model_and_is_published_as_a_classifier(corpus, rewarded, tmp_path):
    """Its head begins anew, is trained beside adapters, saved, resumed, used to begin another run, and exported."""
    config, text, tuned = partial(tiny, corpus), text_of(corpus), SCORED
    folder, run, base, whole = rewarded
    parts = jt.train(run, resumed(folder / "whole", tmp_path / "parts", last=6))
    chex.assert_trees_all_equal(whole.params, parts.params)
    assert "output" not in whole.all_params
    own = partition.like(base.params, whole.frozen)
    chex.assert_trees_all_equal(own, whole.frozen)
    assert {"reward_head", "blocks"} == whole.params.keys()
    lines = [json.loads(line) for line in folder.joinpath("whole/metrics.jsonl").read_text().splitlines()]
    assert lines[-2]["loss"] < lines[0]["loss"] and lines[-2]["reward_margin"] > lines[0]["reward_margin"]
    assert lines[-1].keys() == {"step", "eval_loss", "eval_reward_accuracy", "eval_reward_margin"}
    assert lines[-1]["eval_reward_accuracy"] == 1

    further = jt.build(config(**tuned, train__init_from=str(folder / "whole"))).init()
    chex.assert_trees_all_equal(further.all_params, whole.all_params)
    with pytest.raises(jt.UserError, match=r"model: it is a reward model, with a reward head in place of the out"):
        generate.main.__wrapped__([str(folder / "whole"), "--prompt=say"])
    assert export.main([str(folder / "whole"), f"--output={tmp_path}/out", "--dtype=float32"]) == 0
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["architectures"] == ["LlamaForSequenceClassification"] and said["pad_token_id"] == said["eos_token_id"]
    names = safetensors_files.tensors_of(tmp_path / "out")
    assert names["score.weight"].shape == (1, 32) and "lm_head.weight" not in names
    published = dict(train__init_from=str(tmp_path / "out"), lora__rank=0)
    begun = jt.build(config(**tuned, **published)).init().params
    want = merged(jax.device_get(whole.all_params), scale(config().lora))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), jax.device_get(begun), want)
    assert export.main([str(folder / "base"), f"--output={tmp_path}/plain", "--dtype=float32"]) == 0
    begun = jt.build(config(**tuned, train__init_from=str(tmp_path / "plain"))).init()
    chex.assert_trees_all_equal(partition.like(begun.all_params, own), own)
    assert "output" not in begun.all_params
    with pytest.raises(jt.UserError, match=r"it has no tensor lm_head\.weight"):
        jt.build(config(**text | published)).init()


@pytest.mark.parametrize(("keys", "message"), [
    (dict(preference__loss="dpo"), "preference.loss: dpo needs rows of whole pairs, not data.packing=concat; set "),
    (dict(data__packing="pairs"), "data.packing: pairs hold rejected answers too, which next-token prediction would "),
    (DPO | dict(preference__loss="dop"), "preference.loss: 'dop' is not supported; did you mean 'dpo'?"),
    (DPO | dict(preference__margin=0.1), "preference.margin: preference.loss='dpo' does not read it; leave it out, or"),
    (DPO | dict(preference__beta=0.0), "preference.beta: 0.0 is not positive; give a number above 0"),
    (DPO | REWARD | dict(preference__beta=0.5), "preference.beta: preference.loss='reward' does not read it; leave it"),
    (DPO | dict(preference__center=0.1), "preference.center: preference.loss='dpo' does not read it; leave it out, or"),
    (DPO | REWARD | dict(train__sample_tokens=8), "train.sample_tokens: preference.loss=reward does not support it; "),
    (DPO | dict(train__z_loss=0.1), "train.z_loss: preference.loss=dpo does not support it; leave it out"),
    (DPO | dict(preference__label_smoothing=0.5), "preference.label_smoothing: 0.5 is not in [0, 0.5); try 0.1"),
])
def test_mistakes_are_told_in_one_line(keys, message):
    with pytest.raises(jt.UserError) as refusal:
        reference.build("llama", **keys)
    assert f"{refusal.value}".startswith(message)
