"""Clips, images and users' events are found at the steps that have them, as a look at all batches does."""

from collections import defaultdict

import numpy as np
import pytest

from jaxtrain.commands.data import main
from jaxtrain.config.load import load_config
from jaxtrain.data.packing.image_rows import CaptionedImages, LabelledImages, PairedImages
from jaxtrain.data.tracing.inverse_batches import held, sightings
from jaxtrain.data.tracing.sequence_documents import as_documents
from jaxtrain.data.tracing.stretches import Stretch
from jaxtrain.runs.traced_run import open_traced
from tests.data.loading.test_golden_batches import images, speech
from tests.tiers import slow

STEPS = 12


def found_in(batches, count: int) -> dict:
    found = defaultdict(list)
    for one in sightings(batches, [Stretch("", number, number + 1) for number in range(count)], STEPS):
        found[one.stretch].append((one.batch, one.row, one.span.begin, one.span.end))
    return {number: sorted(some) for number, some in found.items()}


def test_clips():
    batches, expected = speech(), defaultdict(list)
    for step in range(STEPS):
        for row, number in enumerate(batches.numbers(step, range(batches.size(step)))):
            if number is not None:
                expected[number].append((step, row, 0, int(batches.rows(step, [row])["weights"].sum())))
    assert found_in(batches, 40) == expected and len(expected) == 40
    assert held(batches, Stretch("", 7, 8))


IMAGES = {"captions": (CaptionedImages, 7), "labels": (LabelledImages,), "pairs": (PairedImages, 4)}


@pytest.mark.parametrize("name", ["captions", *slow("labels", "pairs")])
def test_images(name):
    batches, expected = images(*IMAGES[name]), defaultdict(list)
    for step in range(STEPS):
        batch = batches[step]
        for row in range(4):
            numbers = batches.images.rows[batches.origin(step, row)[2]]
            for k, number in enumerate(numbers, 1):
                there = np.flatnonzero((batch["segments"] if name == "captions" else batch["images"])[row] == k)
                expected[number].append((step, row, int(there[0]), int(there[-1]) + 1))
                patches = batches.images.sequences[number]["patches"]
                assert np.array_equal(batch["patches"][row, there[0]: there[0] + len(patches)], patches)
    assert found_in(batches, 30) == {number: sorted(some) for number, some in expected.items()}


def test_users_by_number_and_place(tmp_path, capsys, monkeypatch):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from jaxtrain.data.prepare_sequences.event_streams import Events
    from jaxtrain.data.prepare_sequences.prepare_sequences import prepare_sequences

    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    for name in ("a", "b"):
        rows = [(f"{name}{user}", 60 * i, f"item{(user + i) % 7}") for user in range(40) for i in range(1 + user % 9)]
        pq.write_table(pa.table(list(map(list, zip(*rows, strict=True))), ["user", "at", "item"]),
                       tmp_path / f"{name}.parquet")
    corpus = prepare_sequences([str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")], tmp_path / "corpus",
                               Events("user", "at", ("item",), eval_fraction=0.1, task_bytes=100))
    documents = as_documents(corpus)
    assert len(documents.train) == len(corpus.train) > 40 and len(documents.train.shards) > 1
    config = load_config("configs/events.py:tiny", {
        "data.source": str(tmp_path / "corpus"), "data.global_batch_size": 4, "train.steps": STEPS})
    keys = [f"--config.data.source={tmp_path / 'corpus'}", "--config.data.global_batch_size=4",
            f"--config.train.steps={STEPS}"]
    assert main(["trace", "configs/events.py:tiny", "--document", "5", *keys]) == 0
    line, _, *steps = capsys.readouterr().out.splitlines()
    place = line.removeprefix("document 5: ")
    assert place.split()[0] in ("a.parquet", "b.parquet") and all("tokens" not in step for step in steps)
    run = open_traced("configs/events.py:tiny", {key.removeprefix("--config."): value for key, _, value in
                                                 (word.partition("=") for word in keys)})
    assert run.data == config.data
    batches = run.batches
    expected = {step for step in range(STEPS) if 5 in batches.numbers(step, range(batches.size(step)))}
    assert {one.step for one in run.seen([Stretch("", 5, 6)])[0]} == expected
    assert main(["trace", str(tmp_path / "corpus"), "--document", place]) == 0
    assert capsys.readouterr().out == f"{line}\n"
    for flag in ("--text=a", f"--eval={tmp_path / 'items.jsonl'}"):
        (tmp_path / "items.jsonl").write_text('{"a": "b"}\n')
        assert main(["trace", str(tmp_path / "corpus"), flag]) == 2
        assert "without text to search" in capsys.readouterr().err
