"""Batches as Grain's: a dataset to be sliced and chained, prefetched by Grain on a thread or in worker processes."""

import sys
import threading

import grain
import pytest

from jaxtrain.data import BatchDataset, prefetch
from jaxtrain.data.packing.packed_rows import PackedRows
from tests.data.loading.test_golden_batches import CASES, tokens
from tests.data.loading.test_loader import make, run, same


def dataset(**options) -> BatchDataset:
    return BatchDataset(make(**options))


def test_it_is_a_dataset_of_batches():
    batches, source = dataset(), make()
    assert isinstance(batches, grain.MapDataset) and len(batches) == sys.maxsize and batches.num_batches is None
    assert same(batches[7], source[7]) and batches.shapes_of(0, 9) == [(8, 3)]
    assert batches.tokens(5) == 120 and batches.epochs(23) == {"": 8.0} and batches.shape(3) == (8, 3)
    sums = batches[5:20:3].map(lambda batch: int(batch["tokens"].sum()))
    assert list(sums) == [int(source[step]["tokens"].sum()) for step in range(5, 20, 3)]
    assert [len(dataset(repeat=False)), len(dataset(repeat=False)[1:])] == [3, 2]
    with pytest.raises(IndexError):  # no batch comes again without being asked for
        dataset(repeat=False)[3]


def test_grains_own_transformations_give_the_same_batches():
    """They read row by row, which takes several times as long: docs/decisions.md."""
    rows = PackedRows(tokens(0), 16)
    assert isinstance(rows, grain.sources.RandomAccessDataSource)
    theirs = grain.MapDataset.source(rows).seed(3).shuffle().repeat().batch(8)
    ours = CASES["concat"]()
    assert all(same(dict(sorted(theirs[step].items())), dict(sorted(ours[step].items())))
               for step in (0, 1, 40, 10**6))


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "prefetch" in thread.name}


def ended(before: set[threading.Thread]) -> bool:
    for thread in threads() - before:
        thread.join(20)
    return threads() <= before


@pytest.mark.parametrize("depth", [1, 2, 100])
def test_prefetch_gives_the_steps_in_order_and_no_more(depth):
    before, placed, batches = threads(), [], make()

    def place(step, batch):
        placed.append((step, threading.current_thread()))
        return batch

    with prefetch(batches, 5, 25, place, depth) as stream:
        got = list(stream)
    assert [step for step, _ in placed] == [step for step, _, _ in got] == list(range(5, 25))
    (_, first), *others = placed
    assert first is threading.current_thread() and len({thread for _, thread in others}) == 1
    assert others[0][1] is not first
    assert all(same(batch, batches[step]) and wait >= 0 for step, batch, wait in got)
    assert ended(before)
    with prefetch(batches, 5, 5, place, depth) as stream:
        assert list(stream) == []


def test_prefetch_begins_when_told_to_and_runs_at_most_depth_ahead():
    placed = threading.Semaphore(0)
    with prefetch(make(), 0, 100, lambda step, _: placed.release(), 3) as stream:
        stream.begin()
        assert not placed.acquire(timeout=0.1)  # not before the first batch
        next(stream)
        assert placed.acquire(timeout=1) and not placed.acquire(timeout=0.2)
        stream.begin()
        for _ in range(3):
            assert placed.acquire(timeout=20)  # nothing was asked for yet
        assert not placed.acquire(timeout=0.2)
        for _ in range(10):
            next(stream)
            assert placed.acquire(timeout=20)
        assert not placed.acquire(timeout=0.2)


def test_none_is_a_batch_too():
    with prefetch(make(), 0, 4, lambda *_: None, 2) as stream:
        assert [(step, batch) for step, batch, _ in stream] == [(step, None) for step in range(4)]


def test_an_error_arrives_at_its_step_and_ends_the_thread():
    before, placed = threads(), []

    def place(step, batch):
        placed.append(step)
        if step == 3:
            raise OSError("the disk is gone")
        return step

    got, stream = [], prefetch(make(), 0, 100, place, 2)
    with pytest.raises(OSError, match="the disk is gone"):
        for step, _, _ in stream:
            got.append(step)
    assert got == [0, 1, 2] and ended(before) and max(placed) <= 5
    with pytest.raises(RuntimeError, match="closed"):  # no way to go on behind the step that failed
        next(stream)


def test_leaving_early_ends_the_thread():
    before, placed = threads(), []
    with prefetch(make(), 0, 10**9, lambda step, _: placed.append(step), 2) as stream:
        next(stream)
        next(stream)
    assert ended(before) and len(placed) <= 4
    stream.close()  # twice does no harm
    with pytest.raises(RuntimeError, match="mine"), prefetch(make(), 0, 10**9, lambda step, _: step, 2):
        raise RuntimeError("mine")
    assert ended(before)


def test_a_process_that_forgets_to_close_still_ends():
    run("""
        import numpy as np
        from jaxtrain.data import Batches, prefetch
        batches = Batches([{"weights": np.ones(3)}] * 5, global_batch_size=2, seed=0)
        stream = prefetch(batches, 0, 10**9, lambda step, batch: batch, 2)
        next(stream), next(stream)""")


