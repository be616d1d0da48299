"""Tokenizers that make texts much longer, or leave them out, are refused before they see one."""

import base64
import json
import warnings

import pytest

from jaxtrain.data.tokenizers import text_growth
from jaxtrain.data.tokenizers.tokenizer import load_tokenizer
from jaxtrain.errors import UserError

END = {"id": 2, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False,
       "normalized": False, "special": True}


def described(vocab=None, model=(), **changes) -> dict:
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [END], "normalizer": None,
            "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                "vocab": {"a": 0, "b": 1} if vocab is None else vocab, "merges": []} | dict(model)} | changes


def loaded(folder, content):
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return load_tokenizer(str(folder / "tokenizer.json"))


def replaced(content: str, **pattern: str) -> dict:
    return {"type": "Replace", "pattern": pattern or {"String": "a"}, "content": content}


def in_order(*steps, name="normalizers") -> dict:
    return {"type": "Sequence", name: [*steps]}


def charsmap(longest: int) -> dict:
    content = (4).to_bytes(4, "little") + b"\0" * 4 + b"x" * longest + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


@pytest.mark.parametrize("changes", [
    {"normalizer": replaced("b" * 1000)}, {"normalizer": in_order(*[replaced("aa")] * 9)},
    {"normalizer": in_order(in_order(replaced("a" * 16)), replaced("a" * 17))},
    {"normalizer": replaced("b" * 256, Regex="x*")}, {"normalizer": replaced("b" * 256, String="")},
    {"normalizer": {"type": "Prepend", "prepend": "x" * 100_000}}, {"normalizer": charsmap(300)},
    {"normalizer": in_order({"type": "Prepend", "prepend": "a" * 300}, replaced("b" * 250))},
    {"decoder": replaced("b" * 1000)}, {"decoder": in_order(*[replaced("aa")] * 9, name="decoders")},
    {"model": {"continuing_subword_prefix": "x" * 100_000}}, {"vocab": {"a": 0, "b" * 100_000: 1}},
    {"added_tokens": [END | {"content": "x" * 100_000}]}], ids=range(13))
def test_texts_that_would_become_much_longer_are_refused(changes, tmp_path):
    with pytest.raises(UserError, match=r"times as long, or 65,536 characters longer|65,536 are the most") as refusal:
        loaded(tmp_path, described(**changes))
    assert len(f"{refusal.value}") < 400


@pytest.mark.parametrize("normalizer", [
    in_order({"type": "Prepend", "prepend": "▁"}, replaced("▁", String=" ")),
    in_order({"type": "NFC"}, replaced(" ", Regex=r"\s+"), {"type": "Lowercase"}),
    in_order(charsmap(33), replaced("▁", Regex=" {2,}")), in_order(*[replaced("b", String="a")] * 50)], ids=range(4))
def test_what_published_tokenizers_do_is_not(normalizer):
    text_growth.check(described(normalizer=normalizer))


@pytest.mark.parametrize("changes", [
    {"vocab": {}}, {"vocab": {"<unk>": 0}, "model": {"unk_token": "<unk>", "fuse_unk": True}},
    {"vocab": {"<|endoftext|>": 2}}], ids=["empty", "unknown", "special"])
def test_a_vocabulary_without_a_token_for_text_is_refused(changes, tmp_path):
    with pytest.raises(UserError, match="it has no token for any text"):
        loaded(tmp_path, described(**changes))


def test_letters_that_a_tokenizer_leaves_out_are_told(tmp_path):
    with pytest.warns(UserWarning, match="no tokens for 60 of 62 letters and digits, such as 'c', and leaves"):
        loaded(tmp_path, described())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded(tmp_path, described({"a": 0, "<unk>": 1}, {"unk_token": "<unk>"}))
