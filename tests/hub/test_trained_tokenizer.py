"""The tokens that begin and end a text, as declared in a published folder."""

import json

import numpy as np
import pytest

from jaxtrain.data.tokenizers import published_tokens
from jaxtrain.errors import UserError
from jaxtrain.hub.batching import continuations
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


def test_a_token_that_begins_texts_survives_an_export(folder):
    """Transformers reads it from the tokenizer's own template."""
    import tokenizers

    plain = folder(None, eos_token="</s>")
    content = published_tokens.beginning_with(plain.content, "<s>", 0)
    assert tokenizers.Tokenizer.from_str(content.decode()).encode("ab").ids == [0, 2, 3]
    assert folder(json.loads(content)["post_processor"], eos_token="</s>").bos == 0
    trimmed = json.loads(plain.content) | {"post_processor": {"type": "ByteLevel", "add_prefix_space": True,
                                                              "trim_offsets": True, "use_regex": True}}
    both = published_tokens.beginning_with(json.dumps(trimmed).encode(), "<s>", 0)
    assert tokenizers.Tokenizer.from_str(both.decode()).encode("ab").ids == [0, 2, 3]


def test_a_text_keeps_the_space_with_which_it_begins():
    """SentencePiece drops it where a text stands alone; and parts of a character look like several."""
    class Words:
        pieces = ("▁the", "▁m", "es", "s", "\\xf0", "\\x9f")

        def decode(self, ids):
            text = "".join(self.pieces[id] for id in ids).replace("▁", " ").replace("\\xf0\\x9f", "😀")
            return text.replace("\\xf0", "��").replace("\\x9f", "�").removeprefix(" ")

    words = Words()
    assert continuations.text_of(words, [0], np.array([1, 2])) == " mes"
    assert continuations.before([" m"], words, [0], [1, 2], False) == ("", 1)
    assert continuations.before(["s"], words, [0], [1, 4, 5, 3], False) == (" m😀", 4)
