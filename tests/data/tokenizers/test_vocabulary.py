"""The tokens that begin and end a document: ours alone, the same for text and tokens, and missed when they are lost."""

import base64
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.commands.prepare import main
from jaxtrain.data import open_corpus
from jaxtrain.data.prepare.prepare import Options, prepare
from jaxtrain.data.tokenizers import tokenizer as tokenizers_of_ours
from jaxtrain.data.tokenizers.tokenizer import JsonTokenizer, load_tokenizer
from jaxtrain.errors import UserError

TEXTS = ["the first", "a <s> that <|endoftext|> somebody wrote", "größe 日本 🙂", "  two\n"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Path]:
    """One of bytes, one as is made from SentencePiece's models, and one of words."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("tokenizers")
    special, alphabet = ["<s>", "<|endoftext|>"], pre_tokenizers.ByteLevel.alphabet()
    byte = Tokenizer(models.BPE())
    byte.pre_tokenizer, byte.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    byte.train_from_iterator(TEXTS, trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    vocab = {token: id for id, token in enumerate([*special, *(f"<0x{i:02X}>" for i in range(256)), *"▁thefirs", "th"])}
    piece = Tokenizer(models.BPE(vocab, [("t", "h")], byte_fallback=True))
    piece.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    piece.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                       decoders.Strip(" ", 1, 0)])
    piece.add_special_tokens(special)
    word = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "first": 2}, unk_token="[UNK]"))
    word.pre_tokenizer, word.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    word.add_special_tokens(special)
    made = {}
    for name, one in ("byte", byte), ("piece", piece), ("word", word):
        made[name] = folder / f"{name}.json"
        one.save(str(made[name]))
    return made


@pytest.mark.parametrize("name", ["byte", "piece", "word"])
def test_bytes_are_counted_without_making_the_text(tokenizers, name):
    tokenizer = load_tokenizer(str(tokenizers[name]))
    for text in TEXTS:
        ids = tokenizer.encode(text.encode())
        assert tokenizer.count_bytes(ids) == len(tokenizer.decode(ids).encode()) > 0
        assert name == "word" or tokenizer.decode(ids) == text
    assert (tokenizer._lengths is None) == (name == "word")


def test_what_begins_a_document_stands_before_each_and_in_the_manifest(tmp_path, tokenizers):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    options = {"tokenizer": str(tokenizers["byte"]), "eval_fraction": 0}
    plain, begun = (prepare([str(tmp_path / "a.jsonl")], tmp_path / f"out{bos}", Options(**options, bos=bos))
                    for bos in ("", "<s>"))
    without, with_ = (corpus.train.read(0, corpus.train.num_tokens) for corpus in (plain, begun))
    assert (with_ == 0).sum() == len(TEXTS) and with_[0] == 0 and (with_[1:] == 0)[with_[:-1] == 1].all()
    assert with_[with_ != 0].tolist() == without.tolist() and begun.train.num_bytes == plain.train.num_bytes
    manifest = json.loads((begun.path / "manifest.json").read_text())
    assert manifest["tokenizer"]["bos"] == "<s>" and manifest["probes"][0]["ids"][0] == 0
    with pytest.raises(UserError, match="holds another corpus"):
        prepare([str(tmp_path / "a.jsonl")], plain.path, Options(**options, bos="<s>"))


def test_tokens_of_others_get_the_begin_that_they_lack_and_no_second_one(tmp_path, tokenizers):
    documents = [[0, 70, 71], [72], [0, 73], [0]]
    np.array([id for ids in documents for id in [*ids, 1]], "<u2").tofile(tmp_path / "a.bin")
    options = Options(str(tokenizers["byte"]), eval_fraction=0, token_dtype="uint16", bos="<s>")
    corpus = prepare([str(tmp_path / "a.bin")], tmp_path / "out", options)
    assert corpus.train.read(0, corpus.train.num_tokens).tolist() == [0, 70, 71, 1, 0, 72, 1, 0, 73, 1]
    assert corpus.train.num_bytes == 4


def test_a_tokenizer_that_changed_between_two_corpora_is_read_again(tmp_path, tokenizers):
    (tmp_path / "a.txt").write_text("the first")
    for name in ("byte", "piece"):
        (tmp_path / "tokenizer.json").write_bytes(tokenizers[name].read_bytes())
        corpus = prepare([str(tmp_path / "a.txt")], tmp_path / name, Options(str(tmp_path / "tokenizer.json")))
        assert corpus.train.read(0, 99).tolist() == [*load_tokenizer(str(tokenizers[name])).encode(b"the first"), 1]


def test_a_begin_that_is_lost_is_noticed(tmp_path, tokenizers, monkeypatch):
    (tmp_path / "a.txt").write_text("the first")
    options = Options(str(tokenizers["byte"]), bos="<s>", eval_fraction=0)
    with monkeypatch.context() as lost:
        lost.setattr(tokenizers_of_ours, "begun", lambda ids, tokenizer: ids)
        with pytest.raises(UserError, match="has documents without <s> in front"):
            prepare([str(tmp_path / "a.txt")], tmp_path / "lost", options)
    with pytest.raises(UserError, match="gives other ids than when it was prepared"):
        open_corpus(tmp_path / "lost")
    np.array([70, 71, 1], "<u2").tofile(tmp_path / "a.bin")  # nor where tokens are copied
    with monkeypatch.context() as lost:
        lost.setattr("jaxtrain.data.prepare.tasks.begun", lambda ids, tokenizer: ids)
        with pytest.raises(UserError, match="has documents without <s> in front"):
            prepare([str(tmp_path / "a.bin")], tmp_path / "copied", replace(options, token_dtype="uint16"))
    made = prepare([str(tmp_path / "a.txt")], tmp_path / "out", options)
    encode = JsonTokenizer.encode_many
    monkeypatch.setattr(JsonTokenizer, "encode_many", lambda self, texts: [ids[1:] for ids in encode(self, texts)])
    with pytest.raises(UserError, match="gives other ids than when it was prepared"):
        open_corpus(made.path)


@pytest.mark.parametrize(("flags", "words"), [
    (["--bos=<s>"], "--bos: bytes have no named tokens"), (["--eod=</s>"], "--eod: bytes have no named tokens"),
    (["--tokenizer={byte}", "--bos=<bos>"], "byte.json has no token '<bos>'; name one of its tokens with --bos"),
    (["--tokenizer={byte}", "--eod=<eos>"], "byte.json has no token '<eos>'; name one of its tokens with --eod"),
    (["--tokenizer=nowhere.tiktoken"], "nowhere.tiktoken cannot be read (No such file"),
    (["--tokenizer=nowhere.tiktoken:gpt2"], "nowhere.tiktoken cannot be read (No such file"),
    (["--tokenizer=cl100k_base"], "there is no tokenizer 'cl100k_base'"),
])
def test_a_mistake_is_one_line(tmp_path, tokenizers, capsys, flags, words):
    (tmp_path / "a.txt").write_text("x")
    flags = [flag.format(**{name: str(path) for name, path in tokenizers.items()}) for flag in flags]
    assert main([f"--input={tmp_path / 'a.txt'}", f"--output={tmp_path / 'out'}", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.parametrize(("name", "package"), [("a.json", "tokenizers"), ("gpt2.tiktoken", "tiktoken"),
                                               ("a.model", "sentencepiece"), ("tiktoken:gpt2", "tiktoken")])
def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, name, package):
    ranks = b"".join(b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256))
    (tmp_path / name).write_bytes(ranks if package == "tiktoken" else b"x")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"needs the package {package}; run pip install -e '\.\[data\]'"):
        load_tokenizer(name if ":" in name else str(tmp_path / name))


def test_none_is_a_policy_too(tmp_path, tokenizers):
    (tmp_path / "a.txt").write_text("x")
    assert main([f"--input={tmp_path / 'a.txt'}", f"--output={tmp_path / 'out'}", "--bos=none", "--eval_fraction=0",
                 f"--tokenizer={tokenizers['byte']}"]) == 0
    assert open_corpus(tmp_path / "out").tokenizer.bos is None
