"""The fewest edits between words, and the normalisation of transcripts as transformers computes it."""

import json
from pathlib import Path

import pytest

from jaxtrain.hub.speech import transcript_normalizer, word_errors
from jaxtrain.hub.speech.word_errors import WordErrors

TRUTH = json.loads(Path(__file__).with_name("whisper_truth.json").read_text())


@pytest.mark.parametrize(("reference", "found", "errors"), [
    ("a b c", "a b c", WordErrors(0, 0, 0, 3)), ("a b c", "a c", WordErrors(0, 1, 0, 3)),
    ("a b c", "a x c d", WordErrors(1, 0, 1, 3)), ("", "a", WordErrors(0, 0, 1, 0)),
    ("a b", "", WordErrors(0, 2, 0, 2)),
    ("a b c d", "b c d a", WordErrors(0, 1, 1, 4)),
])
def test_errors_are_the_fewest_edits(reference, found, errors):
    assert word_errors.count([reference], [found]) == errors


def test_errors_of_many_are_added():
    errors = word_errors.count(["Two cats!", "dogs"], ["2 cats", "dogs, dogs"], transcript_normalizer.english())
    assert errors == WordErrors(0, 0, 1, 3) and errors.rate == pytest.approx(1 / 3)


def test_sentences_are_normalized_as_published():
    english = transcript_normalizer.english(TRUTH["spellings"])
    for text, theirs, basic in TRUTH["sentences"]:
        assert english(text) == theirs
        assert transcript_normalizer.basic(text) == basic


def test_letters_are_split_for_languages_without_spaces():
    assert transcript_normalizer.basic("日本 (x)語。", split_letters=True) == "日 本 語"


def test_spellings_are_those_of_the_folder(tmp_path):
    assert transcript_normalizer.published_spellings(tmp_path) == {}
    (tmp_path / "normalizer.json").write_text('{"colour": "color"}')
    assert transcript_normalizer.published_spellings(tmp_path) == {"colour": "color"}
