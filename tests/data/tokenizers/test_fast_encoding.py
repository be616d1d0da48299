"""The faster engine for BPE: its ids are those of the `tokenizers` library, or it is not used."""

import json
import pickle
import random
import unicodedata

import numpy as np
import pytest

from jaxtrain.data.tokenizers import fast_encoding
from jaxtrain.data.tokenizers.tokenizer import load_tokenizer
from jaxtrain.errors import UserError

TEXT = "It's the bést of times, 1234 <|endoftext|>; \u0c5c-v \U0001f600\u0301\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer that splits as GPT-2's does, which gigatoken knows."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(fast_encoding.sample(), trainers.BpeTrainer(
        vocab_size=1000, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    made.save(path := f"{tmp_path_factory.mktemp('fast') / 'tokenizer.json'}")
    return load_tokenizer(path)


class Engine:
    """An engine with the library's own ids, but for what is wrong with it."""

    def __init__(self, tokenizer, wrong=""):
        self.tokenizer, self.wrong, self.texts, self.made = tokenizer, wrong, [], 0

    def make(self, content):
        assert not any(token["special"] for token in json.loads(content)["added_tokens"])
        self.made += 1
        return self

    def encode_batch(self, contents, parallel):
        texts = [content.decode() for content in contents]
        self.texts += texts
        return [ids[:-1] if self.wrong and self.wrong in text else ids
                for text, ids in zip(texts, self.tokenizer._ids(texts), strict=True)]


@pytest.fixture
def few(monkeypatch):
    """Try few characters, of which there are 40,000."""
    unknown, known = fast_encoding.characters()
    monkeypatch.setattr(fast_encoding, "characters", lambda: (unknown, known[:900]))


def encoder(tokenizer, engine):
    return fast_encoding.FastEncoder(tokenizer._described, engine.make, tokenizer._ids)


def test_texts_with_characters_that_are_not_surely_known_go_to_the_library(few, tokenizer):
    engine = Engine(tokenizer, "\u0250")  # one letter that it takes for another kind
    fast = encoder(tokenizer, engine)
    engine.texts.clear()
    texts = [TEXT.replace("\u0c5c", "\U000e0fff"), "plain", "\u0250", "\u0378", ""]  # U+E0FFF is far from any known
    for found, wanted in zip(fast.encode(texts), tokenizer._ids(texts), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert engine.texts == ["plain", "\u0378", ""], "U+0378 is not assigned, and was tried"


def test_every_character_is_tried_or_left_or_stands_in_a_large_block():
    """DeepSeek's split had other ids for U+2CEA9, between blocks of which only the ends are tried."""
    unknown, known = fast_encoding.characters()
    tried = np.zeros(0x110000, bool)
    tried[[ord(one) for one in known]] = True
    assigned = np.array([unicodedata.category(chr(point)) != "Cn" for point in range(0x110000)])
    assert unknown[0x2CEA9] and not tried[0x2CEA9] and tried[0x378]
    assert (tried | unknown | assigned).all() and not (unknown & (tried | assigned)).any()


def test_an_engine_with_other_ids_is_refused(few, tokenizer):
    for wrong in ("-v", "  ", "</p>"):  # after every character, after a space, and in the sample alone
        with pytest.raises(ValueError, match="other ids"):
            encoder(tokenizer, Engine(tokenizer, wrong))
    with pytest.raises(UserError, match=r"^data.tokenizer: gigatoken gives other ids than tokenizers for 'only here'"):
        encoder(tokenizer, Engine(tokenizer, "only here")).encode(["fine", "only here"])


def test_it_is_made_anew_before_it_remembers_too_much(few, tokenizer, monkeypatch):
    fast = encoder(tokenizer, engine := Engine(tokenizer))
    monkeypatch.setattr(fast_encoding, "_RENEWED", 10)
    for _ in range(3):
        fast.encode(["more than ten characters"])
    assert engine.made == 4


def test_only_byte_level_bpe_without_dropout_is_tried(tokenizer):
    described = tokenizer._described
    assert fast_encoding.is_suited(described)
    assert not fast_encoding.is_suited(described | {"model": described["model"] | {"dropout": 0.1}})
    assert not fast_encoding.is_suited(described | {"decoder": {"type": "Metaspace"}})


def test_ids_of_drawn_texts_are_the_librarys(tokenizer, monkeypatch):
    pytest.importorskip("gigatoken")
    monkeypatch.setattr(fast_encoding, "WORTHWHILE", 0)
    draw = random.Random(1)
    texts = ["".join(draw.choice((TEXT, chr(draw.choice((draw.randrange(0xD800), draw.randrange(0x10000, 0x110000)))),
                                  " ", "\n", "'s")) for _ in range(draw.randrange(40))) for _ in range(500)]
    found = tokenizer.encode_many([text.encode() for text in texts])
    assert tokenizer._fast is not None
    for ids, wanted in zip(found, tokenizer._ids(texts), strict=True):
        np.testing.assert_array_equal(ids, wanted)
    assert pickle.loads(pickle.dumps(tokenizer))._fast is None
