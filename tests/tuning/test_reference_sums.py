"""Numbers of the reference that are computed once: those of a copy, on any mesh; kept, gone on from, and refused."""

import contextlib
import json
import os
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.commands import prepare
from jaxtrain.data.loading.batch_function import BatchFunction
from jaxtrain.extensions import of_kind
from jaxtrain.plan import targets
from jaxtrain.plan.estimate import estimate
from jaxtrain.run import Run
from jaxtrain.tuning import reference_sums
from jaxtrain.tuning.reference_sums import PrecomputedReference
from tests.numerics import reference
from tests.objectives import plain_kto, plain_preference, tuned
from tests.tiers import exhaustive, slow, slow_if
from tests.trainer.test_multiprocess import ended, two_processes
from tests.tuning.test_rollouts import on_four  # noqa: F401

pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once
PRE = dict(preference__beta=0.5, preference__reference="precomputed")
DPO = dict(PRE, preference__loss="dpo", data__packing="pairs")
KTO = dict(PRE, preference__loss="kto", data__packing="answers")
CASES = {
    "dpo, tensor": ("gpt2", dict(DPO, mesh=(1, 2, 4))),
    "robust, all axes": ("gpt2", dict(DPO, mesh=(2, 2, 2), train__accumulation=2, optimizer__zero_stage=3,
                                      preference__loss="robust", preference__label_smoothing=0.2)),
    "ipo, ring": ("llama", dict(DPO, mesh=(1, 2, 2), mesh__context=2, mesh__context_strategy="ring",
                                preference__loss="ipo")),
    "hinge, 1f1b, context": ("llama", dict(DPO, mesh=(1, 2, 1), mesh__stage=2, mesh__context=2,
                                           preference__loss="hinge")),
    "adapters, zero-bubble": ("llama", dict(DPO, mesh=(1, 1, 2), mesh__stage=2, pipeline__schedule="zb_h1",
                                            lora__rank=3)),
    "quantized adapters": ("llama", dict(DPO, mesh=(1, 2, 2), lora__rank=3, lora__quantize="nf4")),
    "experts": ("mixtral", dict(DPO, mesh=(1, 2, 2), mesh__expert=2)),
    "kto, one device": ("gpt2", KTO),
    "kto, all axes": ("gpt2", dict(KTO, mesh=(2, 2, 2), train__accumulation=2, optimizer__zero_stage=2)),
    "kto, 1f1b, context": ("llama", dict(KTO, mesh=(1, 2, 1), mesh__stage=2, mesh__context=2)),
}
# Their losses and meshes are in other cases, too; a run of pairs is compared with one that has a copy.
SLOW = ("kto, 1f1b, context",)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=slow_if(name in SLOW)) for name in CASES])
def test_loss_and_gradients_are_those_of_the_formula(name):
    family, keys = CASES[name]
    run = reference.build(family, **keys)
    c, kto = run.config, keys["preference__loss"] == "kto"
    plain, parts = (plain_kto, [c.train.accumulation]) if kto else (plain_preference, [])
    batch = plain.batch()
    metrics, told = tuned.check(
        run, lambda policy, before: plain.loss(c.preference, c.model, policy, before, batch, *parts), batch,
        scaled=0.8 if kto else 1.1)
    for what, value in told.items():
        assert float(metrics[what]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), what


RECORDS = [{"prompt": f"say {i % 7}:", "chosen": f" yes {i % 7}{i % 9}", "rejected": f" no {i % 5}"} for i in range(70)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    folder.joinpath("pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    assert prepare.main([f"--input={folder}/pairs.jsonl", f"--output={folder}/corpus", "--eval_fraction=0.2"]) == 0
    return folder / "corpus"


def tiny(corpus, **keys):
    """The config of a run of eight steps, more than an epoch, on four devices."""
    return reference.tiny("llama", **(DPO | dict(
        model__vocab_size=258, model__max_seq_len=64, data__seq_len=64, data__source=str(corpus),
        data__global_batch_size=4, train__steps=8, train__progress=False, lora__rank=2, checkpoint__every=4,
        optimizer__schedule="constant", optimizer__warmup_steps=0, mesh__data=2, mesh__tensor=2) | keys))


def lines_of(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def computed(monkeypatch):
    """The numbers of rows in each call of a compiled pass."""
    found = []
    before = reference_sums.ReferenceSums._dispatched

    def counted(self, params, some):
        found.append(len(some))
        return before(self, params, some)
    monkeypatch.setattr(reference_sums.ReferenceSums, "_dispatched", counted)
    return found


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """A workdir of a whole run, and the state at its end."""
    folder = tmp_path_factory.mktemp("whole") / "whole"
    return folder, jt.train(tiny(corpus), folder)


@pytest.mark.exhaustive
def test_a_run_is_that_with_a_copy_and_has_none(corpus, whole, tmp_path):
    folder, state = whole
    copied = jt.train(tiny(corpus, preference__reference="copy"), tmp_path / "copy")
    assert "reference" in copied.frozen and "reference" not in state.frozen
    for ours, theirs in zip(lines_of(folder), lines_of(tmp_path / "copy"), strict=True):
        for name in ours.keys() & {"loss", "grad_norm", "reward_margin", "eval_loss", "eval_reward_margin"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=2e-6), name
    flops = [jt.build(tiny(corpus, preference__reference=kind)).lower().cost_analysis()["flops"]
             for kind in ("precomputed", "copy")]
    assert flops[0] < 0.85 * flops[1]  # no second pass forward


@pytest.mark.slow
def test_a_run_goes_on_and_is_extended_without_computing_anything_twice(corpus, whole, tmp_path, computed,
                                                                       monkeypatch):
    folder, state = whole
    parts = tuned.resumed(folder, tmp_path / "parts", last=8)
    chex.assert_trees_all_equal(jt.train(tiny(corpus), parts), state)
    assert computed == []
    (parts / reference_sums.FILE).unlink()
    shutil.rmtree(parts / "checkpoints" / "8")
    made, init = [], Run.init
    monkeypatch.setattr(Run, "init", lambda run, **given: made.append(init(run, **given)) or made[-1])
    chex.assert_trees_all_equal(jt.train(tiny(corpus), parts), state)
    assert sum(computed) > 8  # from the parameters at step 0
    assert [jax.tree.leaves(one.opt_state) for one in made] == [[]]  # beside a whole state, perhaps
    computed.clear()
    shutil.copytree(folder / "checkpoints", tmp_path / "mesh" / "checkpoints")
    for name in ("config.json", "run.json", reference_sums.FILE):
        shutil.copy(folder / name, tmp_path / "mesh" / name)
    shutil.rmtree(tmp_path / "mesh" / "checkpoints" / "8")
    elsewhere = jt.train(tiny(corpus, mesh__data=1, mesh__tensor=1, mesh__fsdp=4), tmp_path / "mesh")
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), *map(jax.device_get, (
        elsewhere.params, state.params)))
    assert computed == []


@pytest.mark.exhaustive  # that their rows are found is tested below, without training
def test_batches_of_ones_own_are_trained_on_alike(corpus, whole, tmp_path):
    batches = jt.build(tiny(corpus)).train_batches
    data = BatchFunction(lambda step: batches[step], tokens_per_row=64)
    state = jt.train(tiny(corpus, train__eval_every=0), tmp_path / "own", data=data)
    chex.assert_trees_all_equal(state.params, whole[1].params)
    with pytest.raises(jt.UserError, match=r"batch: the reference's numbers were not computed; call run\.see"):
        run = jt.build(tiny(corpus, train__eval_every=0), data=data)
        run.batch(0)


@pytest.mark.parametrize("goes_on", [*slow(True), *exhaustive(False)])
def test_two_processes_compute_what_one_does(corpus, whole, tmp_path, computed, goes_on):
    """They do from the first step, and where a run resumes whose numbers are lost."""
    folder, _ = whole
    if goes_on:
        tuned.resumed(folder, tmp_path / "two", 8).joinpath(reference_sums.FILE).unlink()
    with two_processes([f"--config={folder}/config.json"], tmp_path / "two", devices=2) as both:
        said = ended(both)
    assert [process.returncode for process in both] == [0, 0], "".join(said)
    assert said[0].count("preference.reference: ") == 2 and not said[1]
    for ours, theirs in zip(lines_of(tmp_path / "two"), lines_of(folder), strict=True):
        for name in ours.keys() & {"loss", "grad_norm", "eval_loss"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "8")
    jt.train(tiny(corpus), tmp_path / "two")
    assert computed == []
    if goes_on:
        return
    resumed = tuned.resumed(tmp_path / "two", tmp_path / "on", 8)
    with two_processes([f"--config={folder}/config.json"], resumed, devices=2) as both:
        said = ended(both)
    assert [process.returncode for process in both] == [0, 0], "".join(said)
    assert "preference.reference: " not in said[0]


@pytest.mark.exhaustive
def test_what_the_run_began_with_is_asked_for_when_numbers_are_missing(corpus, whole, tmp_path, capfd):
    text = corpus.parent / "text.txt"
    text.write_text("".join(record["prompt"] + record["chosen"] + "\n" for record in RECORDS * 20))
    plain = dict(preference__reference="copy", preference__loss="", preference__beta=0.1, data__packing="concat")
    for name in ("base", "other"):
        jt.train(tiny(corpus, **plain, data__source=str(text), train__steps=2, lora__rank=0,
                      train__seed=int(name == "base")), tmp_path / name)
    config = partial(tiny, corpus, train__init_from=str(tmp_path / "base"))
    state = jt.train(config(), tmp_path / "run")
    parts = tuned.resumed(tmp_path / "run", tmp_path / "parts", 8)
    jt.train(tiny(corpus), parts)  # nothing is missing, so that nothing is asked for
    for path in (parts / "checkpoints" / "8", parts / reference_sums.FILE):
        shutil.rmtree(path) if path.is_dir() else path.write_bytes(path.read_bytes()[:-1])
    wrong = (r"and train\.init_from=.*/other differs from the model that the run started from; "
             r"set train\.init_from=.*/base@2, or rest")
    with pytest.raises(jt.UserError, match=rf"preference\.reference: .* lacks numbers of the reference, {wrong}"):
        jt.train(config(train__init_from=str(tmp_path / "other")), parts)
    assert "reference_sums.bin is not as it was written: the reference's numbers are computed anew" in (
        capfd.readouterr().err)
    chex.assert_trees_all_equal(jt.train(config(), parts).params, state.params)
    with pytest.raises(jt.UserError, match=r"began with another|lacks numbers"):
        (parts / reference_sums.FILE).unlink()
        shutil.rmtree(parts / "checkpoints" / "8")
        jt.train(tiny(corpus), parts)


@pytest.mark.slow
def test_the_planner_counts_no_copy(corpus):
    wide = dict(lora__rank=0, model__embed_dim=1024, model__head_dim=64, model__mlp_dim=4096, model__num_layers=12)
    found = {kind: estimate(tiny(corpus, **wide, preference__reference=kind), *targets.parse("h100x4"))
             for kind in ("copy", "precomputed")}
    assert found["copy"].memory["frozen parameters"] > 0 and "frozen parameters" not in found["precomputed"].memory
    assert found["precomputed"].bytes < found["copy"].bytes and found["precomputed"].useful == found["copy"].useful
    assert found["precomputed"].seconds < 0.9 * found["copy"].seconds


# ------------------------------------------------------------------------------------- what is kept, without a model
@pytest.fixture
def fake(monkeypatch):
    """Sums of targets in place of log-probabilities, by any number of rows."""
    def program(self, rows, length):
        def of(params, batch):
            return {column: np.stack([np.bincount(s, t * w, length + 1).astype(np.float32) for s, t, w in zip(*(
                np.asarray(batch[f"{prefix}{name}"]) for name in ("segments", "targets", "weights")), strict=True)])
                for prefix, column in self.columns.items()}
        return of
    monkeypatch.setattr(reference_sums.ReferenceSums, "program", program)


def prepared(run, workdir, **keys):
    sums = reference_sums.ReferenceSums(run, workdir)
    sums.prepare(lambda: SimpleNamespace(all_params=None), **keys)
    return sums


def test_rows_get_their_own_sums_whatever_step_they_come_at(corpus, tmp_path, fake, computed, capfd, monkeypatch):
    run = jt.build(tiny(corpus, train__steps=12))
    with pytest.raises(jt.UserError, match=r"batch: the reference's numbers were not computed; call run\.see"):
        run.batch(0)
    sums = prepared(run, tmp_path)
    with pytest.raises(jt.UserError, match=r"a row for which .* for 12 steps and .* between them; raise train\.steps"):
        sums.beside({name: x[:, ::-1] for name, x in run.train_batches[0].items()})
    rows = len(run.batch_source.all_rows) + len(run.eval_batches.all_rows)
    assert sum(computed) == len(sums.known) <= rows and len(computed) == -(-len(sums.known) // 4)
    for batches, step in ((run.train_batches, 0), (run.train_batches, 11), (run.eval_batches, 1)):
        batch = sums.added_to(batches)[step]
        one = sums.added_to(batches).rows(step, [2])
        assert all(np.array_equal(one[name][0], batch[name][2]) for name in batch) and batch["reference"].any()
        assert not batch["reference"][batch["positions"] > 0].any()
        for row in range(4):
            one = {name: column[row] for name, column in batch.items()}
            for segment in range(1, one["segments"].max() + 1):
                here = one["segments"] == segment
                assert one["reference"][here].sum() == (one["targets"] * one["weights"])[here].sum()
    computed.clear()
    assert prepared(run, tmp_path).known.keys() == sums.known.keys() and computed == []
    with monkeypatch.context() as larger:
        larger.setattr(os, "fstat", lambda file: os.stat_result([*os.stat(file)[:6], 2**30 + 1, *os.stat(file)[7:10]]))
        assert prepared(run, tmp_path).known.keys() == sums.known.keys() and computed == []
    path = tmp_path / reference_sums.FILE
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    prepared(run, tmp_path)
    assert sum(computed) == len(sums.known)
    prepared(run, tmp_path, begun={"parameters": "others", "workdir": "elsewhere"})
    assert sum(computed) == 2 * len(sums.known)
    said = capfd.readouterr().err
    assert said.count("is not as it was written: the reference's numbers are computed anew\n") == 1
    assert said.count("is of a run that began with other parameters: the reference's numbers are computed anew\n") == 1


@pytest.mark.slow
def test_rows_of_a_mixture_and_batches_of_ones_own_are_found_too(corpus, fake, computed):
    mixture = {name: {"source": str(corpus), "weight": 1} for name in ("a", "b")}
    mixed = prepared(jt.build(tiny("stdlib", data__mixture=mixture, train__steps=20)), None)
    plain = jt.build(tiny(corpus, train__steps=20))
    assert mixed.known.keys() == prepared(plain, None).known.keys()
    computed.clear()
    data = BatchFunction(lambda step: plain.train_batches[step % 2], tokens_per_row=64)
    own = prepared(jt.build(tiny(corpus, train__steps=20, train__eval_every=0), data=data), None)
    assert sum(computed) == len(own.known) == 8 and own.known.keys() < mixed.known.keys()
    assert np.array_equal(own.beside(data[3])["reference"], mixed.beside(data[1])["reference"])


def test_incomplete_batches_of_ones_own_are_refused(corpus, fake):
    plain = jt.build(tiny(corpus))
    batches = [dict(plain.train_batches[step % 2]) for step in range(8)]
    run = replace(plain, data=BatchFunction(batches.__getitem__, tokens_per_row=64), extensions=())
    sums, whole = prepared(run, None), batches[1]
    for changed, message in (
        ({name: x for name, x in whole.items() if name != "segments"}, "no array 'segments', which Preference takes"),
        (whole | {"weights": whole["weights"][:3]}, "its array 'weights' has the shape 3 x 64"),
        ({name: x[:, :32] for name, x in whole.items()}, "its shape is 4 x 32, and the config declares 4 x 64"),
    ):
        batches[1] = changed
        with pytest.raises(jt.UserError, match=f"batch: .*{message}"):
            prepared(run, None)
        with pytest.raises(jt.UserError, match="batch: "):
            replace(run, extensions=(PrecomputedReference(sums),)).batch(1)


def test_a_run_that_goes_on_makes_parameters_alone(corpus, monkeypatch):
    monkeypatch.setattr(Run, "init", lambda run, parts: run)
    run = of_kind(jt.build(tiny(corpus, train__ema_decay=0.9)), PrecomputedReference).sums.initial({})
    state = jax.eval_shape(run._init, 0)
    assert jax.tree.structure(state) == jax.tree.structure(run.layout.state)
    assert jax.tree.leaves(state.all_params) and not jax.tree.leaves((state.opt_state, state.extras))


def test_only_what_will_be_read_is_computed_and_a_pass_that_was_killed_goes_on(corpus, tmp_path, fake, computed,
                                                                              monkeypatch):
    few = prepared(jt.build(tiny(corpus, train__steps=1, train__eval_batches=1)), tmp_path)
    assert len(few.known) <= 8
    computed.clear()
    monkeypatch.setattr(reference_sums, "EVERY_S", -1)

    def killed(name, batches=iter(range(3))):
        if next(batches, None) is None:
            raise KeyboardInterrupt
        return contextlib.nullcontext()
    run = jt.build(tiny(corpus, train__steps=12, train__eval_batches=1))
    with pytest.raises(KeyboardInterrupt):
        prepared(run, tmp_path, phase=killed)
    before = len(reference_sums._unpacked(*kept(tmp_path)))
    assert before == len(few.known) + 8  # two of three batches: the third was not waited for
    computed.clear()
    assert sum(computed) + before <= len(prepared(run, tmp_path).known) == sum(computed) + before


def kept(workdir):
    head, _, body = (workdir / reference_sums.FILE).read_bytes().partition(b"\n")
    return body, json.loads(head)["rows"]


@pytest.mark.parametrize(("keys", "message"), [
    (dict(preference__loss="simpo"), "preference.reference: preference.loss='simpo' does not read it; leave it out"),
    (dict(preference__loss="reward", preference__beta=0.1), "preference.reference: preference.loss='reward' does not"),
    (dict(preference__reference="none"), "preference.reference: 'none' is not supported"),
    (dict(preference__loss="", data__packing="concat", preference__beta=0.1), "preference.reference: preference.los"),
])
def test_mistakes_are_told_in_one_line(keys, message):
    with pytest.raises(jt.UserError) as refusal:
        reference.tiny("llama", **(DPO | keys))
    assert f"{refusal.value}".startswith(message)
