"""Clips: loss, gradients and accuracy of the plain formula on any mesh; runs over what `prepare_sequences` wrote."""

import dataclasses
import math

import jax
import numpy as np
import pytest
import soundfile

import jaxtrain as jt
from jaxtrain.config.modality_families import ClipsConfig
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.data.loading.batch_spec import SEQ, Array, BatchSpec
from jaxtrain.data.loading.modalities.sequence_batches import load_sequences, sequence_batches
from jaxtrain.data.prepare_sequences.audio import Audio
from jaxtrain.data.prepare_sequences.prepare_sequences import prepare_sequences
from jaxtrain.objectives.clip_label import ClipLabel
from tests.numerics import reference
from tests.objectives import plain_clips as plain
from tests.objectives.tuned import lines_of_same_bits


@pytest.mark.parametrize("mesh", [
    pytest.param(dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2), marks=pytest.mark.slow),
    pytest.param(dict(mesh__fsdp=2, mesh__context=2, mesh__tensor=2), marks=pytest.mark.slow),
    pytest.param(dict(mesh__fsdp=2, mesh__stage=2, mesh__context=2), marks=pytest.mark.exhaustive),
    pytest.param(dict(mesh__context=4), marks=pytest.mark.exhaustive),
    pytest.param(dict(mesh__fsdp=2, mesh__stage=2, mesh__tensor=2), marks=pytest.mark.exhaustive)])
def test_loss_gradients_and_accuracy_are_those_of_the_formula(mesh):
    config = plain.config(**mesh, train__accumulation=2)
    run = jt.build(config, devices=jax.devices()[:math.prod(mesh.values())])
    rng, batch = np.random.default_rng(0), plain.batch()
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.1, leaf.shape).astype(np.float32), run.abstract.params)
    (want, accuracy), slopes = jax.jit(jax.value_and_grad(
        lambda params: plain.metrics(config.model, params, batch), has_aux=True))(params)
    state = reference.start_from(run, params)
    got, grads = jax.device_get(run.value_and_grad(state, batch))
    assert float(got) == pytest.approx(float(want), rel=1e-5)
    error, leaf = reference.worst(grads, jax.device_get(slopes), floor=1e-3 * float(reference.norm_of(slopes)))
    assert error < 2e-5, leaf
    total, weight, sums = run.sharded.evaluate(state, batch)
    assert float(total / weight) == pytest.approx(float(want), rel=1e-5) and float(weight) == plain.ROWS - 1
    assert float(run.objective.metrics(sums)["accuracy"]) == pytest.approx(float(accuracy))


def test_batches_have_frames_and_labels(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(12):
        folder = tmp_path / "clips" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        soundfile.write(folder / f"{i}.wav", 0.1 * rng.normal(size=320 + 160 * i), 16_000)
    corpus = prepare_sequences([str(tmp_path / "clips")], tmp_path / "corpus", Audio(target="folder"))
    config = plain.config(data__source=str(corpus.path), data__global_batch_size=4)
    declared = BatchSpec(ClipLabel(None, 2).batch_spec, "ClipLabel")
    batches = sequence_batches(config.data, load_sequences(config.data), "train", declared.arrays)
    batch = batches[0]
    rows, length = declared.check(batch)
    assert batch["features"].shape == (rows, length, 80) and batch["label"].shape == (rows,)
    assert {int(label) for step in range(3) for label in batches[step]["label"]} == {0, 1}
    with pytest.raises(jt.UserError, match=r"the shape 4 x \d+ x 79, and ClipLabel takes 4 x \d+ x 80; give it that"):
        declared.check(batch | {"features": batch["features"][..., :79]})
    with pytest.raises(jt.UserError, match="'features' has rows of steps x 80, and the model takes steps x 40; name"):
        sequence_batches(config.data, corpus, "train", {"features": Array(np.float16, (SEQ, 40))})
    with pytest.raises(jt.UserError, match="'label' has the number 1, and ClipLabel takes those below 1"):
        BatchSpec(ClipLabel(None, 1).batch_spec, "ClipLabel").check(batch)
    with pytest.raises(jt.UserError, match="'label' has ids up to 1, and the model takes those below 1; give the mode"):
        sequence_batches(config.data, corpus, "train", {"label": Array(np.int32, (), below=1)})


@pytest.mark.slow
def test_a_run_learns_and_goes_on_with_the_same_bits(cache, tmp_path):
    """Clips of a low or a high note, with their frames on two devices."""
    rng = np.random.default_rng(0)
    for i in range(40):
        folder = tmp_path / "clips" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        note = np.sin(np.arange(rng.integers(480, 2560)) * (0.1, 0.4)[i % 2])
        soundfile.write(folder / f"{i}.wav", 0.3 * note, 16_000)
    corpus = prepare_sequences([f"{tmp_path / 'clips'}"], tmp_path / "corpus", Audio("folder", eval_fraction=0.2))
    config = plain.config(data__source=str(corpus.path), data__global_batch_size=8, data__buckets=[8, 16],
                          mesh__context=2, train__steps=12, train__progress=False, checkpoint__every=6)
    run = jt.build(config, devices=jax.devices()[:2])
    lines = lines_of_same_bits(run, tmp_path, last=12)
    assert lines[-1].keys() == {"step", "eval_loss", "eval_accuracy"} and lines[-1]["eval_accuracy"] == 1
    assert lines[-1]["eval_loss"] < lines[0]["loss"]


def test_a_corpus_of_another_kind_is_refused_as_such_whatever_its_lengths(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.sin(np.arange(16_000)), 16_000)
    prepare_sequences([f"{tmp_path}/a.wav"], tmp_path / "corpus", Audio(eval_fraction=0))
    run = jt.build(plain.config(data__source=f"{tmp_path}/corpus"), devices=1)
    with pytest.raises(jt.UserError, match=r"^data\.source: it has no column 'label', which the model reads"):
        run.train_batches


def test_a_kernel_that_is_not_here_is_refused():
    with pytest.raises(jt.UserError, match=r"^train\.attention: the cudnn backend cannot do this: "):
        jt.build(plain.config(train__attention="cudnn"), devices=1)


@pytest.mark.parametrize(("said", "told"), [
    (ModelConfig.rows_cut, "cut; set mesh.context=1, or give OwnConfig rows_cut = True if its model takes them in the "
                           "order of parallel.context"), (False, "cut; set mesh.context=1")])
def test_a_family_of_ones_own_that_looks_both_ways_says_that_its_rows_can_be_cut(said, told):
    given = plain.config(mesh__context=2)
    own = type("OwnConfig", (ClipsConfig,), {"rows_cut": said})
    model = own(**{field.name: getattr(given.model, field.name) for field in dataclasses.fields(given.model)})
    with pytest.raises(jt.UserError) as refusal:
        jt.build(dataclasses.replace(given, model=model), devices=2)
    assert f"{refusal.value}".endswith(told)
