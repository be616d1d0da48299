import json
import re

import numpy as np
import pytest

from jaxtrain.data import load_tokenizer
from jaxtrain.data.tokenizers.special_tokens import Specials
from jaxtrain.data.tokenizers.vocabulary import told
from jaxtrain.errors import UserError
from tests.odd_files import ODD, in_time


def test_bytes_round_trip():
    tokenizer = load_tokenizer("bytes")
    text = "naïve\n\0 text ✓".encode()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16 and ids.tolist() == list(text)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod) == ("bytes", 257, 256)
    assert tokenizer.decode(ids) == text.decode()
    assert len(tokenizer.encode(b"")) == 0 and tokenizer.decode([]) == ""


def test_decode_drops_ids_without_text_and_mends_broken_characters():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode([72, 256, 105, 300, -1]) == "Hi"
    assert tokenizer.decode("é".encode()[:1]) == "�"


def test_unknown_name_is_told():
    with pytest.raises(UserError, match=r"data\.tokenizer.*did you mean 'bytes'"):
        load_tokenizer("byte")


def described(**changes):
    """A small tokenizer.json with some parts replaced."""
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             "vocab": {"a": 0, "b": 1}, "merges": []}
    end = {"id": 2, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False,
           "normalized": False, "special": True}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
            "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model, **changes}


def split_by(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def loaded(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_the_small_tokenizer_works(tmp_path):
    assert loaded(tmp_path, described()).encode(b"ab").tolist() == [0, 1]


@pytest.mark.parametrize("content", [
    "", "null", "[1]", "[" * 100_000, '{"a":' * 100_000, "\0", described(added_tokens=None),
    described(added_tokens=[], model=described()["model"] | {"vocab": {}}),
    described(model=described()["model"] | {"vocab": {"a": 4_000_000_000}}), described(model=None),
    described(added_tokens=[described()["added_tokens"][0] | {"special": "x"}]), described(decoder=[1]),
    described(pre_tokenizer=split_by("((((")),
], ids=range(13))
def test_a_file_that_is_no_tokenizer_is_one_line(tmp_path, content):
    with pytest.raises(UserError, match=r"data\.tokenizer: .*tokenizer.json (is not a tokenizer.json|has )") as error:
        loaded(tmp_path, content)
    assert len(str(error.value)) < 600


def test_a_regular_expression_that_explodes_is_one_line(tmp_path):
    """Rust code panics then, which is not an Exception in Python."""
    tokenizer = loaded(tmp_path, described(pre_tokenizer=split_by("(a+)+$")))
    with pytest.raises(UserError, match=r"data\.tokenizer: .*fails to encode text \(PanicException: "):
        tokenizer.encode(b"a" * 40 + b"b")
    with pytest.raises(UserError, match="fails to encode text"):
        Specials(tokenizer).encode(["a" * 40 + "b"])


def test_an_interrupt_is_not_an_error_of_the_tokenizer():
    with pytest.raises(KeyboardInterrupt), told("x", "fails"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["t.json", "t.tiktoken", "t.model"])
def test_what_is_no_file_is_refused_at_once(tmp_path, name, make):
    make(tmp_path / name)
    with pytest.raises(UserError, match=r"data\.tokenizer: .* (cannot be read|has neither)"):
        in_time(lambda: load_tokenizer(f"{tmp_path / name}"))


@pytest.mark.parametrize(("name", "fix"), [
    ("gpt2", "write tiktoken:gpt2, or name the path"), ("cl100k_base", "write tiktoken:cl100k_base, or name"),
    ("byte", "did you mean 'bytes'? or name the path"), ("qwen", "known: bytes, or name the path")])
def test_a_name_that_is_no_tokenizer(name, fix):
    with pytest.raises(UserError, match=re.escape(f"data.tokenizer: there is no tokenizer {name!r}; {fix}")):
        load_tokenizer(name)
