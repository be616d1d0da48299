"""Documents are found by number, content, text and origin, in prepared corpora, plain text and mixtures."""

import json

import pytest

from jaxtrain.config.schema import DataConfig
from jaxtrain.data.corpus.text_cache import load_corpus
from jaxtrain.data.formats.inputs import content_hash
from jaxtrain.data.prepare.prepare import Options, prepare
from jaxtrain.data.tracing.found_documents import find, numbered
from jaxtrain.errors import UserError

TEXTS = [f"number {i} " + "ab " * (i % 9) for i in range(120)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("found")
    (folder / "in").mkdir()
    (folder / "in/a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (folder / "in/b.txt").write_text("a file of its own")
    prepare([str(folder / "in")], folder / "corpus", Options(eval_fraction=0.2, task_bytes=1500))
    (folder / "text").mkdir()
    for i in range(9):
        (folder / f"text/{i}.txt").write_text(f"text {i} ")
    return folder


@pytest.fixture
def opened(folder, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(folder / "cache"))
    return lambda **keys: load_corpus(DataConfig(**keys))


def text_of(corpus, found):
    tokens = getattr(corpus.part(found.source), found.split)
    return corpus.tokenizer.decode(tokens.read(found.start, found.stop))


def test_by_number(opened, folder):
    corpus = opened(source=str(folder / "corpus"))
    assert len(corpus.train.shards) > 2
    texts = [text_of(corpus, one) for number in range(corpus.train.num_documents) for one in find(corpus, f"{number}")]
    assert texts == [corpus.tokenizer.decode(one["tokens"]) for one in corpus.train]
    with pytest.raises(UserError, match="there is no document 5000"):
        find(corpus, "5000")


def test_by_content_text_and_place(opened, folder, tmp_path):
    corpus = opened(source=str(folder / "corpus"))
    splits = set()
    for text in [*TEXTS[:20], "a file of its own"]:
        (tmp_path / "text").write_text(text)
        by_key, = find(corpus, content_hash(text.encode()).hex())
        by_text, = find(corpus, f"@{tmp_path / 'text'}")
        by_place, = find(corpus, by_key.origin(corpus))  # as `inspect` prints it
        assert by_key == by_text == by_place and text_of(corpus, by_key) == text
        assert numbered(corpus, "", by_key.split, by_key.number) == by_key
        splits.add(by_key.split)
    assert splits == {"train", "eval"}
    assert len(find(corpus, "a.jsonl")) == len(TEXTS) and find(corpus, "b.txt")[0].origin(corpus) == "b.txt"
    for wanted, words in (("c.txt", "did you mean 'b.txt'"), ("0" * 32, "no document is"),
                          ("@/nope", "/nope cannot be read"), ("a.jsonl byte 1", "no document is")):
        with pytest.raises(UserError, match=words):
            find(corpus, wanted)


def test_plain_text(opened, folder):
    corpus = opened(source=str(folder / "text"))
    for i in range(9):
        found, = find(corpus, f"{i}.txt")
        assert text_of(corpus, found) == f"text {i} "
        assert find(corpus, f"@{folder}/text/{i}.txt") == [found]
    with pytest.raises(UserError, match=r"no document is '9\.txt'"):
        find(corpus, "9.txt")


def test_mixtures(opened, folder):
    corpus = opened(mixture={"made": {"source": str(folder / "corpus")}, "plain": {"source": str(folder / "text")}})
    assert find(corpus, "made:3")[0].name == "made:3"
    assert text_of(corpus, find(corpus, "made:3")[0]) != text_of(corpus, find(corpus, "plain:3")[0])
    assert find(corpus, "plain:7.txt") and find(corpus, find(corpus, "made:3")[0].origin(corpus)) == find(
        corpus, "made:3")
    with pytest.raises(UserError, match="3 may be of any source; write SOURCE:3, with one of made, plain"):
        find(corpus, "3")
