"""The batches of every kind of packing, mixture, stage, bucket and modality keep the bits that earlier versions gave.

A digest changes only with a reason that `docs/decisions.md` gives: the runs of weeks that resume would see other data.
"""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from jaxtrain.config.modality_families import WhisperConfig
from jaxtrain.config.schema import DataConfig
from jaxtrain.data.corpus.corpus import Corpus, Shard, Tokens
from jaxtrain.data.corpus.sequences import Column, Sequences, SequenceShard
from jaxtrain.data.loading.batch_spec import SEQ, Array
from jaxtrain.data.loading.batches import eval_batches, train_batches
from jaxtrain.data.loading.island_part import island_batches
from jaxtrain.data.loading.modalities.image_batches import ImageBatches
from jaxtrain.data.loading.modalities.sequence_batches import sequence_batches
from jaxtrain.data.loading.modalities.spec_augment import augmented
from jaxtrain.data.loading.skipped_batches import SkippedBatches, remaining
from jaxtrain.data.packing.image_rows import CaptionedImages, LabelledImages, PairedImages
from jaxtrain.data.tokenizers.tokenizer import ByteTokenizer

FAR = 10**6 + 3
STAGES = [{"from_step": 5, "seq_len": 8, "global_batch_size": 16}, {"from_step": 9, "weights": {"a": 1, "b": 3}},
          {"from_step": 12, "new_epoch": True}]
MIXTURE = {"a": {"source": "a", "weight": 2}, "b": {"source": "b", "weight": 1}}
EARLIER = {"images": "pictures"}  # arrays that had another name when these digests were taken
DIGESTS = {
    "concat": "94a8dc6bf34a6873",
    "concat, masked": "0d116ebfcd7bc564",
    "concat, spared": "94a8dc6bf34a6873",
    "concat, threads": "94a8dc6bf34a6873",
    "concat, evaluated": "95b73419db9c5678",
    "best_fit": "490296299d3b1f05",
    "best_fit, evaluated": "48c8a7938a060fba",
    "pairs": "284e4875fab4ec9e",
    "answers": "9185576a1956fef7",
    "bucket": "2d4b9fc9bfe1360d",
    "bucket, lengths chosen": "e1197f67889f19f6",
    "mixture": "7c939a278048239f",
    "mixture, best_fit": "cd99a397eb33bbdf",
    "mixture, stages": "6fe12400eee367d8",
    "mixture, limited": "3a9785eb23d4b274",
    "island": "9e9e9c4bd2584e8a",
    "skipped": "c3fe30684f050e72",
    "speech": "8f7f1a5d75a6e1ef",
    "images": "b44d299ab408bc22",
    "images, augmented": "e4d45ea66011b426",
    "images, captioned": "7517f55fc4a5c444",
    "images, paired": "bd2bc2d93928b942",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path))


def tokens(seed: int, marks=None) -> Tokens:
    """90 documents in three shards; `marks`: the kinds of marks of trained tokens, the first behind half of each."""
    rng, shards = np.random.RandomState(seed), []
    for _ in range(3):
        documents = [np.append(rng.randint(0, 250, rng.randint(2, 40)), 256) for _ in range(30)]
        trained = marks and np.concatenate([
            np.repeat([0, marks[i % len(marks)]], (len(each) // 2, len(each) - len(each) // 2))
            for i, each in enumerate(documents)]).astype(np.uint8)
        shards.append(Shard(np.concatenate(documents).astype(np.uint16), np.cumsum([0, *map(len, documents)]), trained))
    return Tokens(tuple(shards), 1)


def corpus(seed=0, marks=None, **keys) -> Corpus:
    return Corpus(tokens(seed, marks), tokens(seed + 1, marks), ByteTokenizer(), f"golden {seed} {marks}", None, **keys)


def mixed() -> Corpus:
    return Corpus(tokens(0), tokens(1), ByteTokenizer(), "golden all", None,
                  parts={name: corpus(seed) for seed, name in ((2, "a"), (4, "b"))})


def config(**keys) -> DataConfig:
    return DataConfig(**{"seq_len": 16, "global_batch_size": 8, "seed": 3} | keys)


def sequences(**columns: Column) -> Sequences:
    """40 sequences of up to 30 steps."""
    rng = np.random.RandomState(7)
    counts = {"steps": rng.randint(1, 31, 40), None: np.ones(40, int),
              **{name: rng.randint(1, 6, 40) for name, column in columns.items() if column.per == "own"}}
    made = {name: column.array(rng.randint(0, 200, (counts[column.offsets(name)].sum(), *column.shape)))
            for name, column in columns.items()}
    offsets = {name: np.cumsum([0, *count]) for name, count in counts.items() if name}
    return Sequences(columns, (SequenceShard(made, offsets),))


def speech():
    heard = sequences(features=Column("float16", (80,)), target=Column("int32", per="own"))
    arrays = {"features": Array(np.float16, (SEQ, 80)), "weights": Array(np.float32), "target": Array(np.int32, (6,)),
              "target_weights": Array(np.float32, (6,))}
    whole = SimpleNamespace(train=heard, eval=heard, manifest={})
    batches = sequence_batches(config(packing="bucket", seq_len=30, buckets=[8, 16, 30]), whole, "train", arrays)
    return augmented(batches, WhisperConfig(time_masks=2, mel_masks=1), seed=3)


def images(kind=LabelledImages, *more, **keys) -> ImageBatches:
    """Rows of up to three images of whole patches, 2 x 2 pixels each."""
    rng, columns = np.random.RandomState(5), {
        "patches": Column("uint8", (12,)), "places": Column("int32", (2,)), "label": Column("int32", per="sequence"),
        "target": Column("int32", per="own")}
    sizes = rng.randint(1, 5, (30, 2))
    places = np.concatenate([np.argwhere(np.ones(size)) for size in sizes.tolist()]).astype(np.int32)
    texts = rng.randint(0, 6, 30)
    drawn = {"patches": rng.randint(0, 256, (len(places), 12)).astype(np.uint8), "places": places,
             "label": rng.randint(0, 9, 30).astype(np.int32),
             "target": rng.randint(0, 99, texts.sum()).astype(np.int32)}
    offsets = {"steps": np.cumsum([0, *sizes.prod(1)]), "target": np.cumsum([0, *texts])}
    rows = kind(Sequences(columns, (SequenceShard(drawn, offsets),)), 32, 3, *more)
    return ImageBatches(rows, global_batch_size=4, seed=3, **keys)


CASES = {
    "concat": lambda: train_batches(config(), corpus()),
    "concat, masked": lambda: train_batches(config(), corpus(marks=(1, 0))),
    "concat, spared": lambda: train_batches(config(corrupt="skip_and_count"), corpus()),
    "concat, threads": lambda: train_batches(config(), corpus(threads=3)),
    "concat, evaluated": lambda: eval_batches(config(), corpus()),
    "best_fit": lambda: train_batches(config(packing="best_fit"), corpus()),
    "best_fit, evaluated": lambda: eval_batches(config(packing="best_fit"), corpus()),
    "pairs": lambda: train_batches(config(packing="pairs", seq_len=64), corpus(marks=(1,), pairs=True)),
    "answers": lambda: train_batches(config(packing="answers", seq_len=64), corpus(marks=(1, 2, 1), labelled=True)),
    "bucket": lambda: train_batches(config(packing="bucket", buckets=[4, 9, 16]), corpus()),
    "bucket, lengths chosen": lambda: train_batches(config(packing="bucket"), corpus()),
    "mixture": lambda: train_batches(config(mixture=MIXTURE), mixed()),
    "mixture, best_fit": lambda: train_batches(config(mixture=MIXTURE, packing="best_fit"), mixed()),
    "mixture, stages": lambda: train_batches(config(mixture=MIXTURE, stages=STAGES), mixed()),
    "mixture, limited": lambda: train_batches(
        config(mixture={name: one | {"epochs": 1.5} for name, one in MIXTURE.items()}), mixed()),
    "island": lambda: island_batches(config(), corpus(), 1, 3),
    "skipped": lambda: remaining(train_batches(config(), corpus()), SkippedBatches((2, 3, 7))),
    "speech": speech,
    "images": images,
    "images, augmented": lambda: images(augment=("flip", "crop", "colour"), noise=True),
    "images, captioned": lambda: images(CaptionedImages, 99, augment=("flip",)),
    "images, paired": lambda: images(PairedImages, 6),
}


def digest(batches) -> str:
    """Return a digest of names, dtypes, shapes and bytes of some batches, of some rows, and of what is told of them."""
    found, end = hashlib.sha256(), batches.num_batches
    for step in (*range(16), 77, FAR):
        if end is not None and step >= end:
            continue
        for batch in (batches[step], batches.rows(step, [2, 1])):
            for earlier, name in sorted((EARLIER.get(name, name), name) for name in batch):
                column = np.ascontiguousarray(batch[name])
                found.update(f"{earlier} {column.dtype.str} {column.shape}".encode() + column.tobytes())
        found.update(f"{batches.shape(step)} {batches.tokens(step)} {batches.epochs(step)}".encode())
    found.update(f"{end} {batches.shapes_of(0, 16)}".encode())
    return found.hexdigest()[:16]


@pytest.mark.parametrize("name", CASES)
def test_batches_are_those_of_earlier_versions(name):
    assert digest(CASES[name]()) == DIGESTS[name]
