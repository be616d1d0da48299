"""Corrupt shards: refused and named, or the rows that need them carry no loss and all others are what they were."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxtrain import storage
from jaxtrain.config.schema import DataConfig
from jaxtrain.data import load_corpus
from jaxtrain.data.corpus.corruption import Lost, SparedRows
from jaxtrain.data.corpus.shard_writer import CHUNK
from jaxtrain.data.loading.batches import rows, train_batches
from jaxtrain.errors import UserError
from tests.data import made
from tests.tiers import slow_if

TOKENS = 1_300_000  # in a shard: ids are in chunks of 2**19, marks in chunks of 2**20


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return made.corpus(tmp_path_factory.mktemp("made") / "corpus")


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


# What is done to a file of the second shard, and which of that shard's tokens cannot be read after it.
HARM = {
    "a byte of the ids": (lambda folder: flip(folder / "train-00001.bin", CHUNK + 7), (2**19, 2**20)),
    "the last byte of the ids": (lambda folder: flip(folder / "train-00001.bin", 2 * TOKENS - 1), (2**20, TOKENS)),
    "a byte of the marks": (lambda folder: flip(folder / "train-00001.trained.bin", 7), (0, 2**20)),
    "ids cut off": (lambda folder: (folder / "train-00001.bin").write_bytes(
        (folder / "train-00001.bin").read_bytes()[:CHUNK + 7]), (2**19, TOKENS)),
    "ids gone": (lambda folder: (folder / "train-00001.bin").unlink(), (0, TOKENS)),
    "marks empty": (lambda folder: (folder / "train-00001.trained.bin").write_bytes(b""), (0, TOKENS)),
}


@pytest.fixture
def place(request, where, whole):
    """harmed folder -> where a run would read it."""
    if where == "here":
        return lambda folder, harm: (harm(folder), str(folder))[1]
    bucket = request.getfixturevalue("bucket")

    def there(folder, harm):
        made.send(whole, f"{bucket}/c")
        harm(folder)
        fs = storage._connected("s3")
        for name in ("train-00001.bin", "train-00001.trained.bin"):
            fs.rm_file(f"{bucket}/c/{name}")
            if (folder / name).exists():
                storage.put(folder / name, f"{bucket}/c/{name}")
        return f"{bucket}/c"

    return there


def config(source, tmp_path, **keys) -> DataConfig:
    return DataConfig(**{"source": str(source), "cache_dir": str(tmp_path / "cache"), "seq_len": 4096, **keys})


# Of what happens to objects: a chunk with other bytes, an object that is too short, and none.
THERE = ("a byte of the marks", "ids cut off", "ids gone")
LOST = [*(("concat", harm) for harm in HARM), ("best_fit", "a byte of the ids"), ("best_fit", "ids gone")]


@pytest.mark.parametrize(("where", "packing", "harm"), [
    *(("here", *case) for case in LOST),
    *(pytest.param("there", *case, marks=slow_if(
        case in (("concat", "a byte of the marks"), ("concat", "ids cut off"), ("best_fit", "ids gone"))))
      for case in LOST)])
def test_rows_that_touch_what_is_lost_carry_no_loss_and_others_stay(place, whole, tmp_path, harm, packing):
    harmed = Path(shutil.copytree(whole, tmp_path / "harmed"))
    do, (first, last) = HARM[harm]
    source = place(harmed, do)
    good = config(whole, tmp_path, packing=packing)
    bad = config(source, tmp_path, packing=packing, corrupt="skip_and_count")
    with pytest.warns(UserWarning) as warned:
        there = load_corpus(bad)
        want, found = rows(good, load_corpus(good), "train"), rows(bad, there, "train")
        assert len(want) == len(found)
        lost = set()
        for i in range(len(want)):
            row = found[i]
            assert {key: (value.dtype, value.shape) for key, value in row.items()} == {
                key: (value.dtype, value.shape) for key, value in want[i].items()}
            if not row["segments"].any():
                lost.add(i)
                assert not row["weights"].any() and not row["positions"].any()
                assert (row["tokens"] == 256).all() and (row["targets"] == 256).all()
            else:
                assert all(np.array_equal(row[key], want[i][key]) for key in row)
    assert found.lost == lost == touching(want, first + TOKENS, last + TOKENS) and 0 < len(lost) < len(want)
    assert there.train.lost == last - first and there.eval.lost == 0
    said = [str(warning.message) for warning in warned]
    counts = [line for line in said if line.endswith(f" of {len(want)} rows carry no loss, so far")]
    assert [int(line.split()[1]) for line in counts] == [2**i for i in range(len(lost).bit_length())]
    named = [line for line in said if "is corrupt" in line]
    assert len(named) == 1 and f"{source}/train-00001." in named[0] and f"of its {TOKENS:,} tokens" in named[0]


def touching(rows, first: int, last: int) -> set[int]:
    """Return the rows that read a token of [first, last): their inputs and the target behind them."""
    if hasattr(rows, "plan"):
        pieces = [rows.plan.pieces(np.array([i])) for i in range(len(rows))]
        return {i for i, (_, starts, lengths) in enumerate(pieces)
                if ((starts < last) & (starts + lengths + 1 > first)).any()}
    return {i for i in range(len(rows)) if i * 4096 < last and i * 4096 + 4097 > first}


def test_a_document_a_row_may_be_lost(whole, tmp_path):
    harmed = Path(shutil.copytree(whole, tmp_path / "harmed"))
    flip(harmed / "train-00000.bin", 5)
    good = config(whole, tmp_path, packing="bucket", global_batch_size=4)
    bad = config(harmed, tmp_path, packing="bucket", global_batch_size=4, corrupt="skip_and_count")
    with pytest.warns(UserWarning, match="is corrupt"):
        want, found, lost = train_batches(good, load_corpus(good)), train_batches(bad, load_corpus(bad)), 0
        for step in range(30):
            before, after = want[step], found[step]
            for i in range(4):
                empty = not after["segments"][i].any()
                lost += empty
                assert not after["weights"][i].any() if empty else all(
                    np.array_equal(after[key][i], before[key][i]) for key in before)
    assert 0 < lost < 60


def test_batches_keep_their_order(whole, tmp_path):
    harmed = Path(shutil.copytree(whole, tmp_path / "harmed"))
    flip(harmed / "train-00000.bin", 5)
    good, bad = config(whole, tmp_path), config(harmed, tmp_path, corrupt="skip_and_count")
    with pytest.warns(UserWarning, match="train-00000.bin is corrupt, 524,288 of its 1,300,000 tokens"):
        corpus = load_corpus(bad)
    want, found, lost = train_batches(good, load_corpus(good)), train_batches(bad, corpus), 0
    for step in range(20):
        before, after = want[step], found[step]
        for i in range(16):
            empty = not after["segments"][i].any()
            lost += empty
            assert empty or all(np.array_equal(after[key][i], before[key][i]) for key in before)
    assert 0 < lost < 160


@pytest.mark.parametrize(("where", "harm"), [
    *(("here", harm) for harm in HARM), *(pytest.param("there", harm, marks=slow_if(harm in THERE)) for harm in HARM)])
def test_by_default_a_corrupt_file_is_refused_and_named(place, whole, tmp_path, harm):
    harmed = Path(shutil.copytree(whole, tmp_path / "harmed"))
    source = place(harmed, HARM[harm][0])
    with pytest.raises(UserError) as caught:
        batches = train_batches(config(source, tmp_path), load_corpus(config(source, tmp_path)))
        for step in range(10):
            batches[step]
    assert f"{source}/train-00001." in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("data.source: ")


def test_what_is_there_but_not_for_us_is_not_taken_for_corrupt(whole, tmp_path, monkeypatch):
    plain = open

    def closed(path, *args, **keys):
        if str(path).endswith("train-00001.bin"):
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, *args, **keys)

    monkeypatch.setattr("builtins.open", closed)
    for corrupt in ("fail", "skip_and_count"):
        with pytest.raises(UserError, match=r"train-00001\.bin cannot be read \(Permission denied\)"):
            load_corpus(config(whole, tmp_path, corrupt=corrupt))


def test_a_chunk_that_arrives_corrupt_once_is_fetched_again(network, bucket, whole, tmp_path):
    made.send(whole, f"{bucket}/c")
    there = config(f"{bucket}/c", tmp_path, corrupt="skip_and_count")
    corpus = load_corpus(there)
    network.calm()
    network.fault = lambda number, *_: "flipped" if number % 2 == 0 else ""
    good = config(whole, tmp_path)
    want, found = rows(good, load_corpus(good), "train"), rows(there, corpus, "train")
    assert all(np.array_equal(want[i]["tokens"], found[i]["tokens"]) for i in range(0, len(want), 20))
    assert len(network.faults) > 5 and not found.lost and not corpus.train.lost


@pytest.mark.parametrize("name", ["train-00001.offsets.npy", "train-00000.keys.npy", "train-00000.origins.npy"])
def test_what_is_not_tokens_is_refused_in_any_case(whole, tmp_path, name):
    harmed = Path(shutil.copytree(whole, tmp_path / "harmed"))
    flip(harmed / name, 200)
    for corrupt in ("fail", "skip_and_count"):
        with pytest.raises(UserError, match=f"{name} is corrupt"):
            load_corpus(config(harmed, tmp_path, corrupt=corrupt))


@pytest.mark.parametrize(("keys", "words"), [
    ({"corrupt": "skip"}, "data.corrupt: 'skip' is not supported; did you mean 'skip_and_count'?"),
    ({"cache_bytes": 1000}, "data.cache_bytes: 1000 is below 1,048,576; give 1,048,576 or more")])
def test_values_that_cannot_be_are_refused(keys, words):
    with pytest.raises(UserError) as caught:
        DataConfig(**keys)
    assert words in str(caught.value)


@pytest.mark.parametrize("whole_length", [40, 5000])
def test_a_source_that_is_corrupt_all_over_is_refused(whole_length):
    """Object storage shows this when rows are read, unlike files of this machine."""

    class Corrupt(list):
        def __len__(self):
            return whole_length

        def __getitem__(self, i):
            raise Lost("train-00000.bin")

    found = SparedRows(Corrupt(), 8, 256)
    for _ in range(2):
        found[0]  # asked for its shape
    with pytest.warns(UserWarning, match="rows carry no loss, so far"), pytest.raises(
            UserError, match=r"^data.source: all [0-9]+ rows that were read are corrupt; prepare the corpus again"):
        for start in range(0, 5000, 10):
            found.take(range(start, start + 10))
    assert min(1000, whole_length) - 10 < len(found.lost) <= min(1000, whole_length)
