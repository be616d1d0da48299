"""The rules by which a folder's model writes transcripts, and the tokens that it may choose."""

import json
from types import SimpleNamespace

import pytest

import jaxtrain as jt
from jaxtrain.config.modality_families import WhisperConfig
from jaxtrain.config.speech.transcript_rules import DETECTED
from jaxtrain.hub.speech import speech_model
from jaxtrain.hub.speech.speech_model import SpeechModel
from tests.hub.speech import tiny_whisper as tiny

FIRST = 20  # the token of 0 seconds
C = SimpleNamespace(audio_positions=5, end=3, prefix=[1])
WORDS = SimpleNamespace(vocab_size=20, specials={
    "<|startoftranscript|>": 1, "<|en|>": 4, "<|transcribe|>": 5, "<|notimestamps|>": 19})
SPEAKER = WhisperConfig(vocab_size=53, num_layers=1, embed_dim=16, num_heads=4, max_seq_len=30, audio_positions=10,
                        mels=6, prefix=[tiny.START], end=tiny.END)


def folder_of(path, config=None, said=tiny.SEVERAL):
    """Make a folder of a published model, or with `config` of a run."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or tiny.SPEAKER | {"model_type": "whisper"}))
    if said is not None:
        (path / "generation_config.json").write_text(json.dumps(said))
    return path


def test_times_may_be_chosen_where_the_tokenizer_does_not_list_them():
    first = speech_model.time_token(WORDS)
    assert first == FIRST and speech_model.known_tokens(WORDS, C, first) == FIRST + 6  # of 0 to 0.1 seconds
    assert speech_model.known_tokens(WORDS, C, 0) == 20


@pytest.mark.parametrize(("prefix", "given", "prompt"), [
    ([1], (), [1]), ([1], ("en",), [1, 4, 5, 19]), ([1, 4], ("", "", True), [1, 4, 5]),
    ([1, 4, 5, 19], ("", "", True), [1, 4, 5]), ([1, 19], ("", "", True), [1]), ([1, 4, 5, 19], (), [1, 4, 5, 19])])
def test_the_tokens_before_a_transcript_of_an_own_model_are_those_of_its_prefix(prefix, given, prompt):
    assert speech_model.own_rules(SimpleNamespace(end=3, prefix=prefix), WORDS).prompt(prefix, *given) == prompt


@pytest.mark.parametrize(("given", "message"), [
    (("", "", True), "--language: the model knows several, and model.prefix names none of them; give one, such as"),
    (("", "transcribe"), "--language: the model knows several, and model.prefix names none of them"),
    (("de",), "--language: 'de' is not a language that the model knows; known: en"),
    (("en", "translate"), "--task: 'translate' is not a task that the model knows; known: transcribe")])
def test_what_an_own_model_does_not_know_is_refused(given, message):
    with pytest.raises(jt.UserError) as refusal:
        speech_model.own_rules(C, WORDS).prompt([1], *given)
    assert f"{refusal.value}".startswith(message)


def test_an_own_model_may_say_that_there_are_no_times():
    """Its transcripts may begin with that token, rather than follow it."""
    def silent(prompt, first=0):
        made = SpeechModel(SPEAKER, None, WORDS, speech_model.own_rules(SPEAKER, WORDS), prompt, first)
        return made.silent

    assert silent([1]) == [1] and silent([1, 19]) == [1, 19] and silent([1], FIRST) == [1, 19]


def test_a_run_has_the_rules_of_the_model_that_it_began_with(tmp_path):
    """It takes what it kept, or the folder, as long as its transcripts begin and end with the same tokens."""
    published = folder_of(tmp_path / "published model")
    run = folder_of(tmp_path / "run", {"model": {"name": "whisper"}, "train": {"init_from": f"{published}"}}, None)
    again = folder_of(tmp_path / "again", {"model": {"name": "whisper"}, "train": {"init_from": f"{run}"}}, None)
    folder_of(again / "published")
    for folder in (published, run, again):
        found = speech_model.rules_for(folder, SPEAKER, WORDS)
        assert found.published and found.prompt(SPEAKER.prefix) == [31, DETECTED, 37, 41]
    folder_of(run / "published", said=tiny.GENERATIONS["one"])
    assert speech_model.rules_for(run, SPEAKER, WORDS).prompt(SPEAKER.prefix) == [31, 41]
    other = SimpleNamespace(prefix=[1], end=3, vocab_size=53)
    assert not speech_model.rules_for(run, other, WORDS).published
    few = SimpleNamespace(prefix=[31], end=30, vocab_size=40)
    with pytest.raises(jt.UserError, match=r"41 is not a token below vocab_size=40"):
        speech_model.rules_for(published, few, WORDS)


def test_languages_are_the_tokenizers_where_the_published_files_name_none(tmp_path):
    """As in folders that export wrote of a run's own model."""
    folder = folder_of(tmp_path, None, {"decoder_start_token_id": 31, "eos_token_id": 30})
    found = speech_model.rules_for(folder, SPEAKER, WORDS)
    assert found.prompt([31], "en") == [31, 4, 5, 19] and found.prompt([31]) == [31]


def test_a_recording_of_several_windows_is_read_with_times(tmp_path):
    """A published model knows them; without times, transformers does not read such a recording either."""
    rules = speech_model.rules_for(folder_of(tmp_path), SPEAKER, WORDS)
    model = SpeechModel(SPEAKER, None, WORDS, rules, [31, 33, 37, 41])
    assert (model.timed.prompt, model.timed.first) == ([31, 33, 37], 42) and model.timed.timed is model.timed
    assert model.said(tiny.np.array([5, 47, 30, 30])) == [5] and model.timed.said(tiny.np.array([5, 47, 30])) == [5, 47]
    own = SpeechModel(SPEAKER, None, WORDS, speech_model.own_rules(SPEAKER, WORDS), [1, 19])
    assert own.timed is own
