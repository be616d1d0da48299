"""A Grain dataset of the user's as `data=`: by the step, or in order with a state that checkpoints keep."""

import json

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.data.loading.grain_datasets.given_datasets import KEPT, IterDatasetBatches, as_batch_source
from jaxtrain.data.loading.skipped_batches import SkippedBatches, remaining
from jaxtrain.errors import UserError
from jaxtrain.trainer.observers import Observer

ROWS, STEPS = 4, 8
pytestmark = pytest.mark.usefixtures("cache")


class Source:
    """Numbers with a value each; `read`: which ones were read."""

    def __init__(self):
        self.read: list[int] = []

    def __len__(self):
        return 500

    def __getitem__(self, i):
        self.read.append(i)
        return {"x": np.float32(i / 50), "n": np.int32(i)}


def shuffled(source=None):
    return grain.MapDataset.source(source or Source()).seed(1).shuffle().repeat()


def in_order(source=None, batches=None):
    """A pipeline that has no random access: a filter in front of batches, then a window that is shuffled."""
    plain = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    kept = shuffled(source).to_iter_dataset(plain).filter(lambda row: row["n"] % 3 > 0).batch(ROWS)
    found = grain.experimental.WindowShuffleIterDataset(kept, window_size=2, seed=2)
    return found if batches is None else grain.experimental.LimitIterDataset(found, batches)


def numbers(batch):
    return np.asarray(batch["n"]).tolist()


def build(data, **keys):
    config = jt.make_config({"train": {"steps": STEPS, "progress": False}, "checkpoint": {"every": 2, "keep": 9},
                             "data": {"prefetch": 3}}, {key.replace("__", "."): value for key, value in keys.items()})
    return jt.build(config, model={"w": jnp.ones(()), "b": jnp.zeros(())}, optimizer=optax.adam(1e-1), data=data,
                    loss_fn=lambda tree, batch: ((tree["w"] * batch["x"] + tree["b"] - batch["x"] ** 2) ** 2).mean(),
                    devices=jax.devices()[:1])


class Seen(Observer):
    """Keeps the numbers of each batch, and fails after a step."""

    def __init__(self, fails: int = 0):
        self.batches, self.fails = {}, fails

    def on_batch(self, step, batch):
        self.batches[step] = numbers(jax.device_get(batch))

    def on_dispatch(self, step, metrics):
        if step == self.fails:
            raise RuntimeError("power is gone")


def test_batches_of_a_map_dataset_are_read_by_the_step(tmp_path):
    dataset, seen = shuffled().batch(ROWS), Seen()
    run = build(dataset)
    assert run.train_batches.parents == (dataset,) and len(run.train_batches[3:9]) == 6
    jt.train(run, tmp_path, observers=[seen])
    assert seen.batches == {step + 1: numbers(dataset[step]) for step in range(STEPS)}
    assert numbers(jax.device_get(run.batch(1000))) == numbers(dataset[1000])
    described = json.loads((tmp_path / "run.json").read_text())["own_parts"]["data"]
    assert described["class"] == "MapDatasetBatches" and described["identity"][:2] == [
        "BatchMapDataset", "RepeatMapDataset"]


def test_a_resumed_run_goes_on_in_an_iter_dataset_to_the_bit(tmp_path):
    """It does not read again what came before the checkpoint."""
    whole = Seen()
    want = jt.train(build(in_order()), tmp_path / "whole", observers=[whole])
    assert whole.batches == {n + 1: numbers(batch) for n, batch in zip(range(STEPS), in_order(), strict=False)}
    with pytest.raises(RuntimeError, match="power is gone"):
        jt.train(build(in_order()), tmp_path / "cut", observers=[Seen(fails=7)])
    assert sorted(int(path.name) for path in (tmp_path / "cut/checkpoints").iterdir() if path.name.isdecimal())[-1] == 6
    source, rest = Source(), Seen()
    found = jt.train(build(in_order(source)), tmp_path / "cut", observers=[rest])
    assert rest.batches == {step: whole.batches[step] for step in (7, 8)}
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(want.params), jax.device_get(found.params)))
    assert json.loads((tmp_path / "cut/checkpoints/6/meta/metadata").read_text())["data_state"]
    passed = {number for step in (3, 4) for number in whole.batches[step]}  # the second window of three
    assert len(passed) == 2 * ROWS and passed.isdisjoint(source.read)


def test_skipped_batches_of_an_iter_dataset():
    """Steps are counted without them, states with them."""
    want = [numbers(batch) for batch, _ in zip(in_order(), range(30), strict=False)]
    left = remaining(as_batch_source(in_order()), SkippedBatches((2, 3)))
    assert [numbers(left[step]) for step in range(6)] == [want[n] for n in (0, 1, 4, 5, 6, 7)]
    again = remaining(as_batch_source(in_order()), SkippedBatches((2, 3)))
    again.restore(3, left.state(3))
    assert [numbers(again[step]) for step in (3, 4, 0)] == [want[5], want[6], want[0]]


def test_any_step_of_an_iter_dataset_can_be_asked_for():
    want = [numbers(batch) for batch, _ in zip(in_order(), range(30), strict=False)]
    batches = IterDatasetBatches(in_order())
    assert [numbers(batches[step]) for step in (3, 3, 1, 0, 20, 7, 8)] == [want[n] for n in (3, 3, 1, 0, 20, 7, 8)]
    assert batches.shape(5) == (ROWS, 1) and batches.num_batches is None
    restored = IterDatasetBatches(in_order())
    restored.restore(8, batches.state(8))
    assert [numbers(restored[step]) for step in (8, 2, 9)] == [want[n] for n in (8, 2, 9)]


def test_few_states_are_kept(monkeypatch):
    monkeypatch.setattr("jaxtrain.data.loading.grain_datasets.given_datasets.KEPT", 5)
    batches, want = IterDatasetBatches(in_order()), IterDatasetBatches(in_order())
    batches[20]
    assert len(batches._states) == 5 < KEPT
    assert numbers(batches[3]) == numbers(want[3])


class Stateless(grain.IterDataset):
    """A dataset whose iterator has a state that JSON does not hold."""

    def __iter__(self):
        class Iterator(grain.DatasetIterator):
            def __next__(self):
                return {"x": np.ones(ROWS, np.float32)}

            def get_state(self):
                return {"at": {1, 2}}

            def set_state(self, state):
                pass

        return Iterator()


@pytest.mark.parametrize(("data", "message"), [
    (lambda: iter(in_order()), "data: it is an iterator of a Grain dataset, which one run would use up; give the data"),
    (lambda: grain.DataLoader(data_source=Source(), sampler=grain.samplers.IndexSampler(500, seed=0)),
     "data: it is a grain.DataLoader, which reads for one process; give a grain.MapDataset"),
    (lambda: Source(), "data: it is a Source, not a jt.BatchSource or a Grain dataset; wrap a function"),
    (lambda: grain.MapDataset.range(0), "data: the grain.MapDataset is empty; give one with a batch for each step"),
    (lambda: grain.MapDataset.range(9), "data: the grain.MapDataset gives no dict of arrays with an example in each"),
    (shuffled, "data: the grain.MapDataset gives no dict of arrays with an example in each row; return for example"),
    (lambda: shuffled().filter(lambda row: False),
     "data: the grain.MapDataset gives no dict of arrays with an example in each row"),
    (lambda: Stateless(), "data: the state of its iterator is not plain JSON .*; give a dataset of Grain's own"),
    (lambda: shuffled()[:9].to_iter_dataset().filter(lambda row: False),
     "data: the grain.IterDataset ends after 0 batches, before the run does; let it repeat, or lower train.steps"),
], ids=range(9))
def test_what_is_no_dataset_of_batches_is_refused(data, message):
    with pytest.raises(UserError, match=message):
        build(data())


def test_data_that_end_too_soon(tmp_path):
    with pytest.raises(UserError, match=r"data: the grain\.IterDataset ends after 5 batches, before the run does"):
        jt.train(build(in_order(batches=5)), tmp_path / "in_order")
    with pytest.raises(UserError, match=r"train\.steps: the batches given by data= end at step 5"):
        jt.train(build(shuffled().batch(ROWS)[:5]), tmp_path / "by_step")
