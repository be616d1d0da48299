"""SentencePiece's models give the ids that the library gives, with no token of their own at either end."""

import io
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from jaxtrain.commands.prepare import main
from jaxtrain.data import open_corpus
from jaxtrain.data.prepare.prepare import Options, prepare
from jaxtrain.data.tokenizers.tokenizer import load_tokenizer
from jaxtrain.errors import UserError

TEXTS = ["The theme of the thesis.\n\n\n  It's HERE'S, don't\t 1234 tokens\r\n", "naïve größe 日本語 🙂", " ", "  two",
         "</s> and <s> that somebody wrote, <unk> <0x41>", "x = [1, 2];  // end\n    return/\n", "\n", "the thesis the"]
LLAMA = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
         "remove_extra_whitespaces": False, "split_digits": True}
KINDS = {"llama": LLAMA, "gemma": {**LLAMA, "add_dummy_prefix": False, "user_defined_symbols": ["<turn>", "▁▁"]},
         "t5": {"model_type": "unigram", "user_defined_symbols": ["<turn>"], "bos_id": -1}}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Small ones, by the kind of model that they are made like."""
    folder, made = tmp_path_factory.mktemp("models"), {}
    for kind, options in KINDS.items():
        content = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter("".join(TEXTS).split("\n") * 5), model_writer=content, minloglevel=2,
            vocab_size=60 if kind == "t5" else 330, hard_vocab_limit=False, **options)
        made[kind] = folder / f"{kind}.model"
        made[kind].write_bytes(content.getvalue())
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_librarys(models, kind):
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(models[kind]))
    ours = load_tokenizer(str(models[kind]))
    for text, ids in zip(TEXTS, ours.encode_many([text.encode() for text in TEXTS]), strict=True):
        assert ids.tolist() == theirs.encode(text) == ours.encode(text.encode()).tolist()
        assert ours.eod not in ids and ours.decode([*ids, ours.eod]) == theirs.decode(ids.tolist())
        assert ours.count_bytes(ids) == len(ours.decode(ids).encode())
        assert kind == "t5" or ours.decode(ids) == text
    assert ours.eod == theirs.eos_id() and ours.vocab_size == theirs.vocab_size()
    assert ours.decode([-1, 10**6]) == "" == ours.decode([])


def test_a_corpus_brings_its_tokenizer_along(tmp_path, models):
    (tmp_path / "in").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / f"in/{i}.txt").write_text(text, newline="")
    options = Options(tokenizer=str(models["llama"]), bos="<s>", eval_fraction=0, task_bytes=50)
    prepare([str(tmp_path / "in")], tmp_path / "out", options)
    corpus = open_corpus(tmp_path / "out")
    assert (corpus.path / "tokenizer.model").read_bytes() == models["llama"].read_bytes()
    ids = corpus.train.read(0, corpus.train.num_tokens)
    documents = np.split(ids, np.flatnonzero(ids == 2) + 1)[:-1]
    assert [np.flatnonzero(document == 1).tolist() for document in documents] == [[0]] * len(TEXTS)
    assert [corpus.tokenizer.decode(document) for document in documents] == TEXTS
    assert corpus.train.num_bytes == sum(len(text.encode()) for text in TEXTS)


def test_what_text_can_forge_neither_ends_nor_begins_a_document(models):
    for flag, ends in ("--eod", ("<turn>", "")), ("--bos", ("", "<turn>")):
        with pytest.raises(UserError, match=f"gemma.model has no token '<turn>'; .*{flag}"):
            load_tokenizer(str(models["gemma"]), *ends)
    assert load_tokenizer(str(models["llama"]), "<s>", "</s>").eod == 1
    with pytest.raises(UserError, match="has no token '<s>'"):
        load_tokenizer(str(models["t5"]), bos="<s>")


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x0a\x05"])
def test_a_file_that_is_no_model_is_refused_in_a_line(tmp_path, capsys, content):
    (tmp_path / "a.model").write_bytes(content)
    (tmp_path / "a.txt").write_text("x")
    flags = [f"--{flag}={tmp_path / name}" for flag, name in
             {"input": "a.txt", "output": "out", "tokenizer": "a.model"}.items()]
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert "a.model is not a SentencePiece model; name another file" in error and error.count("\n") == 1
