"""A tokenizer that a run keeps is opened again from its folder alone."""

import json

import pytest

import jaxtrain as jt
from jaxtrain.data.tokenizers import tokenizer_folder
from jaxtrain.data.tokenizers.tokenizer import load_tokenizer
from tests.odd_files import ODD, in_time
from tests.tiny import tiny_flags

pytest.importorskip("tokenizers")


def byte_level(folder):
    """A tokenizer.json that knows bytes, and two special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_tokens(pre_tokenizers.ByteLevel.alphabet())
    made.add_special_tokens(["<end>", "<begin>"])
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("kind", ["bytes", "json"])
def test_it_gives_the_same_ids(tmp_path, kind):
    tokenizer = load_tokenizer("bytes") if kind == "bytes" else load_tokenizer(
        str(byte_level(tmp_path)), "<end>", "<begin>")
    for _ in range(2):  # a second time changes nothing
        tokenizer_folder.save(tokenizer, tmp_path / "run/tokenizer")
    again = load_tokenizer(str(tmp_path / "run/tokenizer"))
    assert again.fingerprint == tokenizer.fingerprint and (again.eod, again.bos) == (tokenizer.eod, tokenizer.bos)
    assert again.encode(b"the same text").tolist() == tokenizer.encode(b"the same text").tolist()


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", "[" * 99_999, '{"file": "../x", "eod": "", "bos": ""}',
                                     '{"file": 3, "eod": "", "bos": ""}'])
def test_a_damaged_record_is_told(tmp_path, content):
    (tmp_path / tokenizer_folder.RECORD).write_text(content)
    with pytest.raises(jt.UserError, match=r"^data.tokenizer: .*tokenizer_record.json is damaged"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
def test_whatever_lies_in_place_of_the_record_is_replaced_or_told(tmp_path, make):
    make(tmp_path / tokenizer_folder.RECORD)
    if (tmp_path / tokenizer_folder.RECORD).is_dir():
        with pytest.raises(jt.UserError, match=r"^--workdir: .* cannot be written"):
            tokenizer_folder.save(load_tokenizer("bytes"), tmp_path)
    else:
        in_time(lambda: tokenizer_folder.save(load_tokenizer("bytes"), tmp_path))
        assert load_tokenizer(str(tmp_path)).vocab_size == 257


@pytest.mark.slow
def test_a_run_keeps_its_tokenizer(tmp_path, tmp_path_factory):
    words = dict(flag.removeprefix("--config.").split("=", 1) for flag in tiny_flags(
        tmp_path_factory, ["train.steps=1", "train.sample_tokens=0"])[1:])
    jt.train(jt.load_config("configs/gpt.py:tiny", words), tmp_path)
    assert json.loads((tmp_path / "tokenizer" / tokenizer_folder.RECORD).read_text())["name"] == "bytes"
    assert load_tokenizer(str(tmp_path / "tokenizer")).vocab_size == 257
