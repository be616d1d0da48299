"""The inverse finds documents, and stretches of them, where a look at every batch finds them."""

import random
from collections import defaultdict

import numpy as np
import pytest

from jaxtrain.config.schema import DataConfig
from jaxtrain.data.corpus.corpus import Corpus, Shard, Tokens
from jaxtrain.data.corpus.corruption import Lost
from jaxtrain.data.loading.batches import train_batches
from jaxtrain.data.loading.island_part import island_batches
from jaxtrain.data.tokenizers.tokenizer import ByteTokenizer
from jaxtrain.data.tracing.inverse_batches import held, sightings
from jaxtrain.data.tracing.stretches import Stretch
from tests.tiers import slow_if

STEPS = 30


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path))


def split(rng: random.Random, first: int, longest: int, masked: bool = False, pairs: bool = False) -> Tokens:
    """Documents in some shards, one of them empty, in which every token is the only one of its kind."""
    shards = [Shard(np.zeros(0, np.int64), np.zeros(1, np.int64))]
    for _ in range(rng.randint(1, 3)):
        lengths = [rng.randint(2 if pairs or masked else 1, longest) for _ in range(2 * rng.randint(30, 60))]
        ids = np.arange(first, first := first + sum(lengths))
        trained = np.array([rng.random() < 0.6 for _ in ids]) if masked else None
        if masked:
            trained[np.cumsum(lengths) - 1] = True  # an answer has something to learn
            trained = trained.astype(np.uint8)
        shards.insert(rng.randint(0, len(shards)), Shard(ids, np.cumsum([0, *lengths]), trained))
    return Tokens(tuple(shards), 1)


def corpus_of(tokens: Tokens, name: str, **keys) -> Corpus:
    return Corpus(tokens, tokens, ByteTokenizer(), name * 8, None, **keys)


def mixed(rng: random.Random, names, longest: int) -> Corpus:
    parts = {name: corpus_of(split(rng, 100_000 * i, longest), name) for i, name in enumerate(names)}
    return Corpus(next(iter(parts.values())).train, None, ByteTokenizer(), "all", None, parts=parts)


def stretches_of(rng: random.Random, corpus: Corpus) -> list[Stretch]:
    """All documents, and a random stretch within each."""
    found = []
    for name, part in corpus.parts.items() or [("", corpus)]:
        before = 0
        for shard in part.train.shards:
            for a, b in zip(shard.offsets[:-1].tolist(), shard.offsets[1:].tolist(), strict=True):
                x = rng.randrange(a, b)
                found += [Stretch(name, before + a, before + b), Stretch(name, before + x,
                                                                         before + rng.randint(x + 1, b))]
            before += len(shard.tokens)
    return found


def looked_up(batches, corpus: Corpus, stretches: list[Stretch], steps: int) -> dict:
    """Return the positions of each stretch by batch and row, from all batches."""
    of_token = defaultdict(list)
    for number, stretch in enumerate(stretches):
        for id in corpus.part(stretch.source).train.read(stretch.start, stretch.stop).tolist():
            of_token[id].append(number)
    found = defaultdict(set)
    for step in range(steps if batches.num_batches is None else min(steps, batches.num_batches)):
        batch = batches[step]
        for name, there in (("tokens", batch["segments"] > 0), ("targets", batch["weights"] > 0)):
            for row, place in zip(*np.nonzero(there), strict=True):
                for number in of_token[int(batch[name][row, place])]:
                    found[number, step, int(row)].add(int(place))
    return found


def agrees(config: DataConfig, corpus: Corpus, rng: random.Random, steps: int = STEPS) -> None:
    batches = train_batches(config, corpus)
    stretches = stretches_of(rng, corpus)
    found = defaultdict(set)
    for one in sightings(batches, stretches, steps):
        span = one.span
        if rng.random() < 0.01:
            assert batches.origin(one.batch, one.row)[2] == span.row
            assert np.array_equal(batches.rows(one.batch, [one.row])["tokens"][0, span.begin:span.end],
                                  corpus.part(stretches[one.stretch].source).train.read(
                                      span.token, span.token + span.end - span.begin))
        assert found[one.stretch, one.batch, one.row].isdisjoint(range(span.begin, span.end))
        found[one.stretch, one.batch, one.row].update(range(span.begin, span.end))
    expected = looked_up(batches, corpus, stretches, steps)
    assert found == expected
    assert len(found) > 50


def few_of(cases: int):
    return [case if case < 1 else pytest.param(case, marks=slow_if(case < 8)) for case in range(cases)]


@pytest.mark.parametrize("packing", ["concat", "best_fit", "bucket"])
@pytest.mark.parametrize("case", few_of(20))
def test_one_source_in_every_packing(packing, case):
    rng = random.Random(case)
    corpus = corpus_of(split(rng, 0, rng.choice([6, 40, 90]), masked=case % 3 == 2), "a")
    agrees(DataConfig(packing=packing, seq_len=rng.choice([5, 8, 13]), global_batch_size=rng.choice([3, 9, 20]),
                      seed=rng.randint(0, 99)), corpus, rng)


@pytest.mark.parametrize("packing", ["pairs", "answers"])
@pytest.mark.parametrize("case", few_of(6))
def test_whole_pairs_and_answers(packing, case):
    rng = random.Random(case)
    corpus = corpus_of(split(rng, 0, 24, masked=True, pairs=True), "a", pairs=True)
    config = DataConfig(packing=packing, seq_len=24, global_batch_size=12, seed=case)
    agrees(config, corpus, rng)


@pytest.mark.parametrize("case", few_of(30))
def test_mixtures_and_stages(case):
    """Weights, lengths and batches that change, sources that end, and new epochs with other lengths."""
    rng = random.Random(case)
    names = ["web", "code", "books"][: rng.randint(1, 3)]
    packing = rng.choice(["concat", "concat", "best_fit"])
    mixture = {name: {"source": name, "weight": rng.uniform(0.1, 1), "epochs": rng.choice([0, 1, 2.5])}
               for name in names}
    stages, start = [], 0
    for _ in range(rng.randint(0, 3)):
        start += rng.randint(1, 25)
        stage = {"from_step": start, "weights": {name: rng.choice([0.0, rng.uniform(0.1, 1)]) for name in names},
                 "new_epoch": rng.random() < 0.3}
        stage["weights"][names[0]] = 1.0
        if packing == "concat" and rng.random() < 0.6:
            stage["seq_len"] = rng.choice([4, 8, 16, 32])
        if rng.random() < 0.5:
            stage["global_batch_size"] = rng.choice([8, 16, 24])
        stages.append(stage)
    config = DataConfig(mixture=mixture, stages=stages, packing=packing, seq_len=16, global_batch_size=8, seed=case)
    agrees(config, mixed(rng, names, 40), rng)


def test_a_mixture_that_ends():
    rng = random.Random(2)
    mixture = {"web": {"source": "web", "epochs": 1}, "code": {"source": "code", "weight": 0.3, "epochs": 0.5}}
    config, corpus = DataConfig(mixture=mixture, seq_len=8, global_batch_size=24), mixed(rng, ["web", "code"], 12)
    agrees(config, corpus, rng, steps := train_batches(config, corpus).num_batches + 9)
    assert steps < 99 and all(one.batch < steps - 9 for one in sightings(
        train_batches(config, corpus), stretches_of(rng, corpus), 10**9))


@pytest.mark.parametrize("index", [0, 2])
def test_islands_have_the_rows_of_all(index):
    rng = random.Random(index)
    corpus = corpus_of(split(rng, 0, 40), "a")
    config = DataConfig(seq_len=16, global_batch_size=3, seed=1)
    parts = [island_batches(config, corpus, island, 3) for island in range(3)]
    stretches = stretches_of(rng, corpus)
    found = defaultdict(set)
    for one in sightings(parts[index], stretches, 20):
        found[one.island, one.stretch, one.batch, one.row].update(range(one.span.begin, one.span.end))
    assert found == {(island, *key): places for island, part in enumerate(parts)
                     for key, places in looked_up(part, corpus, stretches, 20).items()}


def test_a_rest_that_fills_no_unit_is_never_drawn():
    """Rows of 4 tokens are parts of rows of 32, and what is left behind the last of these has rows of 4 as well."""
    rng = random.Random(3)
    ids, lengths = np.arange(32 * 200 + 30), [10] * 643
    corpus = corpus_of(Tokens((Shard(ids, np.cumsum([0, *lengths])),), 1), "a")
    config = DataConfig(seq_len=4, global_batch_size=16, stages=[{"from_step": 20, "seq_len": 32}])
    agrees(config, corpus, rng)
    batches = train_batches(config, corpus)
    assert not held(batches, Stretch("", 6410, 6420)) and held(batches, Stretch("", 6390, 6400))
    assert not list(sightings(batches, [Stretch("", 6410, 6420)], 1000))


@pytest.mark.parametrize("packing", ["concat", "best_fit", "bucket"])
def test_corrupt_rows_are_lost(packing):
    """The rows with documents beside a corrupt place are lost, too."""
    class Corrupt:
        def __len__(self):
            return len(ids)

        def __getitem__(self, where):
            if where.start <= 500 < where.stop:
                raise Lost
            return ids[where]

    ids, lengths = np.arange(1000), [20] * 50
    corpus = corpus_of(Tokens((Shard(Corrupt(), np.cumsum([0, *lengths])),), 1), "a")
    config = DataConfig(packing=packing, seq_len=48, global_batch_size=2, corrupt="skip_and_count")
    batches = train_batches(config, corpus)
    found = list(sightings(batches, [Stretch("", start, start + 20) for start in range(0, 1000, 20)], 50))
    for one in found:
        assert one.lost == (not batches.rows(one.batch, [one.row])["segments"].any())
    lost = {one.stretch for one in found if one.lost}
    assert lost == {25} if packing == "bucket" else 25 in lost and 1 < len(lost) < 5
    assert {one.stretch for one in found if not one.lost} == (
        {*range(48)} - {24, 25} if packing == "concat" else {*range(50)} - lost)
