import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.data import Batches
from jaxtrain.data.loading import loader
from jaxtrain.errors import UserError


class Numbered:
    """Rows that carry their own number."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        assert 0 <= i < self.count
        return {"tokens": np.full(3, i, np.int32), "weights": np.ones(3, np.float32)}


def make(count=23, size=8, seed=0, **options) -> Batches:
    return Batches(Numbered(count), global_batch_size=size, seed=seed, **options)


def order(batches: Batches, steps) -> list[int]:
    return np.concatenate([batches[step]["tokens"][:, 0] for step in steps]).tolist()


def same(a, b) -> bool:
    return list(a) == list(b) and all(np.array_equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def test_epochs_are_permutations_each_another():
    count, size = 23, 8  # a batch holds rows of two epochs
    stream = order(make(count, size), range(2 * count))
    epochs = [stream[start : start + count] for start in range(0, len(stream), count)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs) == 16
    assert epochs[0] != list(range(count))


def test_order_follows_the_seed_alone():
    assert order(make(seed=1), range(9)) == order(make(seed=1), range(9))
    assert order(make(seed=1), range(9)) != order(make(seed=2), range(9))
    # no seed continues another one's epochs
    assert order(make(24, seed=0), range(3, 6)) != order(make(24, seed=1), range(3))
    # the batch size cuts the same stream elsewhere
    assert order(make(size=4), range(8)) == order(make(size=16), range(2))
    assert order(make(count=5, shuffle=False), range(2)) == [0, 1, 2, 3, 4] * 3 + [0]


def test_order_is_pinned():
    """A change of this order is a change of every run's data: old checkpoints would resume on other batches."""
    assert order(make(), [0]) == [21, 2, 13, 14, 9, 7, 17, 6]
    assert order(make(), [1000]) == [8, 14, 6, 18, 20, 16, 19, 1]


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize("step", [0, 2, 7, 10**9])
def test_slices_of_any_number_of_processes_make_the_same_batch(processes, step):
    batches, size = make(size=16), 16
    whole = batches[step]
    for indices in (np.array_split(np.arange(size), processes), [range(p, size, processes) for p in range(processes)]):
        for part in indices:
            assert same(batches.rows(step, part), {name: column[list(part)] for name, column in whole.items()})


def test_a_step_needs_no_other_step_and_few_reads():
    class Counting(Numbered):
        reads = 0

        def __getitem__(self, i):
            self.reads += 1
            return super().__getitem__(i)

    rows = Counting(10**6)
    batches = Batches(rows, global_batch_size=8, seed=0)
    far = batches[10**9]
    assert rows.reads == 8
    assert batches.rows(10**9, [3])["tokens"][0, 0] == far["tokens"][3, 0] and rows.reads == 9
    list(map(batches.__getitem__, (5, 0, 2)))
    assert same(batches[10**9], far)


def test_evaluation_ends_in_a_batch_filled_with_weight_zero():
    batches = make(count=10, size=4, shuffle=False, repeat=False)
    assert batches.num_batches == 3
    got = [batches[step] for step in range(3)]
    assert all(batch["tokens"].shape == (4, 3) for batch in got)
    tokens, weights = (np.concatenate([batch[name][:, 0] for batch in got]) for name in ("tokens", "weights"))
    assert tokens[weights == 1].tolist() == list(range(10)) and weights.tolist() == [1] * 10 + [0] * 2
    assert same(batches.rows(2, [1, 3]), {name: column[[1, 3]] for name, column in got[2].items()})
    shuffled = make(count=10, size=4, repeat=False)
    assert sorted(order(shuffled, range(3))[:10]) == list(range(10))
    assert make(count=8, size=4, repeat=False).num_batches == 2 and make().num_batches is None
    with pytest.raises(IndexError):
        batches[3]


def test_what_is_not_there_is_an_error():
    for step, indices in ((0, [8]), (0, [-1]), (-1, [0])):
        with pytest.raises(IndexError):
            make(size=8).rows(step, indices)
    with pytest.raises(UserError, match=r"data\.seed"):
        make(seed=-1)


def test_rows_are_ordered_without_the_rest_of_grain():
    """Importing all of grain takes long; code that imports it later gets the module that is in use."""
    run("""
        import sys
        from jaxtrain.data.loading.shuffle import Order, index_shuffle
        rows = Order(23, 5).rows(range(100)).tolist()
        assert not {'grain', 'orbax'} & set(sys.modules)
        import grain
        from grain import experimental
        assert experimental.index_shuffle is index_shuffle()
        assert rows == [grain.MapDataset.range(23).seed(5).shuffle().repeat()[n] for n in range(100)]""")


def run(script: str) -> None:
    root = Path(loader.__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=root, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr


class Together(Numbered):
    """Rows that are given several at once."""

    def __getitem__(self, i):
        assert i == 0, "one by one"
        return super().__getitem__(i)

    def take(self, numbers):
        assert all(0 <= number < self.count for number in numbers)
        return {"tokens": np.repeat(np.asarray(numbers, np.int32)[:, None], 3, 1),
                "weights": np.ones((len(numbers), 3), np.float32)}


def test_rows_that_can_are_taken_several_at_once():
    for options in ({}, {"repeat": False}, {"shuffle": False}):
        together = Batches(Together(23), global_batch_size=8, seed=0, **options)
        for step in range(3):
            assert same(together[step], make(**options)[step])
        assert same(together.rows(2, [7, 1]), make(**options).rows(2, [7, 1]))
