"""Near duplicates: against all pairs by brute force, in order, whole clusters; and what a second start does again."""

import json
import random

import numpy as np
import pytest

from jaxtrain.data.cleaning.near_duplicates import Near
from jaxtrain.data.formats.inputs import Ids, Text
from jaxtrain.data.prepare.prepare import Options, prepare, prepare_part

RNG = random.Random(0)
WORDS = [f"word{i}" for i in range(5000)]


def jsonl(path, texts) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def fresh(length=200) -> list[str]:
    return RNG.choices(WORDS, k=length)


def edited(words: list[str], edits: int) -> list[str]:
    words = list(words)
    for place in RNG.sample(range(len(words)), edits):
        words[place] = RNG.choice(WORDS)
    return words


def jaccard(left: list[str], right: list[str], shingle=5) -> float:
    a, b = ({tuple(words[i: i + shingle]) for i in range(len(words) - shingle + 1)} for words in (left, right))
    return len(a & b) / len(a | b)


def kept(corpus) -> list[str]:
    ids = corpus.train.read(0, corpus.train.num_tokens)
    return bytes(int(i) if i < 256 else 0 for i in ids).decode().split("\0")[:-1]


def firsts(near: Near, documents: list[list[str]]) -> np.ndarray:
    signatures = b"".join(near.signature(Text("", " ".join(words).encode())) for words in documents)
    bands, marks = near.columns(signatures)
    return near.firsts(len(documents), lambda band: bands[band], lambda some: marks[some])


@pytest.mark.parametrize("threshold", [0.6, 0.8])
def test_pairs_are_found_as_by_brute_force(threshold):
    """Documents have few edits and many, so that pairs lie on both sides of the threshold."""
    near = Near(threshold)
    pairs = [(base, edited(base, edits)) for edits in range(0, 24) for base in [fresh() for _ in range(20)]]
    similarity = np.array([jaccard(*pair) for pair in pairs])
    found = firsts(near, [words for pair in pairs for words in pair])
    assert (found[::2] == np.arange(0, len(found), 2)).all()  # no base is like another
    found = found[1::2] == np.arange(0, len(found), 2)
    surely, hardly = similarity > threshold + 0.08, similarity < threshold - 0.12
    assert surely.sum() > 60 and hardly.sum() > 100
    assert found[surely].mean() > 0.98 and found[hardly].sum() == 0
    around = abs(similarity - threshold) < 0.05
    assert around.sum() > 20 and 0.2 < found[around].mean() < 0.8  # an estimate


def test_a_cluster_leaves_its_first_wherever_the_others_are(tmp_path):
    one, two = fresh(), fresh()
    chain = [one, edited(one, 2)]
    chain.append(edited(chain[-1], 2))
    documents = [two, fresh(), chain[1], fresh(), chain[0], chain[2], edited(two, 1), two]
    documents += [["a", "few"], ["A", "few"], ["a"]]
    texts = [" ".join(words) for words in documents]
    source = jsonl(tmp_path / "a.jsonl", texts)
    corpora = [prepare([source], tmp_path / f"{size}", Options(eval_fraction=0, deduplicate="near", task_bytes=size))
               for size in (1000, 2**26)]
    for corpus in corpora:
        assert kept(corpus) == [texts[i] for i in (0, 1, 2, 3, 8, 10)]
        made = json.loads((corpus.path / "manifest.json").read_text())
        assert made["left_out"] == {"nearly equal to another": 4, "equal to another": 1}
        assert made["steps"] == [{"step": "deduplicate=near", "seen": 11, "changed": 0,
                                  "removed": {"equal to another": 1, "nearly equal to another": 4}}]
    assert [len(corpus.train.shards) > 4 for corpus in corpora] == [True, False]


def test_tasks_and_workers_find_what_one_table_finds(tmp_path):
    documents = [words for base in [fresh(60) for _ in range(80)] for words in (base, edited(base, 1))]
    RNG.shuffle(documents)
    texts = [" ".join(words) for words in documents]
    first = firsts(Near(), documents)
    wanted = [text for i, text in enumerate(texts) if first[i] == i]
    assert 80 <= len(wanted) < 120
    for workers in (1, 2):
        options = Options(eval_fraction=0, deduplicate="near", task_bytes=20_000)
        corpus = prepare([jsonl(tmp_path / "a.jsonl", texts)], tmp_path / str(workers), options, workers)
        assert kept(corpus) == wanted and len(corpus.train.shards) > 3


def test_short_and_empty_documents_and_tokens_have_signatures():
    near = Near(permutations=64)
    texts = [b"", b" \n", b"one", b"ONE ", b"one two three four five six"]
    signatures = [near.signature(Text("", text)) for text in texts]
    assert {len(signature) for signature in signatures} == {256}
    assert signatures[0] == signatures[1] and signatures[2] == signatures[3] and len(set(signatures)) == 3
    ids = [Ids("", np.array(ids)) for ids in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [11, 2, 3, 4, 5, 6])]
    assert near.signature(ids[0]) == near.signature(ids[1]) != near.signature(ids[2])


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9])
def test_bands_find_nine_pairs_in_ten_at_the_threshold(threshold):
    near = Near(threshold)
    assert near.bands * near.rows <= near.permutations
    assert 1 - (1 - threshold**near.rows) ** near.bands >= 0.9
    longer = near.rows + 1
    assert 1 - (1 - threshold**longer) ** (near.permutations // longer) < 0.9


def test_signatures_are_made_once_and_again_when_the_input_changed(tmp_path, monkeypatch):
    from jaxtrain.data.prepare import duplicates

    one, two = fresh(), fresh()
    (tmp_path / "in").mkdir()
    for name, words in (("a", one), ("b", two), ("c", edited(one, 1))):
        (tmp_path / "in" / name).write_text(" ".join(words))
    options, signed = Options(eval_fraction=0, deduplicate="near", task_bytes=1), []
    sign = duplicates.sign_task
    monkeypatch.setattr(duplicates, "sign_task", lambda number, *rest: signed.append(number) or sign(number, *rest))
    for stage in ("duplicates", "tokens", "duplicates", "tokens"):  # all but the manifest
        prepare_part([str(tmp_path / "in")], tmp_path / "out", options, stage=stage)
    assert signed == [0, 1, 2]
    turned = " ".join(reversed(one))
    (tmp_path / "in/a").write_text(turned)
    corpus = prepare([str(tmp_path / "in")], tmp_path / "out", options)
    assert signed == [0, 1, 2, 0]
    assert kept(corpus)[:2] == [turned, " ".join(two)] and len(kept(corpus)) == 3
