"""Which tokens begin and end a text, as a published folder tells it."""

import json

import pytest

from jaxtrain.errors import UserError
from jaxtrain.hub.trained_tokenizer import tokenizer_of

BEGINS = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                                   {"Sequence": {"id": "A", "type_id": 0}}],
          "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
          "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}}


@pytest.fixture
def folder(tmp_path):
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, []))
    made.add_special_tokens(["<s>", "</s>"])

    def write(processor, **config):
        content = json.loads(made.to_str()) | {"post_processor": processor}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tokenizer_of(tmp_path)

    return write


@pytest.mark.parametrize(("processor", "config", "bos"), [
    (None, {}, None), (BEGINS, {}, 0), ({"type": "Sequence", "processors": [BEGINS]}, {}, 0),
    (BEGINS, {"add_bos_token": False}, None), (None, {"add_bos_token": True, "bos_token": {"content": "<s>"}}, 0),
    (None, {"add_bos_token": True, "bos_token": "<unknown>"}, None)])
def test_a_text_begins_as_the_folder_says(folder, processor, config, bos):
    found = folder(processor, eos_token="</s>", **config)
    assert (found.bos, found.eod) == (bos, 1)


def test_a_folder_without_one_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"WORKDIR: .*tokenizer is not there; copy it from where the run was trained"):
        tokenizer_of(tmp_path)
