"""A BPE trained here: the same each time, whole text back, single digits, and usable by prepare."""

import gzip

import pytest

from jaxtrain.commands.train_tokenizer import main
from jaxtrain.data.prepare.prepare import Options, prepare
from jaxtrain.data.tokenizers.tokenizer import load_tokenizer

TEXT = "The year 2024 was, as years go, not long: 366 days. Größe, 日本語, tabs\tand  spaces.\n" * 20


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_a_tokenizer_of_ones_own(tmp_path, text, capsys):
    path, again = tmp_path / "a/tokenizer.json", tmp_path / "b.json"
    for output in (path, again):
        assert main([f"--input={text}", "--vocab_size=300", f"--output={output}"]) == 0
    assert path.read_bytes() == again.read_bytes()
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.vocab_size == 300 and tokenizer.eod == 0
    ids = tokenizer.encode(TEXT.encode())
    assert len(ids) < 0.8 * len(TEXT.encode()) and tokenizer.decode(ids) == TEXT
    unseen = "other words 1234567 🙂 <|endoftext|>"
    assert tokenizer.decode(tokenizer.encode(unseen.encode())) == unseen and 0 not in tokenizer.encode(unseen.encode())
    digits = tokenizer.encode(b"2024")
    assert len(digits) == 4 and len(tokenizer.encode(b"year 366")) < len(b"year 366")
    corpus = prepare([str(text)], tmp_path / "corpus", Options(tokenizer=str(path), eval_fraction=0))
    assert corpus.train.read(0, corpus.train.num_tokens).tolist() == [*ids.tolist(), 0]
    assert main([f"--input={text}", "--vocab_size=300", f"--output={path}"]) == 2
    assert "exists; name another file, or give --overwrite" in capsys.readouterr().err
    assert main([f"--input={text}", "--vocab_size=290", f"--output={path}", "--overwrite"]) == 0
    assert load_tokenizer(str(path)).vocab_size == 290


@pytest.mark.parametrize(("flag", "words"), [
    ("--vocab_size=100", "--vocab_size: 100 leaves no room"), ("--input=nowhere", "nowhere does not exist"),
    ("--vocab=9", "--vocab=9: there is no such flag; did you mean '--vocab_size'?")])
def test_a_mistake_is_one_line(tmp_path, text, capsys, flag, words):
    assert main([f"--input={text}", f"--output={tmp_path / 'x.json'}", flag]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_file_that_is_cut_short_is_named(tmp_path, capsys):
    content = gzip.compress(b"".join(b'{"text": "line %d"}\n' % i for i in range(20_000)))
    (tmp_path / "a.jsonl.gz").write_bytes(content[: len(content) // 2])
    assert main([f"--input={tmp_path}", "--vocab_size=300", f"--output={tmp_path / 'x.json'}"]) == 2
    error = capsys.readouterr().err
    assert "a.jsonl.gz cannot be read (" in error and error.count("\n") == 1
