"""A text is found in all documents that have it, with the tokens that hold it."""

import json

import pytest

from jaxtrain.config.schema import DataConfig
from jaxtrain.data.corpus.text_cache import load_corpus
from jaxtrain.data.prepare.prepare import Options, prepare
from jaxtrain.data.tracing import document_texts
from jaxtrain.data.tracing.document_texts import chunks, searched
from jaxtrain.data.tracing.text_matches import TextSearch
from jaxtrain.data.train_tokenizer import train

WORDS = ["straße", "naïve", "привет", "世界", "the", "of", "and", "🙂", "tokens"]


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def corpus(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    texts = [" ".join(WORDS[(i * j) % len(WORDS)] + "s" * (i % 2) for j in range(1, 20)) for i in range(80)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    keys = {}
    if request.param == "bpe":
        pytest.importorskip("tokenizers")
        (folder / "tokenizer.json").write_text(train(iter(texts), 320))
        keys = {"tokenizer": str(folder / "tokenizer.json"), "bos": "<|endoftext|>"}
    prepare([str(folder / "a.jsonl")], folder / "corpus", Options(eval_fraction=0.2, **keys))
    data = DataConfig(source=str(folder / "corpus"), cache_dir=str(folder / "cache"))
    return data, load_corpus(data), texts


@pytest.mark.parametrize("text", ["the", " of", "ß", "世界s ", "🙂", "naïve привет", "absent"])
def test_all_places_and_their_tokens(corpus, text, monkeypatch):
    data, opened, texts = corpus
    monkeypatch.setattr(document_texts, "CHUNK", 300)
    assert len(list(chunks(opened, ["train", "eval"]))) > 5
    found = [one for some in searched(data, opened, TextSearch(text.encode()), ["train", "eval"], 1) for one in some]
    expected = sum(one.count(text) for one in texts)
    assert len(found) == expected and (expected == 0) == (text == "absent")
    for one in found:
        tokens = getattr(opened, one.document.split)
        start, (a, b) = one.document.start, one.tokens
        whole = opened.tokenizer.decode(tokens.read(one.document.start, one.document.stop)).encode()
        assert whole[slice(*one.bytes)].decode() == text

        def held(first, stop, tokens=tokens, start=start):
            return opened.tokenizer.decode(tokens.read(start + first, start + stop))

        assert text in held(a, b)
        assert text not in held(a + 1, b) and text not in held(a, b - 1), "no token less would do"
        assert one.same_tokens == (tokens.read(start + a, start + b).tolist()
                                   == opened.tokenizer.encode(text.encode()).tolist())


@pytest.mark.slow
def test_workers_find_the_same(corpus, monkeypatch):
    data, opened, _ = corpus
    search = TextSearch(b"the")
    alone = [one for some in searched(data, opened, search, ["train", "eval"], 1) for one in some]
    together = [one for some in searched(data, opened, search, ["train", "eval"], 2) for one in some]
    assert sorted(map(repr, alone)) == sorted(map(repr, together)) and alone
