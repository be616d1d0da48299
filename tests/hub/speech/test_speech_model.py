"""The tokens before a transcript, and those that it may have."""

from types import SimpleNamespace

import pytest

import jaxtrain as jt
from jaxtrain.hub.speech import speech_model

FIRST = 20  # the token of 0 seconds
C = SimpleNamespace(audio_positions=5, end=3, prefix=[1])
WORDS = SimpleNamespace(vocab_size=20, specials={
    "<|startoftranscript|>": 1, "<|en|>": 4, "<|transcribe|>": 5, "<|notimestamps|>": 19})


def test_times_may_be_chosen_where_the_tokenizer_does_not_list_them():
    first = speech_model.time_token(WORDS)
    assert first == FIRST and speech_model.known_tokens(WORDS, C, first) == FIRST + 6  # of 0 to 0.1 seconds
    assert speech_model.known_tokens(WORDS, C, 0) == 20


def test_the_tokens_before_a_transcript_name_a_language():
    assert speech_model.prompt_of(WORDS, C, "", "", False) == [1]
    assert speech_model.prompt_of(WORDS, C, "en", "", False) == [1, 4, 5, 19]
    assert speech_model.prompt_of(WORDS, SimpleNamespace(prefix=[1, 4]), "", "", True) == [1, 4, 5]
    with pytest.raises(jt.UserError, match=r"^--language: the model knows several, and model\.prefix names none"):
        speech_model.prompt_of(WORDS, C, "", "", True)
