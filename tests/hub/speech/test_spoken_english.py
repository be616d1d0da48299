"""Real speech and a real model: the tokens of transformers. Random models say nothing, and show few mistakes."""

import json
import shutil
from pathlib import Path

import pytest

from jaxtrain.hub.speech import speech_model, transcribe
from tests.hub.speech import spoken, whisper_from_ctranslate2

TRUTH = json.loads(Path(__file__).with_name("spoken_truth.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = spoken.english_model()
    if model is None or shutil.which("espeak-ng") is None:
        pytest.skip(f"needs the package {spoken.PACKAGE} and espeak-ng")
    folder = tmp_path_factory.mktemp("real") / "tiny.en"
    whisper_from_ctranslate2.convert(model, folder)
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize("timestamps", [False, True])
def test_spoken_sentences_are_heard_as_by_transformers(folder, timestamps, monkeypatch):
    clips, said = spoken.clips(), []
    if other := [name for name, samples in clips.items() if spoken.digest(samples) != TRUTH[name]["sha256"]]:
        pytest.skip(f"this espeak-ng speaks otherwise than the one of the recorded tokens: {other[0]}")
    model, plain = speech_model.open_model(folder, timestamps=timestamps), speech_model.SpeechModel.said
    monkeypatch.setattr(speech_model.SpeechModel, "said", lambda self, ids: said.append(plain(self, ids)) or said[-1])
    for name, samples in clips.items():
        said.clear()
        segments = transcribe.transcribed(model, [(name, samples)], 1)[name]
        assert [id for ids in said for id in ids] == TRUTH[name]["tokens"][timestamps], name
        assert sum(len(segment.text.split()) for segment in segments) >= 6
