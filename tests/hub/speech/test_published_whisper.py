"""A published Whisper: the numbers of transformers, the same bytes back, and log-mel frames on the device."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.data.prepare_sequences import audio
from jaxtrain.hf.hf_config import config_json, model_section, starting_config
from jaxtrain.hub import trained_tokenizer
from jaxtrain.hub.speech import speech_model, transcribe
from jaxtrain.hub.weights import published_weights, safetensors_files
from jaxtrain.kernels.log_mel import log_mel
from jaxtrain.run import abstract_model
from jaxtrain.sharding import activations, mesh_context
from tests.hub import published
from tests.hub.speech import tiny_whisper as tiny
from tests.tiers import exhaustive, slow

TRUTH = json.loads(Path(__file__).with_name("whisper_truth.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    (folder / "config.json").write_text(json.dumps(tiny.CONFIG | {"model_type": "whisper"}))
    shapes = TRUTH["shapes"]
    safetensors_files.write(folder / "model.safetensors", shapes, dict.fromkeys(shapes, np.dtype(np.float32)),
                            (published.weight(name, tuple(shape)) for name, shape in shapes.items()))
    return folder


def close(name, found):
    wanted = TRUTH[name]
    return np.abs(np.subtract(published.projections(name, np.asarray(found)), wanted)).max() < 1e-5 * wanted[0]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2, "tensor": 2}])
def test_numbers_and_bytes_are_those_of_transformers(folder, tmp_path, mesh):
    config = starting_config(f"{folder}")
    config = {"model": config["model"], "data": config["data"] | {"global_batch_size": 2}, "mesh": mesh or {"data": 1}}
    run = jt.build(jt.make_config(config), devices=jax.devices()[:4 if mesh else 1])
    params = published_weights.load(folder, run.config.model, abstract_model(run))

    @jax.jit
    def passed(params, features, tokens):
        model = run.model.merge(params)
        memory = model.encode(activations.constrain(features, "batch", None, None))
        x, _ = model.decode(activations.constrain(tokens, "batch", None), memory)
        return memory, model.logits(x)

    if not mesh:
        with mesh_context.use(run.mesh, run.sharded.rules):
            memory, logits = passed(params, jnp.asarray(tiny.FEATURES), jnp.asarray(tiny.TOKENS))
        assert close("memory", memory) and close("logits", logits)
    published_weights.save(params, run.config.model, tmp_path, np.float32, 10**9)
    assert safetensors_files.tensors_of(tmp_path).keys() == TRUTH["shapes"].keys()
    for name, tensor in safetensors_files.tensors_of(tmp_path).items():
        assert np.array_equal(tensor.view(), published.weight(name, tuple(TRUTH["shapes"][name]))), name


def test_its_config_goes_both_ways(folder):
    section = model_section(folder)
    assert section["prefix"] == [3] and section["end"] == 2 and section["audio_positions"] == 10
    model = jt.make_config({"model": section, "data": {"packing": "bucket", "seq_len": 20}}).model
    written = config_json(model)
    assert {key: written[key] for key in tiny.CONFIG.keys() & written.keys() - {"pad_token_id", "bos_token_id"}} == {
        key: tiny.CONFIG[key] for key in tiny.CONFIG.keys() & written.keys() - {"pad_token_id", "bos_token_id"}}


@pytest.mark.parametrize(("keys", "message"), [
    ({"encoder_attention_heads": 2}, "encoder_attention_heads=2 cannot be expressed: only decoder_attention_heads=4"),
    ({"activation_function": "relu"}, "activation_function='relu' cannot be expressed"),
    ({"scale_embedding": True}, "scale_embedding=True cannot be expressed"),
])
def test_what_cannot_be_expressed_is_refused(tmp_path, keys, message):
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG | {"model_type": "whisper"} | keys))
    with pytest.raises(jt.UserError, match=message):
        model_section(tmp_path)


@pytest.mark.parametrize("mels", [80, 128])
def test_frames_are_those_of_transformers(mels):
    frames, wanted = audio.log_mel(tiny.SAMPLES, mels), TRUTH["mels"][str(mels)]
    error = np.abs(np.subtract(published.projections("mels", frames), wanted)).max()
    assert error < 2e-5 * wanted[0]  # as far as float32 of torch is from float64
    here = np.asarray(jax.jit(log_mel, static_argnums=1)(tiny.SAMPLES[None], mels))[0]
    assert np.abs(here - frames).max() < 2e-4


# ----------------------------------------------------------------------------------------- transcripts of a tiny model
class Words:
    """A tokenizer that spells tokens by their numbers."""

    vocab_size, specials = 53, {}

    @staticmethod
    def decode(ids):
        return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Return what opens the model that says what one of the files asks for."""
    shapes, at = TRUTH["speaker"], tmp_path_factory.mktemp("speakers")

    def made(name, *case):
        folder = at / name
        if not folder.exists():
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(tiny.SPEAKER | {"model_type": "whisper"}))
            if (said := tiny.GENERATIONS[name]) is not None:
                (folder / "generation_config.json").write_text(json.dumps(said))
            safetensors_files.write(folder / "model.safetensors", shapes, dict.fromkeys(shapes, np.dtype(np.float32)), (
                tiny.loud(key, published.weight(key, tuple(shape))) for key, shape in shapes.items()))
        return speech_model.open_model(folder, **dict(zip(("language", "task", "timestamps"), case, strict=False)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_tokenizer, "tokenizer_of", lambda folder: Words)
        yield made


FIRST, OFTEN = ("several", "", "", False), [("one_unforced", "", "", True), ("short", "", "", False)]


def tier(case):
    return case if case[0] == FIRST else (slow if case[0] in OFTEN else exhaustive)(case)[0]


@pytest.mark.parametrize(("case", "truth"), [
    tier(case) for case in zip(tiny.CASES, TRUTH["transcripts"], strict=True)
    if case[0][:3] != ("german", "", "translate")])
def test_transcripts_are_those_of_transformers(case, truth, opened):
    model = opened(*case)
    rows = [model.prompt_for(frames, np.ones(len(frames))) for frames in tiny.FEATURES]
    assert rows == truth["prompts"]
    tokens, _ = model.decoding.decode(tiny.FEATURES, None, np.array(rows, np.int32), model.new)
    # Without any file, transformers ends after 20 tokens.
    found = [row[row != tiny.END].tolist()[:20 if case[0] == "none" else None] for row in tokens]
    assert found == truth["tokens"]


def test_windows_of_a_long_recording_are_those_of_transformers(opened, monkeypatch):
    monkeypatch.setattr("jaxtrain.kernels.log_mel.log_mel_of_file", lambda samples, mels: tiny.LONG[0])
    model = opened("several", "de")  # it has times for a long one anyway
    found = transcribe.transcribed(model, [("a", np.zeros(len(tiny.LONG[0]) * audio.HOP))], 1)["a"]
    assert [[int(id) for id in one.text.split()] for one in found] == TRUTH["long"]

