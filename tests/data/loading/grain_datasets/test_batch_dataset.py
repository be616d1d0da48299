"""Batches as Grain's: a dataset to be sliced and chained, prefetched by Grain on a thread or in worker processes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grain
import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.data import BatchDataset, Batches, prefetch
from jaxtrain.data.corpus.corpus import Tokens
from jaxtrain.data.corpus.sequences import Column
from jaxtrain.data.loading.grain_datasets.given_datasets import as_batch_source
from jaxtrain.data.packing.document_rows import DocumentRows, SequenceRows
from jaxtrain.data.packing.packed_rows import PackedRows
from jaxtrain.errors import UserError
from tests.data.loading.test_golden_batches import CASES, sequences, tokens
from tests.data.loading.test_loader import make, run, same
from tests.tiers import exhaustive, slow


def dataset(**options) -> BatchDataset:
    return BatchDataset(make(**options))


def by_name(batch: dict) -> dict:
    return dict(sorted(batch.items()))


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


def test_corpora_and_rows_are_data_sources_of_grain():
    text, heard = tokens(0), sequences(features=Column("float16", (80,)))
    rows = DocumentRows(text, 16), SequenceRows(heard), PackedRows(text, 16)
    assert all(isinstance(source, grain.sources.RandomAccessDataSource) for source in (text, heard, *rows))
    documents = grain.MapDataset.source(text).seed(1).shuffle()
    assert len(documents) == 90 and bool(Tokens((), 0))
    whole = np.concatenate([text[i]["tokens"] for i in range(90)])
    assert whole.tolist() == text.read(0, text.num_tokens).tolist()
    assert all(text[i]["tokens"][-1] == 256 for i in (0, 29, 30, 89))
    assert sum(len(document["tokens"]) for document in documents) == len(whole)
    lengths = rows[0].lengths.tolist()
    assert [len(row["tokens"]) for row in grain.MapDataset.source(rows[0])] == lengths == [
        int(row["weights"].sum()) for row in rows[0]]
    assert [len(row["weights"]) for row in grain.MapDataset.source(rows[1])] == heard.counts().tolist()
    for source in (text, heard, *rows):
        with pytest.raises(IndexError):
            source[len(source)]


def test_grains_own_transformations_give_the_same_batches():
    """They read row by row, which takes several times as long: docs/decisions.md."""
    rows = PackedRows(tokens(0), 16)
    assert isinstance(rows, grain.sources.RandomAccessDataSource)
    theirs = grain.MapDataset.source(rows).seed(3).shuffle().repeat().batch(8)
    ours = CASES["concat"]()
    assert all(same(by_name(theirs[step]), by_name(ours[step])) for step in (0, 1, 40, 10**6))


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




class Failing:
    """Rows of which one cannot be read."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        if i == 21:
            raise UserError("data.source", "row 21 is gone", "copy it again")
        return {"weights": np.full(3, i, np.float32)}


def test_workers_read_the_same_batches_and_end_with_the_last():
    """Augmented images; the order is that of one process, whatever the number of workers."""
    images = CASES["images, augmented"]()
    with prefetch(images, 3, 10, lambda step, batch: batch, 2, workers=2) as stream:
        got = list(stream)
    assert [step for step, _, _ in got] == list(range(3, 10))
    assert all(same(by_name(batch), by_name(images[step])) for step, batch, _ in got)
    assert not [one for one in multiprocessing.active_children() if "grain" in one.name]


def test_an_error_in_a_worker_arrives_at_its_step():
    got = []
    batches = Batches(Failing(), global_batch_size=4, seed=0, shuffle=False)
    with (prefetch(batches, 0, 9, lambda step, batch: batch, 1, workers=1) as stream,
          pytest.raises(UserError, match=r"data\.source: row 21 is gone")):
        for step, _, _ in stream:
            got.append(step)
    assert got == [0, 1, 2, 3, 4]


def test_what_cannot_be_sent_to_workers_is_refused():
    lock = threading.Lock()
    data = jt.BatchFunction(lambda step: {"x": np.full(4, bool(lock), np.float32)})
    ordered = as_batch_source(grain.MapDataset.range(9).to_iter_dataset())
    for given, message in ((data, r"data\.workers: the batches given by data= cannot be sent .*; leave it out, or"),
                           (ordered, r"data\.workers: a grain.IterDataset is read in order; leave it out, and give")):
        with prefetch(given, 0, 9, lambda step, batch: batch, 1, workers=1) as stream:
            given._shape = (4, 1)
            stream._first = False
            with pytest.raises(UserError, match=message):
                next(stream)


@pytest.mark.parametrize("name", [*slow("bucket"), *exhaustive("stages")])
def test_a_run_with_workers_is_to_the_bit_that_without(tmp_path, name):
    """They open the config's corpus themselves; it resumes with another number of them."""
    keys = {"stages": {"data.stages": [{"from_step": 3, "seq_len": 32, "global_batch_size": 32}]},
            "bucket": {"data.packing": "bucket", "data.buckets": [16, 64]}}[name]
    config = {"data.source": f"{tmp_path}/text", "data.seq_len": 64, "train.progress": False, "train.eval_every": 0,
              "data.cache_dir": f"{tmp_path}/cache", "checkpoint.every": 2,
              "optimizer.schedule": "constant", **keys}
    (tmp_path / "text").mkdir()
    for n in range(40):
        (tmp_path / "text" / f"{n}.txt").write_text(f"The text of file {n}. " * (n + 1))

    def trained(workdir, **more):
        made = jt.load_config("configs/gpt.py:tiny", config | {key.replace("__", "."): v for key, v in more.items()})
        run = jt.build(made, devices=jax.devices()[:1])
        return jax.device_get(jt.train(run, tmp_path / workdir, may_change=["train.steps"]).params)

    want = trained("alone", train__steps=6)
    trained("helped", train__steps=4, data__workers=2)
    found = trained("helped", train__steps=6, data__workers=3)
    assert jax.tree.all(jax.tree.map(np.array_equal, want, found))


@pytest.mark.slow
def test_workers_of_a_run_that_is_killed_end(tmp_path):
    script = """
import os, sys, numpy as np
from jaxtrain.data import Batches, prefetch

class Rows:
    def __len__(self): return 9
    def __getitem__(self, i): return {"weights": np.ones(3) * os.getpid()}

if __name__ == "__main__":
    with prefetch(Batches(Rows(), global_batch_size=2, seed=0), 0, 99, lambda step, batch: batch, 2, workers=2) as made:
        print(*{int(batch["weights"][0, 0]) for _, (_, batch, _) in zip(range(5), made)}, flush=True)
        sys.stdin.read()
"""
    (tmp_path / "script.py").write_text(script)
    process = subprocess.Popen([sys.executable, tmp_path / "script.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[4]}"}, text=True)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 3 and process.pid in pids  # the first batch is read without them
    for pid in pids:
        if pid != process.pid:
            os.kill(pid, signal.SIGINT)  # as a terminal sends it to all: only the run itself heeds it
    process.kill()
    process.communicate()
    end = time.monotonic() + 60
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, left
        time.sleep(0.1)
