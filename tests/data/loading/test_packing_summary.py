"""The log says how documents become rows, in words, and only what depends on the documents."""

import re

import pytest

import jaxtrain as jt
from jaxtrain.data.loading.batches import epochs, packing


@pytest.fixture
def run(tmp_path):
    """Build a run on eight documents of 10 to 80 bytes, packed in a given way."""
    (tmp_path / "text").mkdir()
    for n in range(1, 9):
        (tmp_path / "text" / f"{n}.txt").write_text("ten bytes " * n)
    return lambda **keys: jt.build(jt.load_config("configs/gpt.py:tiny", {
        "data.source": f"{tmp_path}/text", "data.cache_dir": f"{tmp_path}/cache", "data.eval_fraction": 0.2,
        "data.seq_len": 32, "data.global_batch_size": 1, **{f"data.{key}": value for key, value in keys.items()}}),
        devices=1)


@pytest.mark.parametrize(("how", "said"), [
    ("concat", "documents are joined end to end and cut into rows of 32 tokens"),
    ("best_fit", r"whole documents share rows of 32 tokens, which are \d+\.\d\d% full; [1-8] of [1-8] documents are "
                 "longer and cut"),
    ("bucket", r"each document is a row of [\d, ]+ tokens; rows are \d+\.\d\d% full; [1-8] of [1-8] documents are "
               "longer and cut")])
def test_how_documents_become_rows(run, how, said):
    made = run(packing=how)
    assert re.fullmatch(said, packing(made.config.data, made.corpus))


def test_parts_of_an_epoch_and_several_epochs(run):
    batches = run().batch_source
    assert re.fullmatch(r"0\.\d+ of an epoch", epochs(batches, 1))
    assert re.fullmatch(r"\d+(\.\d+)? epochs", epochs(batches, 500))
