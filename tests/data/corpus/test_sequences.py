"""Corpora of sequences: the same to the byte for any number of workers and kills, checked when opened, and as rows."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from jaxtrain.commands.prepare_sequences import main
from jaxtrain.data import BucketedBatches, SequenceRows, open_corpus, open_sequences
from jaxtrain.data.corpus.open import BESIDE
from jaxtrain.data.corpus.sequences import FORMAT, Column, Sequences, SequenceWriter, describe
from jaxtrain.data.corpus.shard_writer import Origin
from jaxtrain.data.prepare_sequences.audio import Audio
from jaxtrain.data.prepare_sequences.event_streams import Events
from jaxtrain.data.prepare_sequences.prepare_sequences import prepare_sequences
from jaxtrain.errors import UserError
from jaxtrain.files.atomic_files import digest, write_json

ROOT = Path(__file__).parents[3]


def audio(folder: Path, clips: int = 12) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(clips):
        soundfile.write(folder / f"{i:02}.wav", rng.normal(0, 0.1, rng.integers(2000, 12_000)), 16_000)
        (folder / f"{i:02}.txt").write_text("word " * (i % 4))
    return folder


def events(folder: Path, rows: int = 600) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    table = pa.table({"user": rng.integers(0, 60, rows), "at": rng.integers(0, 999, rows),
                      "item": rng.zipf(1.5, rows) % 30, "value": rng.normal(size=rows)})
    pq.write_table(table, folder / "a.parquet", row_group_size=50)
    return folder


KINDS = {"audio": (audio, Audio("text", eval_fraction=0.2, task_bytes=40_000)),
         "events": (events, Events("user", "at", ("item",), ("value",), eval_fraction=0.2, task_bytes=4000))}


def files(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}


def entries(folder: Path) -> int:
    """Return the number of entries in a folder and below, of which some may go meanwhile."""
    return sum(len(folders) + len(names) for _, folders, names in os.walk(folder))


@pytest.mark.parametrize("kind", ["audio", pytest.param("events", marks=pytest.mark.slow)])
def test_any_number_of_workers_writes_the_same_bytes(tmp_path, kind):
    make, source = KINDS[kind]
    inputs = [str(make(tmp_path / "in"))]
    one, two = (prepare_sequences(inputs, tmp_path / str(workers), source, workers) for workers in (1, 2))
    assert files(one.path) == files(two.path) and len(one.train.shards) > 2 and len(one.eval)
    assert one.manifest_hash == two.manifest_hash == prepare_sequences(inputs, one.path, source).manifest_hash


@pytest.mark.parametrize("kind", ["audio", "events"])
@pytest.mark.parametrize("kills", [
    pytest.param(2, marks=pytest.mark.slow), pytest.param(25, marks=pytest.mark.exhaustive)])
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path, kind, kills):
    make, source = KINDS[kind]
    inputs, rng = make(tmp_path / "in"), random.Random(kills)
    want = files(prepare_sequences([str(inputs)], tmp_path / "want", source).path)
    flags = {"audio": ["--label=text"], "events": ["--user=user", "--time=at", "--category=item", "--number=value"]}
    command = [sys.executable, "-m", "jaxtrain", "prepare_sequences", kind, f"--input={inputs}", *flags[kind],
               f"--task_bytes={source.task_bytes}", "--eval_fraction=0.2", "--workers=1"]
    environment, killed, round_ = os.environ | {"PYTHONPATH": str(ROOT)}, 0, 0
    while killed < kills:
        output = tmp_path / f"out{round_}"
        process = subprocess.Popen([*command, f"--output={output}"], env=environment, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        # Not by the clock: after it has written something, so that there is something to lose.
        enough = entries(output) + rng.randint(1, 12)
        while process.poll() is None and entries(output) < enough:
            time.sleep(rng.uniform(0, 0.004))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.wait()
        round_ += (output / "manifest.json").exists() and not (output / "unfinished").exists()
    subprocess.run([*command, f"--output={output}"], env=environment, check=True, capture_output=True)
    assert files(output) == want


def test_a_rehearsal_divides_the_input_and_writes_nothing(tmp_path, capsys):
    inputs = audio(tmp_path / "in")
    assert main(["audio", f"--input={inputs}", f"--output={tmp_path / 'out'}", "--task_bytes=1", "--dry_run"]) == 0
    count = len([path for path in inputs.rglob("*") if path.suffix == ".wav"])
    assert f"{count:,} shards would be made in {tmp_path / 'out'}, of " in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["train-00000.features.bin", "train-00000.steps.offsets.npy", "manifest.json"])
def test_what_is_not_as_it_was_written_is_refused(tmp_path, name):
    corpus = prepare_sequences([str(audio(tmp_path / "in"))], tmp_path / "out", Audio(eval_fraction=0))
    path = corpus.path / name
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=name):
        open_sequences(corpus.path)
    path.unlink()
    with pytest.raises(UserError, match=name):
        open_sequences(corpus.path)


def test_a_checked_file_is_not_read_again_until_it_changes(tmp_path, monkeypatch):
    corpus = prepare_sequences([str(audio(tmp_path / "in"))], tmp_path / "out", Audio(eval_fraction=0))
    open_sequences(corpus.path, tmp_path / "cache")
    with monkeypatch.context() as blind:
        blind.setattr("jaxtrain.files.atomic_files.file_digest",
                      lambda path: pytest.fail(f"{path} is read again"))
        open_sequences(corpus.path, tmp_path / "cache")
    path = corpus.path / "train-00000.features.bin"
    stat, content = path.stat(), path.read_bytes()
    path.write_bytes(bytes(len(content)))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # which a copy may have kept
    with pytest.raises(UserError, match=r"features\.bin is corrupt"):
        open_sequences(corpus.path, tmp_path / "cache")


def test_an_output_that_is_something_else_is_refused(tmp_path):
    source = str(audio(tmp_path / "in", 2))
    prepare_sequences([source], tmp_path / "out", Audio(eval_fraction=0))
    with pytest.raises(UserError, match="another corpus"):
        prepare_sequences([source], tmp_path / "out", Audio("text", eval_fraction=0))
    with pytest.raises(UserError, match="is a corpus of sequences"):
        open_corpus(tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    with pytest.raises(UserError, match="not empty"):
        prepare_sequences([source], tmp_path / "full", Audio(eval_fraction=0))


def test_the_command_line(tmp_path, capsys):
    assert main(["events", f"--input={events(tmp_path / 'in')}", f"--output={tmp_path / 'out'}", "--user=user",
                 "--time=at", "--category", "item", "--workers=1"]) == 0
    said = capsys.readouterr().out
    assert "item i4 per step" in said and "60 sequences" in said and "% padding" in said
    for words, reason in ((["events", "--input=x", "--output=y"], "--user"), (["video"], "invalid choice"),
                          (["audio", "--input=x", "--output=y", "--workers=-1"], "--workers"),
                          (["audio", "--input=x", "--output=y", "--workers=0"], "--workers")):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert reason in error and error.count("\n") == 1


# -------------------------------------------------------------------------------------------------------- what is read
COLUMNS = {"x": Column("<f2", (3,)), "id": Column("<i4"), "label": Column("<i4", per="sequence"),
           "words": Column("<i4", per="own")}


def random_sequences(seed: int, count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, count)
    return [{"x": rng.normal(size=(n, 3)).astype("f2"), "id": rng.integers(0, 99, n).astype("i4"),
             "label": rng.integers(0, 5, 1).astype("i4"), "words": rng.integers(1, 9, rng.integers(0, 5)).astype("i4")}
            for n in lengths]


def written(folder: Path, some: list[dict[str, np.ndarray]], shards: int) -> Sequences:
    """Through the files, in so many shards."""
    folder.mkdir()
    entries = []
    for i, part in enumerate(np.array_split(np.arange(len(some)), shards)):
        writer = SequenceWriter(folder / f"train-{i:05}", COLUMNS)
        for k in part:
            writer.add(some[k], bytes(16), Origin(0, int(k)))
        entries.append(writer.close())
    splits = {"train": {"shards": entries}, "eval": {"shards": []}}
    manifest = {"format": FORMAT, "columns": describe(COLUMNS), "splits": splits}
    write_json(folder / "manifest.json", manifest | {"sha256": digest(manifest)})
    return open_sequences(folder).train


@pytest.mark.parametrize("shards", [1, 4])
def test_what_was_written_is_read(tmp_path, shards):
    some = random_sequences(0, 11)
    sequences = written(tmp_path / "a", some, shards)
    assert len(sequences) == 11 and len(sequences.shards) == shards
    for want, got in zip(some, sequences, strict=True):
        assert all(np.array_equal(got[name], want[name]) and got[name].dtype == want[name].dtype for name in COLUMNS)
    assert sequences.counts().tolist() == [len(one["id"]) for one in some]
    assert sequences.counts("words").tolist() == [len(one["words"]) for one in some]
    for i in (-1, 11):
        with pytest.raises(IndexError):
            sequences[i]


def test_rows_are_padded_and_what_is_padded_has_no_weight(tmp_path):
    some = random_sequences(1, 9)
    rows = SequenceRows(written(tmp_path / "a", some, 2))
    most = max(len(one["words"]) for one in some)
    for i, one in enumerate(some):
        row, n = rows.row(i, 12), len(one["id"])
        assert {name: column.shape for name, column in row.items()} == {
            "x": (12, 3), "id": (12,), "label": (), "words": (most,), "weights": (12,), "words_weights": (most,)}
        assert np.array_equal(row["x"][:n], one["x"]) and not row["x"][n:].any() and row["x"].dtype == np.float16
        assert row["weights"].tolist() == [1] * n + [0] * (12 - n)
        assert row["words"][row["words_weights"] == 1].tolist() == one["words"].tolist()
        assert row["label"] == one["label"][0] and not row["words"][row["words_weights"] == 0].any()
    row["x"][:] = 0  # its own memory
    assert np.array_equal(rows.row(8, 12)["x"][: len(some[8]["x"])], some[8]["x"])


def test_sequences_longer_than_wanted_are_refused_or_cropped(tmp_path):
    sequences = written(tmp_path / "a", random_sequences(2, 20), 1)
    longest = int(sequences.counts().max())
    assert SequenceRows(sequences, longest).lengths.max() == longest
    with pytest.raises(UserError, match=rf"have more than {longest - 1} steps, the longest {longest}; .*crop=True"):
        SequenceRows(sequences, longest - 1)
    cropped = SequenceRows(sequences, 3, crop=True)
    row = cropped.row(int(sequences.counts().argmax()), 3)
    assert cropped.lengths.max() == 3 and row["weights"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_bucketed_sequences_for_any_number_of_processes(tmp_path, processes):
    some = random_sequences(3, 50)
    sequences = written(tmp_path / "a", some, 3)
    batches = BucketedBatches(SequenceRows(sequences), buckets=[3, 6, 8], global_batch_size=8, seed=1, repeat=False)
    seen = []
    for step in range(batches.num_batches):
        parts = [batches.rows(step, range(p, 8, processes)) for p in range(processes)]
        whole = batches[step]
        for name, column in whole.items():
            assert all(np.array_equal(part[name], column[p::processes]) for p, part in enumerate(parts))
        for row in range(8):
            n = int(whole["weights"][row].sum())
            seen += [whole["x"][row][:n].tobytes()] * (n > 0)
    assert sorted(seen) == sorted(one["x"].tobytes() for one in some)  # each once, padding not at all


@pytest.mark.parametrize("change", [
    lambda m: m.update(columns=None), lambda m: m.update(splits=None), lambda m: m["splits"].update(train=None),
    *(lambda m, said=said: m["columns"]["features"].update(said) for said in (
        {"dtype": "x"}, {"dtype": "O"}, {"dtype": None}, {"shape": None}, {"shape": [-1]}, {"per": "row"})),
    lambda m: m["splits"]["train"]["shards"][0].update(sequences=None),
    lambda m: m["splits"]["train"]["shards"][0].update(sequences=10**9),
])
def test_a_manifest_of_another_form_is_one_line(tmp_path, change):
    corpus = prepare_sequences([str(audio(tmp_path / "in", 2))], tmp_path / "out", Audio(eval_fraction=0))
    manifest = json.loads((corpus.path / "manifest.json").read_text())
    change(manifest)
    manifest["sha256"] = digest({key: value for key, value in manifest.items() if key not in BESIDE})
    (corpus.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"data\.source: "):
        open_sequences(corpus.path)
