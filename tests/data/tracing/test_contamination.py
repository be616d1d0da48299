"""Overlaps with an evaluation set are those that a slow look at all n-grams finds; MinHash finds no more."""

import json
import random
import sys
import unicodedata

import numpy as np
import pytest

from jaxtrain.config.schema import DataConfig
from jaxtrain.data.cleaning.near_duplicates import Near
from jaxtrain.data.corpus.text_cache import load_corpus
from jaxtrain.data.formats.inputs import Text
from jaxtrain.data.prepare.prepare import Options, prepare
from jaxtrain.data.tracing import word_windows
from jaxtrain.data.tracing.contamination import EvalSearch
from jaxtrain.data.tracing.document_texts import searched
from jaxtrain.data.tracing.word_windows import places_of, words_of
from jaxtrain.errors import UserError
from jaxtrain.runs.contamination_report import details, gathered

WORDS = [f"word{i}" for i in range(400)]


def made(rng: random.Random, count: int, vocabulary=WORDS) -> list[str]:
    return [rng.choice(vocabulary) for _ in range(count)]


def spoilt(rng: random.Random, words: list[str]) -> str:
    """The same words with another case, punctuation and spacing."""
    return "".join(rng.choice([word, word.upper(), word.title()]) + rng.choice([" ", ", ", "\n", " -- ", ". "])
                   for word in words)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Items, and documents that have all, most, a few or none of the words of one, or few words in all."""
    rng, folder = random.Random(0), tmp_path_factory.mktemp("contamination")
    items = [made(rng, rng.choice([3, 8, 10, 13, 20, 40])) for _ in range(60)]
    documents = []
    for number, item in enumerate(items):
        at = rng.randrange(len(item))
        part = item[at: at + rng.randint(1, 30)]
        changed = [word if i % 13 < 12 else "other" for i, word in enumerate(item)]
        documents += [[made(rng, 50) + item + made(rng, 50), made(rng, 30) + part + made(rng, 30), changed,
                       made(rng, 80, WORDS[:20])][number % 4]]
    items.append(made(rng, 30, WORDS[:20]))  # of words that follow each other now and then by chance
    texts = [spoilt(rng, words) for words in documents]
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "items.jsonl").write_text("".join(
        json.dumps({"id": f"q{i}", "n": i, "question": " ".join(item[:2]), "more": [{"answer": " ".join(item[2:])}]})
        + "\n\n" for i, item in enumerate(items)))
    prepare([str(folder / "in.jsonl")], folder / "corpus", Options(eval_fraction=0))
    data = DataConfig(source=str(folder / "corpus"), cache_dir=str(folder / "cache"))
    return folder, data, load_corpus(data), items, documents


def grams(words, size):
    return [tuple(words[i:i + size]) for i in range(len(words) - size + 1)]


def longest_common(a, b):
    best = 0
    for i in range(len(a)):
        for j in range(len(b)):
            size = 0
            while i + size < len(a) and j + size < len(b) and a[i + size] == b[j + size]:
                size += 1
            best = max(best, size)
    return best


@pytest.mark.parametrize("ngram", [13, 8, 5])
def test_it_is_what_a_slow_look_finds(case, ngram):
    folder, data, corpus, items, documents = case
    search = EvalSearch(str(folder / "items.jsonl"), ngram=ngram, threshold=0.6)
    found = {(one.item, one.document.number): one for some in searched(data, corpus, search, ["train"], 1)
             for one in some}
    expected, near_only = {}, 0
    for i, item in enumerate(items):
        for d, document in enumerate(documents):
            if len(item) < min(8, ngram):
                continue
            size = min(ngram, len(item))
            there = {n for n, gram in enumerate(grams(item, size)) if gram in set(grams(document, size))}
            mine, theirs = set(grams(item, 5)), set(grams(document, 5))
            share = len(mine & theirs) / len(mine)
            if there or share >= 0.6:
                near_only += not there
                expected[i, d] = (there, longest_common(item, document) if there else 0, share,
                                  len(mine & theirs) / len(mine | theirs))
    told = details(corpus, search, found.values())
    assert {key: (set(one.ngrams), one.longest, one.containment, told[one].resemblance)
            for key, one in found.items()} == expected
    assert len(expected) > 20 and (near_only > 2 or ngram < 13)
    for one in found.values():  # the tokens hold the words that match
        start = one.document.start
        text = [words_of(corpus.tokenizer.decode(corpus.train.read(start + a, start + b))) for a, b in told[one].tokens]
        item = items[one.item]
        size = min(ngram, len(item)) if one.ngrams else 5
        held = {gram for words in text for gram in grams(words, size)}
        assert held >= {grams(item, size)[n] for n in one.ngrams} and held & set(grams(item, size))
        document, wanted = documents[one.document.number], set(grams(item, size))
        covered = {n + k for n, gram in enumerate(grams(document, size)) if gram in wanted for k in range(size)}
        assert sum(map(len, text)) == len(covered)
    by_item = gathered([list(found.values())])
    for i, all_of_it in by_item.items():
        size = min(ngram, len(items[i]))
        covered = {n + k for (item, _), one in found.items() if item == i for n in one.ngrams for k in range(size)}
        assert all_of_it.covered(size) == len(covered)
        assert all_of_it.documents == sum(item == i for item, _ in found)


def test_minhash_finds_no_more(case):
    """`prepare --deduplicate=near` looks for the same, estimated: its signatures agree with what is counted here."""
    pytest.importorskip("rensa")
    folder, data, corpus, items, documents = case
    search = EvalSearch(str(folder / "items.jsonl"), threshold=0.5)
    found = {(one.item, one.document.number): one for some in searched(data, corpus, search, ["train"], 1)
             for one in some}
    near, told = Near(0.4), details(corpus, search, found.values())
    of_items, of_documents = ([near.signature(Text("", " ".join(words).encode())) for words in texts]
                              for texts in (items, documents))
    pairs = 0
    for i, one in enumerate(of_items):
        for d, other in enumerate(of_documents):
            estimate = sum(one[k:k + 4] == other[k:k + 4] for k in range(0, len(one), 4)) / near.permutations
            if estimate >= 0.4 and len(items[i]) >= 8:
                pairs += 1
                assert abs(told[found[i, d]].resemblance - estimate) < 0.2  # a standard error of 0.035
    assert pairs > 3


def test_windows_are_compared_where_their_hashes_are_equal(monkeypatch):
    rng = np.random.default_rng(0)
    texts, numbers = [rng.integers(1, 5, 30) for _ in range(3)], rng.integers(0, 5, 200)
    expected = {(place, text, position) for text, some in enumerate(texts) for position in range(27)
                for place in range(197) if (some[position:position + 4] == numbers[place:place + 4]).all()}
    for multiplier in (word_windows._MULTIPLIER, np.uint64(0)):
        monkeypatch.setattr(word_windows, "_MULTIPLIER", multiplier)
        found = word_windows.WindowIndex(texts, [0, 1, 2], 4).find(numbers)
        assert {*zip(found.places.tolist(), found.texts.tolist(), found.positions.tolist(), strict=True)} == expected
    assert len(expected) > 20


def test_words():
    assert words_of("Don't SHOUT,\n snake_case 3.14 Straße_ 你好 world世界 かな 한국어") == [
        "don", "t", "shout", "snake", "case", "3", "14", "straße",
        "你", "好", "world", "世", "界", "か", "な", "한국어"]


def test_words_are_the_same_however_letters_are_composed():
    """Places of words hold them in any text; all characters that Unicode decomposes are among these texts."""
    rng = random.Random(0)
    letters = [chr(i) for i in range(sys.maxunicode) if unicodedata.normalize("NFD", chr(i)) != chr(i)]
    assert len(letters) > 12000
    texts = ["".join(letters[i:i + 40]) for i in range(0, len(letters), 40)] + [
        "".join(rng.choice([*letters[:900], "a", " ", "\u0301", "\u0323", "\u1161", "\u11a8"]) for _ in range(60))
        for _ in range(200)]
    for text in [*texts, "Caf\u00e9 \u304c \ud55c\uad6d\uc5b4 e\u0301\u0323 \u0301x"]:
        words = words_of(text)
        for form in ("NFC", "NFD"):
            other = unicodedata.normalize(form, text)
            assert words_of(other) == words
            found = places_of(other)
            assert len(found) == len(words)
            assert all(word in "".join(words_of(other[a:b])) for (a, b), word in zip(found, words, strict=True))
            assert all(a < b <= len(other) for a, b in found) and found == sorted(found)
    assert words_of("Cafe\u0301") == ["caf\u00e9"] and places_of("un cafe\u0301!") == [(0, 2), (3, 8)]


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_an_item_is_found_however_its_letters_are_composed(tmp_path, forms):
    sentence = "l'été dernier à Besançon, la fenêtre entrouverte, j'ai rêvé d'une forêt gelée où un chêne parlait"
    item, text = (unicodedata.normalize(form, sentence) for form in forms)
    assert item != text
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": f"Un été. {text} encore."}) + "\n")
    (tmp_path / "items.jsonl").write_text(json.dumps({"q": item}) + "\n")
    prepare([str(tmp_path / "in.jsonl")], tmp_path / "corpus", Options(eval_fraction=0))
    data = DataConfig(source=str(tmp_path / "corpus"), cache_dir=str(tmp_path / "cache"))
    corpus, search = load_corpus(data), EvalSearch(str(tmp_path / "items.jsonl"))
    overlap, = (one for some in searched(data, corpus, search, ["train"], 1) for one in some)
    (a, b), = details(corpus, search, [overlap])[overlap].tokens
    assert overlap.containment == 1 and corpus.tokenizer.decode(corpus.train.read(a, b)) == text


def test_fields_and_mistakes(case, tmp_path):
    folder, *_ = case
    items = EvalSearch(str(folder / "items.jsonl"), ("question",)).items()
    assert {len(text) for text in items.texts} == {2} and items.names[3] == "q3" and items.lines[3] == 7
    (tmp_path / "bad.jsonl").write_text('{"a": "b"}\n{"a"')
    (tmp_path / "none.jsonl").write_text("\n")
    for path, keys, words in ((folder / "items.jsonl", {"fields": ("answer",)}, "has no 'answer'; give"),
                              (tmp_path / "bad.jsonl", {}, "line 2 of .*bad.jsonl is not valid JSON"),
                              (tmp_path / "none.jsonl", {}, "has no items"), (tmp_path / "no", {}, "cannot be read"),
                              (folder / "items.jsonl", {"ngram": 2}, "nearly every text"),
                              (folder / "items.jsonl", {"threshold": 0}, "is not a share")):
        with pytest.raises(UserError, match=words):
            EvalSearch(str(path), **keys).items()
