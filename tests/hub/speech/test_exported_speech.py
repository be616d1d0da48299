"""The files of exported speech models: those of the published one, or what the run's prefix and tokenizer say."""

import json
from types import SimpleNamespace

import pytest

from jaxtrain.config.modality_families import WhisperConfig
from jaxtrain.config.speech.published_speech import rules_of
from jaxtrain.hf.hf_config import model_section
from jaxtrain.hub.speech import exported_speech, speech_model
from tests.hub.speech import tiny_whisper as tiny

WORDS = SimpleNamespace(vocab_size=53, bos=None, specials={
    "<|startoftranscript|>": 31, "<|en|>": 32, "<|de|>": 33, "<|translate|>": 36, "<|transcribe|>": 37,
    "<|notimestamps|>": 41})
KEYS = dict(vocab_size=53, num_layers=1, embed_dim=16, num_heads=4, max_seq_len=30, audio_positions=10, mels=6, end=30)


@pytest.fixture
def exported(tmp_path):
    """Return what exports a run that began with a model, and its folder; `said`: of that model's file, None: none."""
    def made(prefix, said=None, **config):
        folder, base, run = (tmp_path / name for name in ("out", "base", "run"))
        for each in (folder, base, run):
            each.mkdir(exist_ok=True)
        (run / "config.json").write_text(json.dumps(
            {"model": {"name": "whisper"}, "train": {"init_from": f"{base}" if said else ""}}))
        if said:
            (base / "config.json").write_text(json.dumps(tiny.SPEAKER | {"model_type": "whisper"} | config))
            (base / "generation_config.json").write_text(json.dumps(said))
        c, described = WhisperConfig(**KEYS, prefix=prefix), dict(tiny.SPEAKER | {"model_type": "whisper"})
        exported_speech.write(run, folder, c, WORDS, described)
        (folder / "config.json").write_text(json.dumps(described))
        return folder, speech_model.rules_for(run, c, WORDS).prompt(prefix)

    return made


@pytest.mark.parametrize(("name", "prefix"), [("several", [31]), ("one", [31, 41]), ("named", [31, 33, 36, 41])])
def test_what_the_published_model_says_is_kept(exported, name, prefix):
    said = tiny.GENERATIONS[name] | {"alignment_heads": [[1, 0]]}
    folder, _ = exported(prefix, said, forced_decoder_ids=[[1, 5]], suppress_tokens=[9])
    assert json.loads((folder / "generation_config.json").read_text()) == said
    config = json.loads((folder / "config.json").read_text())
    assert config["forced_decoder_ids"] == [[1, 5]] and config["suppress_tokens"] == [9]


@pytest.mark.parametrize(("prefix", "said"), [
    ([31], None), ([31, 33, 37, 41], None), ([31, 41], None), ([31, 33, 37, 41], tiny.SEVERAL),
    ([31, 32, 36, 41], tiny.GENERATIONS["named"])])
def test_an_exported_model_is_prompted_as_it_was_trained(exported, prefix, said):
    folder, prompt = exported(prefix, said)
    assert model_section(folder)["prefix"] == prefix == prompt == rules_of(folder).prompt(prefix)
    assert json.loads((folder / "preprocessor_config.json").read_text())["feature_size"] == 6


def test_whoever_trains_several_languages_without_one_is_told(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.SPEAKER | {"model_type": "whisper"}))
    (tmp_path / "generation_config.json").write_text(json.dumps(tiny.SEVERAL))
    note = speech_model.prefix_note(tmp_path, SimpleNamespace(prefix=[31]))
    assert "--config.model.prefix=[31, 33, 37, 41], or begin" in note and "<|de|><|transcribe|><|notimestamps|>" in note
    assert speech_model.prefix_note(tmp_path, SimpleNamespace(prefix=[31, 33, 37, 41])) == ""
