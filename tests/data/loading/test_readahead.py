"""Rows read by threads: the same rows, in the same order, with errors where they belong."""

import threading

import numpy as np
import pytest

from jaxtrain.data import Batches
from jaxtrain.data.loading.readahead import ReadAhead


class Numbered:
    """Rows that carry their own number; `bad` cannot be read."""

    def __init__(self, bad=()):
        self.bad, self.read = bad, []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        self.read.append(i)
        if i in self.bad:
            raise OSError(f"row {i}")
        return {"tokens": np.full(3, i, np.int32), "weights": np.ones(3, np.float32)}


@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("threads", [1, 3, 50])
def test_batches_are_the_same_in_any_order_of_steps(threads, repeat):
    plain, ahead = (Batches(Numbered(), global_batch_size=8, seed=1, repeat=repeat, threads=n) for n in (0, threads))
    for step in (0, 1, 2, 3, 7, 8, 2, 12, 0):
        for indices in (range(8), [5, 1, 1]):
            for name, column in plain.rows(step, indices).items():
                np.testing.assert_array_equal(column, ahead.rows(step, indices)[name])


def test_rows_of_the_next_steps_are_begun_and_read_once():
    rows = Numbered()
    batches = Batches(rows, global_batch_size=4, seed=0, shuffle=False, threads=6)
    got = [batches[step]["tokens"][:, 0].tolist() for step in range(10)]
    assert got == [[4 * step + i for i in range(4)] for step in range(10)]
    batches._ahead._pool.shutdown()
    assert sorted(rows.read) == list(range(46))  # six more than were asked for


def test_as_many_wait_at_once_as_there_are_threads():
    together = threading.Barrier(5, timeout=60)

    def read(step, indices):
        if step < 3:
            together.wait()  # would break, were fewer of them under way
        return {"tokens": np.array([[step, index] for index in indices])}

    ahead = ReadAhead(read, 5)
    for step in range(2):
        assert ahead.rows(step, [0, 1])["tokens"].tolist() == [[step, 0], [step, 1]]
    together.abort()


def test_an_error_comes_at_its_step_and_goes_with_its_cause():
    rows = Numbered(bad={9})
    batches = Batches(rows, global_batch_size=4, seed=0, shuffle=False, threads=16)
    batches[0], batches[1]
    with pytest.raises(OSError, match="row 9"):
        batches[2]
    rows.bad = ()
    assert batches[2]["tokens"][:, 0].tolist() == [8, 9, 10, 11]
