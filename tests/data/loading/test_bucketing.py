"""Batches by length: every row exactly once an epoch, by any number of processes, from any step."""

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.data import BucketedBatches, DocumentRows, Tokens
from jaxtrain.data.corpus.corpus import Shard
from jaxtrain.data.loading.bucketing import SMALL, choose, equal_sizes, padding
from jaxtrain.errors import UserError

ROOT = Path(__file__).parents[3]


class Numbered:
    """Rows that say which they are."""

    def __init__(self, lengths):
        self.lengths = np.asarray(lengths)

    def row(self, i, length):
        assert self.lengths[i] <= length
        return {"number": np.full(length, i, np.int32), "weights": (np.arange(length) < self.lengths[i]).astype("f4")}


def random_case(seed: int):
    """Rows, buckets (now and then ones that nothing needs), sizes for each, a seed."""
    rng = np.random.default_rng(seed)
    lengths = np.ceil(rng.lognormal(2, 1, rng.integers(1, 120))).astype(int)
    buckets = sorted({*rng.integers(1, lengths.max() + 1, rng.integers(0, 6)).tolist(), int(lengths.max()),
                      *[int(lengths.max()) + 7] * (seed % 3 == 0)})
    sizes = rng.integers(1, 17, len(buckets)).tolist() if seed % 2 else int(rng.integers(1, 17))
    return Numbered(lengths), {"buckets": buckets, "global_batch_size": sizes, "seed": int(rng.integers(0, 2**40))}


def same(a, b) -> bool:
    return list(a) == list(b) and all(np.array_equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def epoch(batches: BucketedBatches, number: int) -> list[int | None]:
    steps = range(number * batches.batches_per_epoch, (number + 1) * batches.batches_per_epoch)
    return [i for step in steps for i in batches.numbers(step, range(batches.size(step)))]


@pytest.mark.parametrize("seed", range(40))
def test_every_row_comes_exactly_once_an_epoch(seed):
    rows, options = random_case(seed)
    batches = BucketedBatches(rows, **options)
    for number in (0, 1, 12_345):
        found = epoch(batches, number)
        assert Counter(i for i in found if i is not None) == Counter(range(len(rows.lengths)))
        assert found.count(None) < max(batches.global_batch_size, 2)
    once = BucketedBatches(rows, **options, repeat=False)
    assert once.num_batches == once.batches_per_epoch and epoch(once, 0) == epoch(batches, 0)
    with pytest.raises(IndexError):
        once[once.num_batches]


@pytest.mark.parametrize("seed", range(40))
def test_a_batch_has_rows_of_one_length_and_padding_has_no_weight(seed):
    rows, options = random_case(seed)
    batches = BucketedBatches(rows, **options)
    given, buckets = options["global_batch_size"], options["buckets"]
    sizes = dict(zip(buckets, given if isinstance(given, list) else itertools.repeat(given)))
    total = 0
    for step in range(batches.batches_per_epoch):
        batch, length, size = batches[step], batches.length(step), batches.size(step)
        assert batch["weights"].shape == (size, length) and size == sizes[length]
        assert (size, length) in batches.shapes
        for i, weights in zip(batches.numbers(step, range(size)), batch["weights"], strict=True):
            assert weights.sum() == (0 if i is None else rows.lengths[i])
        total += batch["weights"].sum()
    assert total == rows.lengths.sum()
    assert {(batches.size(step), batches.length(step)) for step in range(batches.batches_per_epoch)} \
        == set(batches.shapes)


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_any_number_of_processes_makes_the_same_global_batch_from_any_step(processes):
    for seed in range(6):
        rows, options = random_case(seed)
        whole = BucketedBatches(rows, **options)
        steps = [0, 1, whole.batches_per_epoch - 1, whole.batches_per_epoch + 3, 10**9 + seed]
        for step in steps:
            places, indices = [], np.arange(whole.size(step))
            for part in np.array_split(indices, processes):
                if len(part):  # every process opens the data for itself, and starts at this step
                    places.append(BucketedBatches(rows, **options).rows(step, part.tolist()))
            joined = {name: np.concatenate([place[name] for place in places]) for name in places[0]}
            assert same(joined, whole[step])


def test_a_step_needs_no_other_step():
    rows, options = random_case(7)
    in_order = BucketedBatches(rows, **options)
    stream = [in_order[step] for step in range(40)]
    for step in (39, 0, 17, 3):
        assert same(BucketedBatches(rows, **options)[step], stream[step])


def test_epochs_differ_and_so_do_the_rows_that_go_up():
    rows = Numbered([1] * 11 + [5] * 9)
    batches = BucketedBatches(rows, buckets=[1, 5], global_batch_size=4, seed=0)
    epochs = [epoch(batches, number) for number in range(8)]
    assert len({tuple(found) for found in epochs}) == 8
    up = set()
    for step in range(8 * batches.batches_per_epoch):
        if batches.length(step) == 5:
            up |= {i for i in batches.numbers(step, range(4)) if i is not None and i < 11}
    assert len(up) > 8  # three in each epoch
    turns = [tuple(batches.length(n * batches.batches_per_epoch + k) for k in range(batches.batches_per_epoch))
             for n in range(8)]
    assert len(set(turns)) > 1


def test_order_is_pinned():
    """A change of this order is a change of every run's data: old checkpoints would resume on other batches."""
    batches = BucketedBatches(Numbered([3, 9, 2, 2, 8, 1, 3]), buckets=[3, 9], global_batch_size=2, seed=5)
    assert [batches.numbers(step, range(2)) for step in (0, 1, 2, 3, 4, 10**9)] \
        == [[2, 6], [4, None], [5, 3], [1, 0], [4, None], [2, 6]]
    fixed = BucketedBatches(Numbered([3, 9, 2, 2, 8, 1, 3]), buckets=[3, 9], global_batch_size=2, seed=5, shuffle=False)
    assert epoch(fixed, 0) == epoch(fixed, 3) == [0, 2, 3, 5, 1, 4, 6, None]


def test_a_bucket_of_many_rows_is_permuted_entry_by_entry():
    rows = Numbered(np.random.default_rng(0).integers(1, 5, 12_001))
    batches = BucketedBatches(rows, buckets=[2, 4], global_batch_size=100, seed=0)
    assert min(batches.there) > SMALL
    epochs = [epoch(batches, number) for number in (0, 1)]
    assert all(sorted(i for i in found if i is not None) == [*range(12_001)] for found in epochs)
    assert epochs[0] != epochs[1] and batches.numbers(10**9, [99]) == [9484]


def test_the_seed_decides():
    rows = Numbered(np.arange(1, 40))
    orders = {tuple(epoch(BucketedBatches(rows, buckets=[10, 40], global_batch_size=4, seed=seed), 0))
              for seed in (0, 1, 2, 2, 2**40)}
    assert len(orders) == 4


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_chosen_lengths_pad_least(seed, count):
    rng = np.random.default_rng(seed)
    lengths, multiple = rng.integers(1, 14, rng.integers(1, 40)), int(rng.choice([1, 4]))
    chosen = choose(lengths, count, multiple)
    assert 1 <= len(chosen) <= count and all(length % multiple == 0 for length in chosen)
    ends = range(multiple, 14 + multiple, multiple)
    tried = [padding(lengths, some) for n in range(1, count + 1) for some in itertools.combinations(ends, n)
             if some[-1] >= lengths.max()]
    assert padding(lengths, chosen) == pytest.approx(min(tried))


def test_many_lengths_are_thinned_without_harm():
    lengths = np.ceil(np.random.default_rng(0).lognormal(7, 1.2, 200_000)).astype(int)
    chosen = choose(lengths, 8)
    assert len(chosen) == 8 and chosen[-1] == lengths.max() and len(np.unique(lengths)) > 10_000
    assert 0.34037 < padding(lengths, chosen) < 0.3408  # the least is 0.340372: half a minute over all lengths


def test_short_rows_may_come_in_larger_batches():
    assert equal_sizes([100, 250, 1000], 2000, multiple=4) == [20, 8, 4]
    rows = Numbered([100] * 30 + [900] * 5)
    batches = BucketedBatches(rows, buckets=[100, 1000], global_batch_size=equal_sizes([100, 1000], 2000), seed=0)
    assert batches.shapes == [(20, 100), (2, 1000)]


@pytest.mark.parametrize(("lengths", "options", "key"), [
    ([3], {"buckets": [2]}, "buckets"), ([3], {"buckets": [4, 4]}, "buckets"), ([3], {"buckets": []}, "buckets"),
    ([3], {"buckets": [0, 4]}, "buckets"), ([], {"buckets": [4]}, "data.source"), ([3], {"seed": -1}, "data.seed"),
    ([3], {"global_batch_size": [1, 2]}, "global_batch_size"), ([3], {"global_batch_size": 0}, "global_batch_size")])
def test_what_cannot_be_is_told(lengths, options, key):
    with pytest.raises(UserError) as caught:
        BucketedBatches(Numbered(np.array(lengths, int)),
                        **{"buckets": [4], "global_batch_size": 2, "seed": 0} | options)
    assert caught.value.key == key


def test_what_is_not_there_is_an_error():
    batches = BucketedBatches(Numbered([1, 2]), buckets=[2], global_batch_size=2, seed=0)
    for step, indices in ((0, [2]), (0, [-1]), (-1, [0])):
        with pytest.raises(IndexError):
            batches.rows(step, indices)
    with pytest.raises(UserError, match="no rows"):
        choose(np.zeros(0, int), 4)


# -------------------------------------------------------------------------------------------------------------- text
def tokens_of(documents: list[list[int]]) -> Tokens:
    """Return tokens in shards of two documents each, every document closed by 256; tokens above 200 are not learnt."""
    shards = []
    for pair in zip(documents[::2], documents[1::2], strict=True):
        closed = [[*document, 256] for document in pair]
        ids = np.array([*itertools.chain(*closed)], np.uint16)
        shards.append(Shard(ids, np.cumsum([0, *map(len, closed)]), (ids != 201).astype(np.uint8)))
    return Tokens(tuple(shards), sum(map(len, documents)))


DOCUMENTS = [[i] * 3 + list(range(n)) for i, n in enumerate([0, 1, 2, 9, 4, 30, 8, 0, 1, 17])] + [[], [201, 5, 201, 7]]


@pytest.mark.parametrize("longest", [None, 8])
def test_a_document_a_row_with_the_columns_of_packed_rows(longest):
    rows = DocumentRows(tokens_of(DOCUMENTS), longest)
    buckets = choose(rows.lengths, 3)
    assert buckets[-1] == (longest or 33)
    batches = BucketedBatches(rows, buckets=buckets, global_batch_size=4, seed=0, repeat=False)
    learnt = []
    for step in range(batches.num_batches):
        batch = batches[step]
        assert list(batch) == ["tokens", "targets", "segments", "positions", "weights"]
        for row in range(4):
            one = {name: column[row] for name, column in batch.items()}
            there = one["segments"] == 1
            assert not one["weights"][~there].any() and not one["tokens"][~there].any()
            assert one["positions"][there].tolist() == list(range(there.sum()))
            assert (one["tokens"][there][1:] == one["targets"][there][:-1]).all()
            learnt += one["targets"][one["weights"] == 1].tolist()
    wanted = [id for document in DOCUMENTS for id in [*document, 256][1:] if id != 201]
    assert sorted(learnt) == sorted(wanted)


def test_processes_of_their_own_give_the_same_bytes(tmp_path):
    """Two that share nothing but a corpus: what each reads, put together, is the global batch."""
    from jaxtrain.data.prepare.prepare import Options, prepare

    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": "ab " * (i % 23)}) + "\n" for i in range(300)))
    corpus = prepare([str(tmp_path / "in.jsonl")], tmp_path / "corpus", Options(eval_fraction=0, task_bytes=2000))
    script = f"""
import sys, numpy as np
from jaxtrain.data import BucketedBatches, DocumentRows, open_corpus
rows = DocumentRows(open_corpus({str(corpus.path)!r}).train)
batches = BucketedBatches(rows, buckets=[16, 40, 70], global_batch_size=8, seed=3)
mine = range(4 * int(sys.argv[1]), 4 * int(sys.argv[1]) + 4)
for step in (0, 5, 1_000_003):
    for name, column in sorted(batches.rows(step, mine).items()):
        sys.stdout.buffer.write(column.tobytes())
"""
    started = [subprocess.Popen([sys.executable, "-c", script, str(p)], cwd=ROOT, stdout=subprocess.PIPE)
               for p in range(2)]
    got = [process.communicate(timeout=120)[0] for process in started]
    batches = BucketedBatches(DocumentRows(corpus.train), buckets=[16, 40, 70], global_batch_size=8, seed=3)
    for p in range(2):
        assert got[p] == b"".join(column[4 * p: 4 * p + 4].tobytes() for step in (0, 5, 1_000_003)
                                  for _, column in sorted(batches[step].items()))
