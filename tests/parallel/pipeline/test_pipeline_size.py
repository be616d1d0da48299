"""The size of a pipeline's program and memory does not grow with the number of micro-batches, but where it must."""

import functools

import pytest

from jaxtrain.parallel.schedules import Column
from tests.numerics import reference
from tests.tiers import slow_if

F32 = I32 = 4
ROWS, SEQ, DIM = 2, 16, 32  # of one micro-batch
ACTIVATION = ROWS * SEQ * DIM * F32
TOKENS = ROWS * SEQ * (4 * I32 + F32)  # tokens, targets, segments, positions and weights of one micro-batch
FLAT = ("1f1b", "interleaved", "zb_h1", "zb_v")
SLOW = pytest.mark.slow


def build(schedule, microbatches):
    """Micro-batches of one size: the batch grows with their number."""
    return reference.build("gpt2", mesh__stage=2, model__num_layers=4, pipeline__schedule=schedule,
                           pipeline__microbatches=microbatches, data__global_batch_size=ROWS * microbatches)


@functools.cache
def temporary(schedule, microbatches):
    """Bytes on each device, beside arguments and results."""
    return reference.compiled(build(schedule, microbatches)).memory_analysis().temp_size_in_bytes


def check_growth(schedule, counts, inputs_kept):
    """Check to the byte, alignment aside: tokens cut up, rows of the table, a stage's inputs for each micro-batch."""
    sizes = {m: temporary(schedule, m) for m in counts}
    print(f"\n{schedule}: " + ", ".join(f"{size:,} bytes with {m} micro-batches" for m, size in sizes.items()))
    ticks = {m: build(schedule, m).schedules[0].length for m in counts}
    for m in counts[1:]:
        more, columns = m - counts[0], len(Column) * I32
        want = more * (TOKENS + inputs_kept * ACTIVATION) + (ticks[m] - ticks[counts[0]]) * columns
        got = sizes[m] - sizes[counts[0]]
        assert abs(got - want) <= 512, (f"{got:,} bytes more for {more} micro-batches more, not {want:,}; an "
                                        f"activation has {ACTIVATION:,}")


@pytest.mark.parametrize("schedule", [
    pytest.param(schedule, marks=SLOW if schedule == "zb_v" else pytest.mark.exhaustive)
    for schedule in FLAT])
def test_memory_does_not_grow_with_micro_batches(schedule):
    check_growth(schedule, (8, 32), inputs_kept=0)


@pytest.mark.exhaustive  # its table's slots are counted by test_schedules
@pytest.mark.parametrize("counts", [(8, 32), (4, 8, 16, 32)], ids=str)
def test_gpipe_keeps_one_stage_input_for_each_micro_batch(counts):
    check_growth("gpipe", counts, inputs_kept=1)


@pytest.mark.parametrize("schedule", [
    pytest.param(name, marks=slow_if(name == "1f1b"))
    for name in ("gpipe", *FLAT)])
def test_the_program_does_not_grow_with_micro_batches(schedule):
    lines = {m: build(schedule, m).lower().as_text().count("\n") for m in (8, 32)}
    assert lines[8] == lines[32], f"{lines[8]} and {lines[32]} instructions with 8 and 32 micro-batches"
