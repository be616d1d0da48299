"""A pipeline that cannot be is refused before anything is traced, in one sentence that names the key and what to do."""

import re
from pathlib import Path

import pytest

import jaxtrain as jt
from jaxtrain.errors import UserError
from tests.numerics import reference


def build(**keys):
    """Build on an abstract mesh of 8: 16 rows on each of two devices of a stage."""
    keys = dict(mesh__fsdp=2, mesh__stage=2, mesh__tensor=2) | {
        key if "__" in key else f"pipeline__{key}": value for key, value in keys.items()}
    return jt.build(reference.tiny(**keys), devices=8)


@pytest.mark.parametrize(("keys", "key", "reason", "fix"), [
    (dict(microbatches=3), "pipeline.microbatches", "3 does not divide the 16 rows", "choose a divisor"),
    (dict(microbatches=16, train__accumulation=2), "pipeline.microbatches", "does not divide the 8 rows", "divisor"),
    (dict(microbatches=-1), "pipeline.microbatches", "-1", ""),
    (dict(microbatches=16, data__global_batch_size=33), "data.global_batch_size", "33 does not", "multiple of 2"),
    (dict(schedule="1f1c"), "pipeline.schedule", "1f1c", "did you mean '1f1b'"),
    (dict(schedule="1f1b", chunks=2), "pipeline.chunks", "1 chunk per stage, not 2", "use interleaved"),
    (dict(schedule="interleaved", chunks=1), "pipeline.chunks", "several chunks per stage, not 1", "use 1f1b"),
    (dict(schedule="zb_v", chunks=3), "pipeline.chunks", "2 chunks per stage, not 3", "set it to 2"),
    (dict(schedule="zb_h1", chunks=2), "pipeline.chunks", "1 chunk per stage, not 2", "set it to 1"),
    (dict(schedule="interleaved", chunks=5000), "pipeline.chunks", "more than there are layers", "use 2 or fewer"),
    (dict(table="none.csv"), "pipeline.table", "none.csv cannot be read", "give a CSV or JSON file"),
    (dict(train__loss_chunks=32, microbatches=16), "train.loss_chunks", "does not divide the 16 tokens", "divisor"),
    (dict(stage=2), "pipeline.stage", "", ""),
])
def test_what_cannot_be_is_refused(keys, key, reason, fix):
    with pytest.raises(UserError) as refusal:
        build(**keys)
    text = str(refusal.value)
    assert refusal.value.key == key, text
    assert reason in text and fix in text and "\n" not in text, text


def test_the_table_that_the_docs_show_says_its_own_size(tmp_path):
    docs = Path(__file__).parents[3] / "docs/parallelism.md"
    path = tmp_path / "own.csv"
    path.write_text("\ufeff" + re.search(r"```csv\n(.*?)```", docs.read_text(), re.S)[1])  # as spreadsheets write it
    run = build(table=str(path), schedule="zb_v")
    assert (run.schedules[0].microbatches, run.schedules[0].chunks, run.schedules[0].length) == (2, 1, 5)
    with pytest.raises(UserError, match=r"stage 0 never does F2.*set pipeline\.microbatches"):
        build(table=str(path), microbatches=4)


def test_a_table_for_other_micro_batches_is_refused(tmp_path):
    table = tmp_path / "own.csv"
    table.write_text("F0,,B0\n,F0+B0,\n")
    build(table=str(table), microbatches=1)
    with pytest.raises(UserError, match="stage 0 never does F1") as refusal:
        build(table=str(table), microbatches=2)
    assert refusal.value.key == "pipeline.table"


@pytest.mark.parametrize(("keys", "count"), [
    (dict(), 8), (dict(mesh__stage=4, mesh__tensor=1), 16), (dict(train__accumulation=4), 4),
    (dict(data__global_batch_size=6), 3), (dict(microbatches=2), 2)])
def test_the_number_of_micro_batches_is_chosen_by_rows_and_stages(keys, count):
    """The most that divide a device's rows, up to four for each stage."""
    train, evaluation = build(**keys).schedules
    assert train.microbatches == evaluation.microbatches == count


def test_layers_that_leave_stages_empty_or_cannot_be_spread_are_told_of():
    with pytest.warns(UserWarning, match="2 layers leave 2 of 2 stages x 2 chunks empty"):
        build(schedule="zb_v")
    keys = dict(mesh__data=1, mesh__stage=3, model__num_layers=4)
    with pytest.warns(UserWarning, match="mesh.stage: 3 divides neither the layers nor"):
        jt.build(reference.tiny(**keys), devices=3)


def test_a_run_of_abstract_devices_says_what_it_cannot():
    run = build()
    for call in (run.init, lambda: run.batch(0), lambda: run.step(None, None)):
        with pytest.raises(UserError, match="8 devices that are not here"):
            call()


def test_one_stage_needs_no_schedule():
    assert build(mesh__stage=1, mesh__data=2, table="none.csv").schedules is None
