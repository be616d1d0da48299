"""Windows of long files, what follows from times, and the tokens before and among those of a transcript."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.config.modality_families import SILENCE
from jaxtrain.data.prepare_sequences.audio import log_mel
from jaxtrain.hub import trained_model
from jaxtrain.hub.speech import transcribe
from jaxtrain.models.modalities.whisper import silent_after

FIRST = 20  # the token of 0 seconds
C = SimpleNamespace(audio_positions=5, mels=80, end=3, prefix=[1])
WORDS = SimpleNamespace(vocab_size=20, decode=lambda ids: " ".join(map(str, ids)),
                        specials={"<|startoftranscript|>": 1, "<|en|>": 4, "<|transcribe|>": 5, "<|notimestamps|>": 19})


@pytest.mark.parametrize(("ids", "whole", "rest"), [
    ([20, 7, 22], [(0, 2, [7])], None),  # all was said
    ([20, 7, 22, 22, 8], [(0, 2, [7])], [22, 8]), ([20, 7, 22, 22], [(0, 2, [7])], [22]),
    ([20, 7, 22, 23, 8, 24], [(0, 2, [7]), (3, 4, [8])], None), ([20, 7, 8], [], [20, 7, 8]), ([20], [], [20]),
    ([], [], None), ([7, 22], [(0, 2, [7])], None),
])
def test_a_window_is_cut_at_its_times(ids, whole, rest):
    found, left = transcribe.cut_at_times(ids, FIRST)
    assert found == [(begin * 0.02, end * 0.02, part) for begin, end, part in whole] and left == rest


@pytest.mark.parametrize(("ids", "at", "said"), [
    ([20, 7, 22, 22, 8], 4, [(0, 0.04, "7")]),  # what is not whole is read again
    ([20, 7, 22], 10, [(0, 0.04, "7")]), ([20, 7], 10, [(0, 0.1, "7")]), ([20], 10, []),
])
def test_the_next_window_begins_where_the_last_whole_segment_ended(ids, at, said):
    reading = transcribe._Reading(np.zeros((25, 80), np.float32))
    transcribe._read_on(reading, ids, WORDS, C, FIRST)
    assert reading.at == at and [(one.begin, one.end, one.text) for one in reading.found] == said


@pytest.mark.parametrize("loud", [1.0, 1e-3])
def test_behind_the_end_there_is_the_silence_of_frames_of_zeros(loud):
    sound = loud * np.sin(np.arange(1600) * 0.3)
    both = log_mel(np.concatenate([sound, np.zeros(4000)]))
    frames, there = transcribe.window(both[:15], 10, C)
    assert there.tolist() == [1] * 5 + [0] * 5 and np.array_equal(frames[:5], both[10:15])
    assert np.all(frames[5:] == both[-1]) and both[-1, 0] == both.min() >= SILENCE
    padded = silent_after(jnp.asarray(both[None]), jnp.arange(len(both))[None] < 15)
    assert np.allclose(padded[0, 15:], both[-1])


def test_times_may_be_chosen_where_the_tokenizer_does_not_list_them():
    first = transcribe._times(WORDS, C)
    assert first == FIRST and transcribe.known_tokens(WORDS, C, first) == FIRST + 6  # of 0 to 0.1 seconds
    assert transcribe.known_tokens(WORDS, C, 0) == 20


def test_a_workdir_of_speech_is_opened_and_one_of_pictures_is_not(tmp_path):
    for name in ("whisper", "picture_flow"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model": {"name": name}}))
    assert trained_model.sections_of(tmp_path / "whisper") == {"model": {"name": "whisper"}}
    with pytest.raises(jt.UserError, match=r"^WORKDIR: it trained picture_flow, which is not a decoder of text"):
        trained_model.sections_of(tmp_path / "picture_flow")


def test_the_tokens_before_a_transcript_name_a_language():
    assert transcribe.prompt_of(WORDS, C, "", "", False) == [1]
    assert transcribe.prompt_of(WORDS, C, "en", "", False) == [1, 4, 5, 19]
    assert transcribe.prompt_of(WORDS, SimpleNamespace(prefix=[1, 4]), "", "", True) == [1, 4, 5]
    with pytest.raises(jt.UserError, match=r"^--language: the model knows several, and model\.prefix names none"):
        transcribe.prompt_of(WORDS, C, "", "", True)
