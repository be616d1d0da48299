"""Batches that are passed over: the others come in their order, and nothing else is another."""

from dataclasses import replace

import numpy as np
import pytest

from jaxtrain.data.loading.loader import Batches
from jaxtrain.data.loading.skipped_batches import FILE, SkippedBatches, remaining
from jaxtrain.errors import UserError
from tests.odd_files import ODD, WRONG, in_time


class Numbers:
    """Rows that hold their own number."""

    def __len__(self):
        return 60

    def __getitem__(self, i):
        return {"weights": np.full(4, i, np.float32)}


@pytest.mark.parametrize("passed", [(), (0,), (3, 4, 5), (0, 2, 9, 10), (50,)], ids=str)
def test_the_batch_of_a_step_is_the_nth_that_is_not_passed_over(passed):
    record = SkippedBatches(passed)
    left = [batch for batch in range(40) if batch not in passed]
    assert [record.batch(step) for step in range(30)] == left[:30]
    assert [record.reach(steps) for steps in range(30)] == [0, *(batch + 1 for batch in left[:29])]


def test_a_second_rollback_counts_in_steps_of_the_run():
    once = SkippedBatches().after_rollback(3, 5)
    assert once == SkippedBatches((3, 4, 5), 1, 3)
    twice = replace(once, void_above=None).after_rollback(2, 4)  # which are batches 2, 6, 7
    assert twice == SkippedBatches((2, 3, 4, 5, 6, 7), 2, 2)
    assert [twice.batch(step) for step in range(4)] == [0, 1, 8, 9]


def test_which_checkpoints_agree():
    before, after = SkippedBatches((1,), 1), SkippedBatches((1, 5, 6), 2)
    assert [steps for steps in range(9) if before.agrees(after, steps)] == [0, 1, 2, 3, 4]
    assert not SkippedBatches((0,)).agrees(SkippedBatches(), 1) and SkippedBatches((0,)).agrees(SkippedBatches(), 0)


@pytest.mark.parametrize("repeat", [True, False])
def test_batches_less_those_passed_over(repeat):
    whole = Batches(Numbers(), global_batch_size=6, seed=1, repeat=repeat)
    passed = SkippedBatches((2, 3, 7, 11))
    left = remaining(whole, passed)
    assert remaining(whole, SkippedBatches()) is whole
    assert left.num_batches == (None if repeat else 10 - 3)  # batch 11 is behind the end
    trained = 0
    for step, batch in enumerate([0, 1, 4, 5, 6, 8, 9]):
        np.testing.assert_array_equal(left[step]["weights"], whole[batch]["weights"])
        np.testing.assert_array_equal(left.rows(step, [4])["weights"], whole.rows(batch, [4])["weights"])
        assert left.shape(step) == whole.shape(batch) and left.origin(step, 4)[2] == whole.origin(batch, 4)[2]
        assert left.tokens(step) == trained
        trained += 6 * 4
        assert left.epochs(step + 1) == {"": (batch + 1) * 6 / 60}
    assert left.shapes_of(3, 5) == [(6, 4)] and left.shapes_of(3, 3) == []


def test_the_record_on_disk(tmp_path):
    assert SkippedBatches.read(tmp_path) is None
    record = SkippedBatches((4, 7), 1, 3)
    record.write(tmp_path)
    assert SkippedBatches.read(tmp_path) == record and [path.name for path in tmp_path.iterdir()] == [FILE]
    assert SkippedBatches.of(record.to_dict()) == replace(record, void_above=None)
    for text in ("{", "[1]", '{"batches": ["x"]}', '{"batches": [-1]}', '{"batches": 3}'):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(UserError, match="is not a valid record of skipped batches"):
            SkippedBatches.read(tmp_path)


@pytest.mark.parametrize("make", [*ODD, *WRONG], ids=lambda make: make.__name__)
def test_whatever_lies_in_place_of_the_record(tmp_path, make):
    make(tmp_path / FILE)
    with pytest.raises(UserError, match="is not a valid record of skipped batches: it "):
        in_time(lambda: SkippedBatches.read(tmp_path))


@pytest.mark.parametrize("record", ['{"batches": null}', '{"batches": [true]}', '{"rollbacks": "1"}',
                                    '{"rollbacks": null}', '{"void_above": "3"}', '{"void_above": [1]}'])
def test_a_record_of_another_form(tmp_path, record):
    (tmp_path / FILE).write_text(record)
    with pytest.raises(UserError, match="is not a valid record of skipped batches: it is not of the form expected"):
        SkippedBatches.read(tmp_path)
