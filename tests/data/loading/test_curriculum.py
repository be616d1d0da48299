"""The batch at step n follows from data, config and n: not from processes, restarts or what is planned for later."""

import dataclasses
import random
import time
from collections import Counter

import numpy as np
import pytest

from jaxtrain.config import data_stages
from jaxtrain.config.schema import DataConfig
from jaxtrain.data.corpus.corpus import Corpus, Shard, Tokens
from jaxtrain.data.loading.batches import train_batches
from jaxtrain.data.loading.loader import Batches
from jaxtrain.data.packing.packed_rows import PackedRows
from jaxtrain.data.tokenizers.tokenizer import ByteTokenizer
from jaxtrain.errors import UserError
from tests.tiers import slow_if

END = 256


def tokens(rng: random.Random, documents: int, longest: int, first: int) -> Tokens:
    """Documents of a source in some shards; every token but the ends is one of a kind, so that it can be counted."""
    shards, number = [], first
    for _ in range(rng.randint(1, 3)):
        lengths = [rng.randint(1, longest) for _ in range(documents)]
        ids = []
        for length in lengths:
            ids += [*range(number, number + length - 1), END]
            number += length - 1
        shards.append(Shard(np.array(ids, np.int64), np.cumsum([0, *lengths])))
    return Tokens(tuple(shards), 1)


def corpora(rng: random.Random, names, longest=40) -> Corpus:
    parts = {name: Corpus(made := tokens(rng, 60, longest, 1000 + 100_000 * i), made, ByteTokenizer(), name * 8, None)
             for i, name in enumerate(names)}
    return Corpus(next(iter(parts.values())).train, None, ByteTokenizer(), "all", None, parts=parts)


def config(**keys) -> DataConfig:
    return DataConfig(**{"seq_len": 16, "global_batch_size": 8} | keys)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path))


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


def random_config(rng: random.Random, names) -> DataConfig:
    packing = rng.choice(["concat", "concat", "best_fit"])
    mixture = {name: {"source": name, "weight": rng.uniform(0.1, 1), "epochs": rng.choice([0, 0, 0, 2.5])}
               for name in names}
    mixture[names[0]]["epochs"] = 0  # and it always has a weight: no mixture ends
    planned, start = [], 0
    for _ in range(rng.randint(0, 3)):
        start += rng.randint(1, 30)
        stage = {"from_step": start, "weights": {name: rng.choice([0.0, rng.uniform(0.1, 1)]) for name in names}}
        stage["weights"][names[0]] = 1.0
        if packing == "concat" and rng.random() < 0.5:
            stage["seq_len"] = rng.choice([4, 8, 16, 32])
        if rng.random() < 0.5:
            stage["global_batch_size"] = rng.choice([8, 16, 24])
        stage["new_epoch"] = rng.random() < 0.3
        planned.append(stage)
    return config(mixture=mixture, stages=planned, packing=packing, seed=rng.randint(0, 99))


def few_of(cases):
    """The first of them are quick, as many more slow, and the rest exhaustive."""
    return [case if case < 3 else pytest.param(case, marks=slow_if(case < 7))
            for case in range(cases)]


@pytest.mark.parametrize("case", few_of(30))
def test_processes_restarts_and_later_stages_change_nothing(case):
    rng = random.Random(case)
    names = ["web", "code", "books"][: rng.randint(1, 3)]
    data, chosen = corpora(rng, names), random_config(rng, names)
    whole = train_batches(chosen, data)
    straight = [whole[step] for step in range(100)]
    for step in range(0, 100, 7):
        batch, rows = straight[step], whole.shape(step)[0]
        assert batch["tokens"].shape == whole.shape(step)
        for processes in (1, 2, 4, 8):  # each knows the config only, and reads its own rows
            parts = [train_batches(chosen, data).rows(step, range(p * rows // processes, (p + 1) * rows // processes))
                     for p in range(processes)]
            assert same(batch, {key: np.concatenate([part[key] for part in parts]) for key in batch})
        scattered = rng.sample(range(rows), 5)
        assert same({key: column[scattered] for key, column in batch.items()}, whole.rows(step, scattered))
    restart = rng.randrange(100)
    assert all(same(train_batches(chosen, data)[step], straight[step]) for step in (restart, 99))
    later = {"from_step": 60, "weights": {names[0]: 7.0}, "global_batch_size": 8}
    if max([0, *(stage["from_step"] for stage in chosen.stages)]) < 60:
        changed = train_batches(dataclasses.replace(chosen, stages=[*chosen.stages, later]), data)
        assert all(same(changed[step], straight[step]) for step in range(60))
    assert whole.tokens(99) == sum(batch["tokens"].size for batch in straight[:99])


@pytest.mark.parametrize("case", few_of(20))
def test_each_token_is_seen_as_often_as_the_epochs_say(case):
    """Counted token by token over everything a run draws, whatever the stages do to lengths and batches."""
    rng = random.Random(1000 + case)
    names = ["web", "code"][: rng.randint(1, 2)]
    data, chosen = corpora(rng, names, longest=30), random_config(rng, names)
    chosen = dataclasses.replace(chosen, stages=[stage | {"new_epoch": False} for stage in chosen.stages])
    batches = train_batches(chosen, data)
    steps = 150
    seen: Counter = Counter()
    for step in range(steps):
        batch = batches[step]
        seen.update(batch["targets"][batch["weights"] > 0].tolist())
    unit = data_stages.stages(chosen)[0].unit
    for name, epochs in batches.epochs(steps).items():
        part = data.part(name).train
        places = np.arange(part.num_tokens)
        ids = part.read(0, part.num_tokens)
        firsts = np.concatenate([shard.offsets[:-1] + before for shard, before in
                                 zip(part.shards, np.cumsum([0, *(len(s.tokens) for s in part.shards)]), strict=False)])
        there = (ids != END) & ~np.isin(places, firsts)
        if chosen.packing == "concat":  # except for what is left behind the last whole unit
            there &= (places <= (part.num_tokens - 1) // unit * unit)
        counts = {seen[id] for id in ids[there].tolist()}
        assert counts <= {int(epochs), int(epochs) + 1}, (name, epochs, counts)
        limit = chosen.mixture[name]["epochs"]
        assert not limit or epochs <= limit


def test_one_source_without_stages_is_what_it_always_was():
    data = corpora(random.Random(5), ["web"])
    plain = Batches(PackedRows(data.part("web").train, 16), global_batch_size=8, seed=3)
    mixed = train_batches(config(stages=[{"from_step": 50, "global_batch_size": 16}], seed=3), data.part("web"))
    assert all(same(plain[step], mixed[step]) for step in range(50))
    assert same(mixed[50], {key: np.concatenate([plain[50][key], plain[51][key]]) for key in plain[0]})


def test_shorter_rows_first_lose_and_repeat_nothing():
    """Two steps of 16 short rows, then long ones: together exactly the units of the order, in order."""
    data = corpora(random.Random(6), ["web"]).part("web")
    chosen = config(seq_len=8, global_batch_size=16, stages=[{"from_tokens": 2 * 128, "seq_len": 32,
                                                              "global_batch_size": 4}])
    batches = train_batches(chosen, data)
    assert [batches.shape(step) for step in range(4)] == [(16, 8), (16, 8), (4, 32), (4, 32)]
    long = Batches(PackedRows(data.train, 32), global_batch_size=4, seed=0)
    for step in range(4):
        assert np.array_equal(batches[step]["tokens"].reshape(4, 32), long[step]["tokens"])


def test_a_new_epoch_may_change_the_unit():
    data = corpora(random.Random(7), ["web"]).part("web")
    batches = train_batches(config(stages=[{"from_step": 3, "seq_len": 48, "new_epoch": True}]), data)
    assert batches.shape(3) == (8, 48) and batches.epochs(3)[""] == pytest.approx(24 / len(PackedRows(data.train, 16)))
    assert set(batches[3]["tokens"].ravel().tolist()) <= set(data.train.read(0, data.train.num_tokens).tolist())


def test_the_end_is_known_beforehand():
    data = corpora(random.Random(8), ["web", "code"])
    mixture = {name: {"source": name, "weight": 1, "epochs": 2} for name in ("web", "code")}
    batches = train_batches(config(mixture=mixture), data)
    units = 2 * sum(len(PackedRows(data.part(name).train, 16)) for name in mixture)
    assert batches.num_batches == units // 8
    with pytest.raises(IndexError):
        batches[units // 8]
    assert all(1.9 < epochs <= 2 for epochs in batches.epochs(batches.num_batches).values())


def test_the_order_in_which_sources_are_named_changes_nothing():
    data = corpora(random.Random(11), ["books", "code", "web"])
    mixture = {"web": {"source": "web", "weight": 2}, "books": {"source": "books"}, "code": {"source": "code"}}
    one = train_batches(config(mixture=mixture), data)
    two = train_batches(config(mixture=dict(sorted(mixture.items()))), data)
    assert all(same(one[step], two[step]) for step in range(20))


@pytest.mark.parametrize("limit", [0.001, 0.01])
def test_less_than_a_batch_is_refused_in_words(limit):
    data = corpora(random.Random(12), ["web"])
    with pytest.raises(UserError, match=r"data.mixture: its sources hold less than one batch within their limits"):
        train_batches(config(mixture={"web": {"source": "web", "epochs": limit}}), data)


def test_a_source_too_short_for_a_row_is_named():
    data = corpora(random.Random(13), ["web", "code"])
    with pytest.raises(UserError, match=r"data.mixture.code: .* too short for one row"):
        train_batches(config(mixture={"web": 1, "code": 1}, seq_len=4096, global_batch_size=1),
                      dataclasses.replace(data, parts={"web": large(data.part("web")), "code": data.part("code")}))


def large(corpus: Corpus) -> Corpus:
    return dataclasses.replace(corpus, train=Tokens(corpus.train.shards * 20, 1))


def test_far_steps_cost_what_near_ones_do():
    """Counted in Python calls, which no busy machine changes."""
    import cProfile
    import pstats

    data = corpora(random.Random(9), ["web", "code"])
    mixture = {"web": {"source": "web", "weight": 2}, "code": {"source": "code"}}
    batches = train_batches(config(mixture=mixture, stages=[{"from_step": 10**6, "weights": {"code": 3}}]), data)

    def calls(step):
        with cProfile.Profile() as profile:
            batches.locate(step, range(8))
        return pstats.Stats(profile).total_calls

    calls(0)
    start = time.perf_counter()
    far = calls(10**9)
    print(f"seek to step 10^9: {1e3 * (time.perf_counter() - start):.2f} ms under the profiler")
    assert far < 2 * calls(1)


@pytest.mark.parametrize(("keys", "message"), [
    ({"mixture": {"a": {"wieght": 1}}}, r"data.mixture.a.wieght: there is no such key; did you mean 'weight'"),
    ({"mixture": {"a": "b"}}, r"data.mixture.a: 'b' is not a mapping"),
    ({"mixture": {"a": {"weight": -1}}}, r"data.mixture.a.weight: -1 is not a valid number"),
    ({"stages": [{"weights": {}}]}, r"data.stages\[0\]: it does not set when it begins"),
    ({"stages": [{"from_step": 2, "from_tokens": 2}]}, r"it sets twice when it begins"),
    ({"stages": [{"from_step": 9}, {"from_step": 5}]}, r"data.stages\[1\].from_step: it begins at step 5 and the stage "
                                                       r"before at 9"),
    ({"stages": [{"from_step": 2.5}]}, r"2.5 is not a whole number"),
    ({"stages": [{"from_step": 2, "seq_len": 24}]}, r"data.seq_len: 8 sequences of 16 tokens are not a whole"),
    ({"stages": [{"from_step": 2, "seq_len": 8}], "packing": "best_fit"}, r"data.packing: best_fit packs sequences"),
    ({"mixture": {"a": 1}, "stages": [{"from_step": 2, "weights": {"b": 1}}]}, r"data.mixture has no 'b'"),
    ({"mixture": {"a": 1}, "stages": [{"from_step": 2, "weights": {"a": 0}}]}, r"all are 0"),
    ({"mixture": {"a": 0, "b": 0}}, r"data.mixture: all weights are 0"),
    ({"mixture": {"a": 1}, "packing": "bucket"}, r"data.packing: bucket has sequences of several lengths"),
    ({"buckets": [8, 16]}, r"data.buckets: data.packing=concat has none"),
    ({"buckets": [8, 4], "packing": "bucket"}, r"data.buckets: \[8, 4\] are not ascending lengths"),
    ({"mixture": {"a": 1}, "source": "x"}, r"data.source: data.mixture names other sources"),
])
def test_what_cannot_be_is_refused(keys, message):
    with pytest.raises(UserError, match=message):
        data_stages.stages(config(**keys))
