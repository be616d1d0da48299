"""Files of ranks give the ids that tiktoken gives, whatever the text; the corpus can be opened without them."""

import base64
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
import tiktoken_ext.openai_public as public

from jaxtrain.data import open_corpus
from jaxtrain.data.prepare.prepare import Options, prepare
from jaxtrain.data.tokenizers.tiktoken_ranks import SCHEMES
from jaxtrain.data.tokenizers.tokenizer import load_tokenizer
from jaxtrain.errors import UserError

TEXTS = ["The theme of the thesis.\n\n\n  It's HERE'S, don't\t 12345678 tokens\r\n", "", " ", "a\0b",
         "naïve größe 日本語 ١٢٣ 🙂🙂",
         "<|endoftext|> that somebody wrote, <|begin_of_text|>", "x = [1, 2];  // end\n    return/\r\n", "ǅaĿb İXx",
         "   \n \n\t\n  end  ", "'sThe 'LL ' s", "thththth" * 50]


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """All bytes, out of order, and what the merges of frequent pairs in the texts make of them."""
    found = {bytes([(i * 7) % 256]): i for i in range(256)}
    parts = [[bytes([b]) for b in text.encode()] for text in TEXTS]  # whole: a merge may go where text is split
    for rank in range(256, 330):
        pairs = [pair for part in parts for pair in pairwise(part)]
        best = max(sorted(set(pairs)), key=pairs.count)
        found[b"".join(best)] = rank
        for part in parts:
            i = 0
            while i < len(part) - 1:
                if (part[i], part[i + 1]) == best:
                    part[i: i + 2] = [b"".join(best)]
                i += 1
    return found


def write(path: Path, ranks: dict[bytes, int]) -> Path:
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    return path


@pytest.mark.parametrize("scheme", ["gpt2", "r50k_base", "cl100k_base", "o200k_base"])
def test_ids_are_those_of_tiktokens_own_scheme(tmp_path, monkeypatch, ranks, scheme):
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: ranks)
    monkeypatch.setattr(public, "data_gym_to_mergeable_bpe_ranks", lambda *_, **__: ranks)
    real = getattr(public, scheme)()
    theirs = tiktoken.Encoding(scheme, pat_str=real["pat_str"], mergeable_ranks=ranks, special_tokens={})
    ours = load_tokenizer(str(write(tmp_path / f"{scheme}.tiktoken", ranks)))
    for text, ids in zip(TEXTS, ours.encode_many([text.encode() for text in TEXTS]), strict=True):
        assert ids.tolist() == theirs.encode_ordinary(text) == ours.encode(text.encode()).tolist()
        assert ours.decode(ids) == text and ours.count_bytes(ids) == len(text.encode())
    dice = random.Random(0)
    for _ in range(3000):
        text = "".join(dice.choices("aZlLsSé'' 12\n\r\t/.,漢ʰ\u0301ǅ\u3000", k=12))
        split, wanted = (regex.findall(pattern.replace("$", r"\Z"), text)  # as Rust understands it
                         for pattern in (SCHEMES[scheme].pattern, real["pat_str"]))
        assert split == wanted
    merged = sum(len(ours.encode(text.encode())) for text in TEXTS) < sum(len(text.encode()) for text in TEXTS)
    assert merged and ours.decode([ours.eod, *ours.encode(b"x").tolist(), -1, 10**6]) == "x"
    # The real files have so many ranks, and tiktoken says which ids follow them.
    behind = {"gpt2": 50256, "r50k_base": 50256, "cl100k_base": 100256, "o200k_base": 199998}[scheme]
    assert {token: behind + place for token, place in SCHEMES[scheme].special.items()} == real["special_tokens"]
    assert (ours.eod, ours.vocab_size) == (330 + SCHEMES[scheme].special["<|endoftext|>"],
                                           331 + max(SCHEMES[scheme].special.values()))


def test_llama_3s_model_is_ranks_too(tmp_path, ranks):
    path = write(tmp_path / "tokenizer.model", ranks)
    tokenizer = load_tokenizer(f"{path}:llama3", bos="<|begin_of_text|>")
    assert (tokenizer.bos, tokenizer.eod, tokenizer.vocab_size) == (330, 331, 586)
    assert load_tokenizer(f"{path}:llama3", "<|eot_id|>").eod == 339
    assert SCHEMES["llama3"].pattern == (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+")
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text.encode())) == text


def test_the_fingerprint_is_that_of_the_content(tmp_path, ranks):
    prints = {name: load_tokenizer(f"{write(tmp_path / f'{name}.tiktoken', some)}:{scheme}").fingerprint
              for name, some, scheme in [("a", ranks, "gpt2"), ("b", dict(sorted(ranks.items())), "gpt2"),
                                         ("c", ranks, "cl100k_base"), ("d", dict(list(ranks.items())[:-1]), "gpt2")]}
    assert prints["a"] == prints["b"] and len(set(prints.values())) == 3


def test_a_corpus_brings_its_tokenizer_along(tmp_path, ranks):
    path = write(tmp_path / "own.tiktoken", ranks)
    (tmp_path / "in").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / f"in/{i:02}.txt").write_text(text, newline="")
    options = Options(tokenizer=f"{path}:llama3", bos="<|begin_of_text|>", eval_fraction=0, task_bytes=100)
    made = prepare([str(tmp_path / "in")], tmp_path / "out", options)
    path.unlink()
    corpus = open_corpus(tmp_path / "out")
    assert corpus.manifest_hash == made.manifest_hash and corpus.tokenizer.bos == 330
    ids = corpus.train.read(0, corpus.train.num_tokens)
    documents = np.split(ids, np.flatnonzero(ids == 331) + 1)[:-1]
    kept = [text for text in TEXTS if text and "\0" not in text]
    assert [document[0] for document in documents] == [330] * len(kept)
    assert [corpus.tokenizer.decode(document) for document in documents] == kept
    assert corpus.train.num_bytes == sum(len(text.encode()) for text in kept)


def test_what_tiktoken_has_by_name(tmp_path, monkeypatch, ranks):
    encoding = tiktoken.Encoding("cl100k_base", pat_str=".", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: {"cl100k_base": encoding}[name])
    by_name, by_file = (load_tokenizer(name) for name in (
        "tiktoken:cl100k_base", str(write(tmp_path / "cl100k_base.tiktoken", ranks))))
    assert by_name.fingerprint == by_file.fingerprint
    (tmp_path / "again.tiktoken").write_bytes(by_name.content)
    assert load_tokenizer(f"{tmp_path / 'again.tiktoken'}:cl100k_base").fingerprint == by_name.fingerprint


def test_without_a_network_a_name_is_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # where nobody answers
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(UserError, match=r"tiktoken cannot fetch o200k_base \(ProxyError\); name a file of ranks"):
        load_tokenizer("tiktoken:o200k_base")
    with pytest.raises(UserError, match=r"there is no tiktoken:o200k; did you mean 'o200k_base'"):
        load_tokenizer("tiktoken:o200k")


BYTES = b"".join(b"%s %d\n" % (base64.b64encode(bytes([i])), i) for i in range(256))


@pytest.mark.parametrize(("content", "scheme", "words"), [
    (b"YQ== 0\n", "", "has no known scheme: 'some'; write .*some.tiktoken:SCHEME, known: "),
    (b"YQ== 0\n", ":cl100k", "no known scheme: 'cl100k'; .*did you mean 'cl100k_base'"),
    (b"YQ== 0\n", ":gpt2", "has 1 of 256 bytes"),
    (b"YQ== 0\nnot a line\n", ":gpt2", "some.tiktoken, line 2 is not a base64 token with its rank"),
    (b"YQ== 0\nYQ= 1\n", ":gpt2", "some.tiktoken, line 2 is not a base64 token with its rank"),
    (b"YQ== 0\nYg== 0\n", ":gpt2", "1 ranks for 2 tokens"),
    *((b"YQ== 0\nYg== " + rank + b"\n", ":gpt2", "some.tiktoken, line 2 is not a base64 token with its rank")
      for rank in (b"-1", b"+1", b"1.5", b"1e3", b"1_0", b"nan", b"9" * 5000, b"\xb2")),
    *((BYTES + b"aGk= " + rank + b"\n", ":gpt2", f"has ranks up to {rank.decode()}; name a file")
      for rank in (b"4000000000", b"18446744073709551617")),
])
def test_a_bad_file_is_refused(tmp_path, content, scheme, words):
    (tmp_path / "some.tiktoken").write_bytes(content)
    with pytest.raises(UserError, match=words):
        load_tokenizer(f"{tmp_path / 'some.tiktoken'}{scheme}")
