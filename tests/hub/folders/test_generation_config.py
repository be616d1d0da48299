"""Reading generation_config.json: texts are generated as transformers generates them."""

import json

import pytest

from jaxtrain.errors import UserError
from jaxtrain.hub.folders import generation_config
from jaxtrain.hub.sampling import Sampling

GREEDY = Sampling(temperature=0.0)


@pytest.fixture
def folder(tmp_path):
    def write(config, generation=None):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return write


@pytest.mark.parametrize(("said", "given", "how"), [
    (None, {}, Sampling()), (None, {"top_p": 0.5}, Sampling(top_p=0.5)),
    ({}, {}, GREEDY), ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {}, GREEDY),
    ({"repetition_penalty": 1.1}, {}, Sampling(temperature=0.0, repetition_penalty=1.1)),
    ({"do_sample": True}, {}, Sampling(top_k=50)),  # transformers' own default
    ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}, {},
     Sampling(temperature=0.6, top_p=0.9, top_k=20)),
    ({"do_sample": True, "temperature": 0.6, "top_k": 0}, {"temperature": 0.0}, GREEDY),
    ({"temperature": 0.6}, {"top_p": 0.5}, Sampling(temperature=0.6, top_p=0.5)),
    ({}, {"temperature": 0.7}, Sampling(temperature=0.7)),
    ({}, {"repetition_penalty": 1.2}, Sampling(temperature=0.0, repetition_penalty=1.2))])
def test_a_flag_overrides_what_the_file_says(said, given, how):
    assert generation_config.sampling_of(said, given) == how


def test_tokens_that_end_texts_are_those_of_the_file_or_of_the_config(folder):
    assert generation_config.ends_of(folder({"eos_token_id": 2})) == [2]
    assert generation_config.ends_of(folder({"eos_token_id": 2}, {"eos_token_id": [7, 5]})) == [5, 7]
    with pytest.raises(UserError, match=r"eos_token_id='a' in its generation_config\.json is not a token"):
        generation_config.ends_of(folder({}, {"eos_token_id": ["a"]}))
    (folder({}) / "config.json").write_text(json.dumps({"model": {}, "train": {}}))  # of a run that began with nothing
    assert generation_config.ends_of(folder({}).parent) == [] and generation_config.said_of(folder({}).parent) is None


def test_what_is_not_applied_is_named(folder):
    said = {"num_beams": 4, "no_repeat_ngram_size": 0, "typical_p": 1.0, "suppress_tokens": [3], "top_p": 0.9}
    assert generation_config.not_applied(said) == ["num_beams=4", "suppress_tokens=[3]"]
    with pytest.raises(UserError, match="temperature='hot' is not a number; repair it, or give --temperature"):
        generation_config.sampling_of({"do_sample": True, "temperature": "hot"}, {})
