"""The tokens before transcripts of published models, as transformers puts them there, and files that are wrong."""

import json
from pathlib import Path

import pytest

import jaxtrain as jt
from jaxtrain.config.speech import language_names, published_speech
from jaxtrain.config.speech.transcript_rules import DETECTED
from jaxtrain.hf.hf_config import model_section
from tests.hub.speech import tiny_whisper as tiny

TRUTH = json.loads((Path(tiny.__file__).with_name("whisper_truth.json")).read_text())


@pytest.fixture
def folder(tmp_path):
    """Return what makes the folder of a model from what its files say."""
    def make(said=tiny.SEVERAL, frames=None, **config):
        (tmp_path / "config.json").write_text(json.dumps(tiny.SPEAKER | {"model_type": "whisper"} | config))
        for name, content in (("generation", said), ("preprocessor", frames)):
            if content is not None:
                (tmp_path / f"{name}_config.json").write_text(json.dumps(content))
        return tmp_path

    return make


@pytest.mark.parametrize(("case", "truth"), [*zip(tiny.CASES, TRUTH["transcripts"], strict=True)])
def test_prompts_are_those_of_transformers(folder, case, truth):
    name, language, task, timestamps = case
    found = folder(tiny.GENERATIONS[name])
    rules, prefix = published_speech.rules_of(found), model_section(found)["prefix"]
    prompt = rules.prompt(prefix, language, task, timestamps)
    for row in truth["prompts"]:
        heard = row[1] if prompt[1:2] == [DETECTED] else None
        if case[:3] == ("german", "", "translate"):  # transformers forgets the language that the model is set to
            row[1], heard = 33, None
        assert [heard if id == DETECTED else id for id in prompt] == row
        assert heard is None or (heard in tiny.LANGUAGES.values() and not language)


@pytest.mark.parametrize(("name", "prefix"), [
    ("several", [31]), ("german", [31, 33, 37, 41]), ("named", [31, 33, 36, 41]), ("one", [31, 41]), ("none", [31]),
    ("one_unforced", [31, 41])])
def test_training_has_the_tokens_that_are_the_same_for_all_transcripts(folder, name, prefix):
    section = model_section(folder(tiny.GENERATIONS[name]))
    assert (section["prefix"], section["end"]) == (prefix, 30)


def test_config_json_says_what_no_other_file_does(folder):
    found = folder(None, forced_decoder_ids=[[1, 41]], suppress_tokens=[5, -1], eos_token_id=[29])
    rules = published_speech.rules_of(found)
    assert rules.prefix == [31, 41] and rules.suppressed == (5,) and rules.end == 29
    (found / "config.json").write_text(json.dumps({"model_type": "whisper"}))
    rules = published_speech.rules_of(found)  # as transformers' class has it
    assert (rules.start, rules.end, rules.suppressed_first) == (50257, 50256, (220, 50256))
    assert published_speech.rules_of(folder(tiny.GENERATIONS["one"], forced_decoder_ids=[[1, 5]])).forced == (41,)


def test_a_run_that_was_trained_with_a_language_keeps_it(folder):
    rules = published_speech.rules_of(folder())
    trained = [31, 34, 37, 41]
    assert rules.prompt(trained) == trained and rules.prompt(trained, timestamps=True) == [31, 34, 37]
    assert rules.prompt(trained, task="translate") == [31, 34, 36, 41]
    assert rules.prompt(trained, "de") == [31, 33, 37, 41]


@pytest.mark.parametrize(("name", "given", "message"), [
    ("several", ("klingon",), "--language: 'klingon' is not a language that the model knows; known: de, en, es, fr"),
    ("several", ("it",), "--language: 'it' is not a language that the model knows; known: de, en, es, fr"),
    ("several", ("de", "sing"), "--task: 'sing' is not a task that the model knows; known: transcribe, translate"),
    ("one", ("de",), "--language: the model knows one language only; leave it out"),
    ("one", ("", "translate"), "--task: the model transcribes one language only; leave it out"),
    ("none", ("de",), "--language: the model's tokenizer has no tokens of languages; leave it out")])
def test_what_the_model_does_not_know_is_refused(folder, name, given, message):
    with pytest.raises(jt.UserError) as refusal:
        published_speech.rules_of(folder(tiny.GENERATIONS[name])).prompt([31], *given)
    assert f"{refusal.value}" == message


def test_languages_are_called_as_in_transformers():
    assert TRUTH["languages"] == language_names.CODES
    assert {language_names.code_of(name) for name in ("de", "German", "<|de|>", " GERMAN ")} == {"de"}


@pytest.mark.parametrize(("key", "value", "message"), [
    ("suppress_tokens", 5, ""), ("suppress_tokens", ["a"], "suppress_tokens=['a'] is not a list of numbers; download"),
    ("eos_token_id", [30, 29], "eos_token_id=[30, 29] is not"), ("decoder_start_token_id", "x", "decoder_start_token"),
    ("begin_suppress_tokens", {"a": 1}, "begin_suppress_tokens={'a': 1} is not"),
    ("no_timestamps_token_id", 1.5, "no_timestamps_token_id=1.5 is not"), ("max_length", True, "max_length=True is"),
    ("lang_to_id", [1], "lang_to_id does not give tokens"), ("task_to_id", {"a": "b"}, "task_to_id does not give"),
    ("forced_decoder_ids", 7, "forced_decoder_ids=7 are not the tokens"), ("language", "xx", "json: language: 'xx'"),
    ("forced_decoder_ids", [[2, 5]], "forced_decoder_ids=[[2, 5]] are not"), ("forced_decoder_ids", [[1, "a"]], "for"),
    ("forced_decoder_ids", [[1, -5]], "forced_decoder_ids=[[1, -5]] are not"), ("task", "sing", "task: 'sing' is")])
def test_a_file_that_is_wrong_is_told_in_one_sentence(folder, key, value, message):
    found = folder(tiny.SEVERAL | {key: value})
    if not message:
        assert published_speech.rules_of(found).suppressed == (5,)
        return
    with pytest.raises(jt.UserError) as refusal:
        model_section(found)
    assert message in f"{refusal.value}"


def test_settings_that_are_not_applied_are_named(folder):
    found = folder(tiny.SEVERAL | {"num_beams": 5, "do_sample": False, "no_speech_threshold": 0.6, "bad_words_ids": []})
    assert published_speech.rules_of(found).not_applied == ("num_beams=5", "no_speech_threshold=0.6")


@pytest.mark.parametrize(("frames", "message"), [
    ({"feature_size": 6, "chunk_length": 0.2, "sampling_rate": 16_000, "hop_length": 160, "n_fft": 400}, ""),
    ({"feature_size": 80, "chunk_length": 0.2}, "feature_size=80 cannot be expressed: num_mel_bins of config.json"),
    ({"chunk_length": 0.2}, "feature_size=80 cannot be expressed"),  # which is what transformers takes
    ({"feature_size": 6}, "chunk_length=30 cannot be expressed: max_source_positions of config.json asks for 0.2"),
    ({"feature_size": 6, "chunk_length": 0.2, "hop_length": 80}, "hop_length=80 cannot be expressed: only 160 can"),
    ({"feature_size": 6, "chunk_length": 0.2, "sampling_rate": 8000}, "sampling_rate=8000 cannot be expressed"),
    ({"feature_size": 6, "chunk_length": 0.2, "dither": 0.1}, "dither=0.1 cannot be expressed: only 0 can"),
    ({"feature_size": 6, "chunk_length": 0.2, "feature_extractor_type": "Other"}, "feature_extractor_type='Other' can"),
])
def test_audio_that_is_preprocessed_otherwise_is_refused(folder, frames, message):
    found = folder(frames=frames)
    for _ in range(2):
        if not message:
            assert model_section(found)["mels"] == 6
        else:
            with pytest.raises(jt.UserError) as refusal:
                model_section(found)
            assert message in f"{refusal.value}"
        # As transformers 5 writes it.
        (found / "preprocessor_config.json").unlink(missing_ok=True)
        (found / "processor_config.json").write_text(json.dumps({"feature_extractor": frames}))


@pytest.mark.parametrize("key", ["max_target_positions", "max_source_positions", "num_mel_bins"])
@pytest.mark.parametrize("value", ["x", -1, 1.5, [3], True])
def test_sizes_that_are_none_are_refused(folder, key, value):
    with pytest.raises(jt.UserError, match=key):
        model_section(folder(**{key: value}))
