"""Speech: loss and gradients of plain formulas on any mesh; runs by a config over a prepared corpus; SpecAugment."""

import functools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import soundfile

import jaxtrain as jt
from jaxtrain.data.loading.modalities.spec_augment import augmented
from jaxtrain.data.prepare_sequences.audio import Audio
from jaxtrain.data.prepare_sequences.prepare_sequences import prepare_sequences
from jaxtrain.hub.export import export
from jaxtrain.hub.speech.transcribe import transcribe
from jaxtrain.hub.trained_model import sections_of
from jaxtrain.objectives.transcription import rows_of
from jaxtrain.sharding.mesh import AXES
from jaxtrain.train_step import partition
from tests.numerics import reference
from tests.objectives import plain_transcription as plain
from tests.objectives.tuned import resumed
from tests.tiers import slow_if

pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once
CASES = {
    "data, fsdp, tensor": dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, train__accumulation=2),
    "chunks, context, tensor": dict(mesh__context=2, mesh__tensor=2, mesh__context_strategy="ring", train__remat="full",
                                    model__audio_chunk=2, model__audio_chunks_back=1),
    "stages, context, tensor": dict(mesh__stage=2, mesh__context=2, mesh__tensor=2, model__encoder_layers=2),
    "uneven stages, silence": dict(mesh__stage=2, mesh__context=2, mesh__context_strategy="ulysses",
                                   pipeline__schedule="zb_v", model__num_layers=1, model__encoder_layers=3,
                                   model__mask_padding=False),
    "context, silence, kernels": dict(mesh__context=2, mesh__context_strategy="ulysses", train__attention="splash",
                                      model__mask_padding=False),
    "one device, without ctc": dict(model__ctc_weight=0.0),
    "zero": dict(mesh__data=2, mesh__fsdp=4, optimizer__zero_stage=3),
}
SLOW = ("context, silence, kernels",)


@functools.cache
def begun(**keys):
    """All parameters on the host, of which none is 0, as one device makes them."""
    run = jt.build(plain.config(**keys), devices=jax.devices()[:1])
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: (a + rng.normal(0, 0.05, a.shape)).astype(np.float32),
                        jax.device_get(run._jitted_init(0).all_params))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=slow_if(name in SLOW)) for name in CASES])
def test_loss_and_gradients_are_those_of_the_formulas(name):
    config = plain.config(**CASES[name], data__global_batch_size=8)  # the formula goes from row to row
    run = jt.build(config, devices=jax.devices()[: math.prod(getattr(config.mesh, axis) for axis in AXES)])
    params = begun(**{key: value for key, value in CASES[name].items() if key.startswith("model")})
    batch, state = plain.batch(rows=8), reference.start_from(run, params)
    formula = functools.partial(plain.loss, config.model, b=batch)
    want, slopes = jax.jit(jax.value_and_grad(formula)).lower(params).compile(
        {"xla_backend_optimization_level": 0})(params)
    got, grads = jax.device_get(run.value_and_grad(state, batch))
    assert float(got) == pytest.approx(float(want), rel=1e-5)
    slopes = jax.device_get(partition.like(slopes, grads))
    error, leaf = reference.worst(grads, slopes, floor=1e-3 * float(reference.norm_of(slopes)))
    assert error < 3e-5, leaf
    assert "audio_positions" not in grads and "audio_positions" in state.frozen


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_evaluation_has_both_losses(share):
    """Its loss is that of the decoder, and only where the encoder alone is trained that of CTC."""
    run = jt.build(plain.config(model__ctc_weight=share), devices=jax.devices()[:1])
    params, batch = begun(), plain.batch()
    entropy, ctc = (plain.loss(replace(run.config.model, ctc_weight=weight), params, batch) for weight in (0.0, 1.0))
    loss, weight, sums = run.sharded.evaluate(reference.start_from(run, params), batch)
    assert float(loss / weight) == pytest.approx(float(ctc if share == 1 else entropy), rel=1e-5)
    told = run.objective.evaluation.metrics(sums | {"weight": weight})
    assert float(told["ctc"]) == pytest.approx(float(ctc), rel=1e-5)
    assert list(run.objective.evaluation_metrics) == (["perplexity", "ctc"] if share < 1 else ["ctc"])


def test_a_row_without_audio_weighs_nothing():
    config, batch = plain.config(), plain.batch()
    tokens, targets, weights = (np.asarray(x) for x in rows_of(batch, config.model))
    assert not weights[0].any() and weights[1].sum() == 4  # three tokens and the end
    assert tokens[1, :2].tolist() == [1, 2] and targets[1, 1:5].tolist() == [*batch["target"][1, :3], 3]
    assert np.array_equal(np.flatnonzero(weights[1]), [1, 2, 3, 4])


# ----------------------------------------------------------------------------------------------------- runs by a config
@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Clips of one to four letters, each a note."""
    folder, rng = tmp_path_factory.mktemp("clips"), np.random.default_rng(0)
    for n in range(60):
        said = rng.integers(3, size=rng.integers(1, 5))
        sound = [np.sin(np.arange(1600) * 0.1 * (1 + letter)) for letter in said]
        soundfile.write(folder / f"{n:02}.wav", np.concatenate(sound) * 0.3, 16_000)
        (folder / f"{n:02}.txt").write_text("".join("abc"[letter] for letter in said))
    return prepare_sequences([f"{folder}"], folder / "corpus", Audio("text", eval_fraction=0.2))


def of(corpus, **keys):
    return plain.config(**(dict(
        data__source=str(corpus.path), model__vocab_size=320, model__mels=80, model__prefix=[257], model__end=256,
        model__audio_positions=32, data__seq_len=64, data__buckets=[32, 64], model__time_masks=1,
        model__time_mask=4, train__progress=False) | keys))


@pytest.mark.parametrize("stages", [pytest.param(stages, marks=slow_if(stages == 1)) for stages in (1, 2)])
def test_a_run_goes_on_with_the_same_bits_and_is_transcribed_and_exported(corpus, tmp_path, stages):
    config = of(corpus, train__steps=4, checkpoint__every=2, data__buckets=[64], mesh__stage=stages, mesh__context=2,
                train__compiler_options={"xla_backend_optimization_level": 0})
    run = jt.build(config, devices=jax.devices()[:2 * stages])
    whole = jt.train(run, tmp_path / "whole")
    parts = jt.train(run, resumed(tmp_path / "whole", tmp_path / "parts", last=4))
    assert jax.tree.all(jax.tree.map(np.array_equal, *map(jax.device_get, (whole.params, parts.params))))
    lines = [json.loads(line) for line in tmp_path.joinpath("whole/metrics.jsonl").read_text().splitlines()]
    assert lines[-1].keys() == {"step", "eval_loss", "eval_perplexity", "eval_ctc"} and lines[0]["ctc"] > 0
    clips = [str(corpus.path.parent / f"{n:02}.wav") for n in range(3)]
    found = transcribe(tmp_path / "whole", clips, batch_size=2)
    assert list(found) == clips and all(segments[0].begin == 0 for segments in found.values())
    export(tmp_path / "whole", tmp_path / "out", dtype="float32")
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == 256
    back, state = jt.load_model(tmp_path / "out")
    assert (back.config.model.ctc_weight, back.config.model.mask_padding) == (0.3, True)
    kept = jax.device_get(jt.load_model(tmp_path / "whole")[1].params)
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(state.params), kept))
    assert transcribe(tmp_path / "out", clips, batch_size=2) == found


def test_spec_augment_is_a_function_of_seed_step_and_row(corpus):
    run = jt.build(of(corpus, model__mel_masks=1), devices=1)
    batches, plainly = run.batch_source, jt.build(of(corpus, model__time_masks=0), devices=1).batch_source
    batch = batches[3]
    some = batches.rows(3, [5, 2])
    assert all(np.array_equal(some[name], batch[name][[5, 2]]) for name in batch)
    masked = batch["features"] != plainly[3]["features"]
    assert masked.any() and not batch["features"][masked].any()
    frames = masked.any(2)  # of one stretch and one range: each row has a rectangle or two of zeros
    assert (frames.sum(1) <= batch["weights"].sum(1)).all()
    other = augmented(plainly, run.config.model, seed=1)[3]["features"]
    assert not np.array_equal(other, batch["features"])
    same = SimpleNamespace(rows=lambda step, indices: {  # the same clip in each row of every step
        "features": np.ones((len(indices), 64, 80), np.float16), "weights": np.ones((len(indices), 64), np.float32)})
    seen = [augmented(same, run.config.model, seed=0).rows(step, [row])["features"].tobytes()
            for step in range(3) for row in range(3)]
    assert len(set(seen)) == 9


@pytest.mark.parametrize(("keys", "message"), [
    (dict(model__end=400), "model.end: 400 is not a token below model.vocab_size=320; give ids of the tokenizer"),
    (dict(model__prefix=[]), "model.prefix: 0 tokens in sequences of model.max_seq_len=8; give the"),
    (dict(data__seq_len=128), "data.seq_len: 128 exceeds model.audio_positions=32; lower it or raise model.audio_pos"),
    (dict(model__ctc_weight=2.0), "model.ctc_weight: 2.0 is not in [0, 1]; give a share such as 0.3"),
    (dict(model__audio_chunks_back=2), "model.audio_chunks_back: it is read with model.audio_chunk only; set that"),
    (dict(data__seq_len=32, data__crop=True, data__buckets=[]), "data.seq_len: "),
    (dict(mesh__context=2, model__max_seq_len=6), "model.max_seq_len: the 6 tokens of the decoder in 4 parts: that do"),
    (dict(mesh__context=2, mesh__tensor=2, data__seq_len=60, data__buckets=[60]), "data.seq_len: the 30 positions of "),
    (dict(mesh__stage=2, pipeline__chunks=4, pipeline__schedule="interleaved"), "pipeline.chunks: 4 chunks on a stage"),
    (dict(evaluation__tasks=["a"]), "evaluation.tasks: it is for decoders of text, and whisper is not one; leave it"),
    (dict(model__num_kv_heads=2), "model.num_kv_heads: 2 differs from model.num_heads=4;"),
])
def test_mistakes_are_told_in_one_line(corpus, keys, message):
    with pytest.raises(jt.UserError) as refusal:
        config = of(corpus, **keys)
        jt.build(config, devices=math.prod(getattr(config.mesh, axis) for axis in AXES)).train_batches
    assert f"{refusal.value}".startswith(message)


def test_a_workdir_is_read_to_publish_it_and_not_to_continue_text(tmp_path):
    for name, text in (("whisper", False), ("whisper", True), ("events", False)):
        (tmp_path / "config.json").write_text(json.dumps({"model": {"name": name}}))
        if (name, text) == ("whisper", False):
            assert sections_of(tmp_path)["model"] == {"name": "whisper"}
            continue
        with pytest.raises(jt.UserError, match=f"WORKDIR: it trained {name}, which is not a decoder of text"):
            sections_of(tmp_path, text=text)


def test_what_cannot_be_transcribed_is_one_sentence(tmp_path):
    for name, message in (("siglip", "WORKDIR: its model is siglip, which does not read audio; give one of whisper"),
                          ("gpt2", "WORKDIR: its model is gpt2, which does not read audio; give one of whisper"),
                          ("whisper", f"FILES: {tmp_path}/gone does not exist; name files or folders of .wav, .flac")):
        (tmp_path / "config.json").write_text(json.dumps({"model": {"name": name}}))
        with pytest.raises(jt.UserError) as refusal:
            transcribe(tmp_path, [f"{tmp_path}/gone"])
        assert f"{refusal.value}".startswith(message)
