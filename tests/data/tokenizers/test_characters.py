"""One token per character: ids are places in the sorted vocabulary, and other characters are refused."""

import json

import numpy as np
import pytest

from jaxtrain.data.tokenizers import tokenizer_folder
from jaxtrain.data.tokenizers.characters import CharacterTokenizer
from jaxtrain.data.tokenizers.tokenizer import load_tokenizer
from jaxtrain.errors import UserError

TEXT = "to be, or not\nto bé 漢 🎭"


@pytest.fixture
def tokenizer():
    return CharacterTokenizer(TEXT)


def test_ids_are_places_in_the_sorted_characters(tokenizer):
    order = sorted(set(TEXT))
    assert tokenizer.encode(TEXT.encode()).tolist() == [order.index(one) for one in TEXT]
    assert (tokenizer.vocab_size, tokenizer.eod) == (len(order) + 1, len(order))
    assert tokenizer.encode(b"").tolist() == []


def test_text_survives_and_its_bytes_are_counted(tokenizer):
    ids = tokenizer.encode(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT and tokenizer.count_bytes(ids) == len(TEXT.encode())
    ended = np.append(ids, tokenizer.eod)
    assert tokenizer.decode(ended) == TEXT and tokenizer.count_bytes(ended) == len(TEXT.encode())
    assert tokenizer.decode(ended, specials=True) == f"{TEXT}<|endoftext|>"
    assert tokenizer.decode([-1, 10_000]) == ""


@pytest.mark.parametrize("other", ["x", "to be ñ", "\U0010ffff", "A", "\0"])
def test_another_character_is_refused_by_name(tokenizer, other):
    with pytest.raises(UserError, match=r"tokenizer: the vocabulary of 12 characters has no '.*' \(U\+\w+\), as in"
                       ) as error:
        tokenizer.encode(other.encode())
    assert "\n" not in str(error.value)


def test_it_is_kept_in_a_folder_with_its_vocabulary(tokenizer, tmp_path):
    tokenizer_folder.save(tokenizer, tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert (again.fingerprint, again.vocab_size) == (tokenizer.fingerprint, tokenizer.vocab_size)
    assert json.loads((tmp_path / "tokenizer_record.json").read_text())["characters"] == "".join(sorted(set(TEXT)))
    assert load_tokenizer(str(tmp_path / "characters.json")).fingerprint == tokenizer.fingerprint
    assert CharacterTokenizer("ab").fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize("content", ["", "null", "[1]", '{"characters": 3}', '{"characters": "\\ud800"}', "{"])
def test_a_damaged_file_is_one_line(tmp_path, content):
    (tmp_path / "characters.json").write_text(content)
    with pytest.raises(UserError, match=r"data\.tokenizer: .*characters\.json does not list characters"):
        load_tokenizer(str(tmp_path / "characters.json"))


def test_names_without_a_vocabulary_are_explained():
    with pytest.raises(UserError, match="only jaxtrain prepare collects the characters"):
        load_tokenizer("characters")
    with pytest.raises(UserError, match="has no token '<s>'"):
        load_tokenizer("characters:abc", bos="<s>")
