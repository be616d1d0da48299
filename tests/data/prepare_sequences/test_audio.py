"""Clips to log-mel frames, compared with the definition written out, and what may belong to a clip."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import soxr

from jaxtrain import storage
from jaxtrain.data.formats import inputs
from jaxtrain.data.prepare_sequences import audio
from jaxtrain.data.prepare_sequences.audio import BLOCK, Audio, log_mel
from jaxtrain.data.prepare_sequences.prepare_sequences import prepare_sequences
from jaxtrain.errors import UserError


def by_definition(samples: np.ndarray) -> np.ndarray:
    """One frame and one band at a time, with a Fourier transform written as a sum."""
    # Slaney's scale: 200/3 Hz a mel below 1 kHz, then 27 mels for each factor 6.4
    def to_hz(mel):
        return mel * 200 / 3 if mel < 15 else 1000 * np.exp((mel - 15) * np.log(6.4) / 27)

    top = 15 + np.log(8000 / 1000) / (np.log(6.4) / 27)
    corners = [to_hz(top * k / 81) for k in range(82)]
    padded = np.concatenate([samples[200:0:-1], samples, samples[-2:-202:-1]])
    window = [0.5 * (1 - np.cos(2 * np.pi * n / 400)) for n in range(400)]
    k, n = np.arange(201)[:, None], np.arange(400)[None]
    waves = np.exp(-2j * np.pi * k * n / 400)
    logs = np.zeros((len(samples) // 160, 80))
    for frame in range(len(logs)):
        power = np.abs(waves @ (padded[frame * 160: frame * 160 + 400] * window)) ** 2
        for band in range(80):
            low, centre, high = corners[band: band + 3]
            total = 0.0
            for bin in range(201):
                hz = bin * 40
                rise = (hz - low) / (centre - low) if low < hz <= centre else 0
                fall = (high - hz) / (high - centre) if centre < hz < high else 0
                total += power[bin] * (rise + fall) * 2 / (high - low)
            logs[frame, band] = np.log10(max(total, 1e-10))
    return (np.maximum(logs, logs.max() - 8) + 4) / 4


def clip(seconds: float, seed: int = 0, rate: int = 16_000, noise: float = 0.01) -> np.ndarray:
    """A chirp in noise."""
    t = np.arange(int(seconds * rate)) / rate
    return 0.5 * np.sin(2 * np.pi * (200 + 900 * t) * t) + noise * np.random.default_rng(seed).normal(size=len(t))


@pytest.mark.parametrize("samples", [clip(0.3), clip(0.2)[:3199], np.zeros(1000), clip(0.1) * 1e-4,
                                     np.append(clip(0.1), np.zeros(2000))],
                         ids=["chirp", "odd", "silence", "quiet", "ends"])
def test_frames_are_those_of_the_definition(samples):
    got, want = log_mel(samples), by_definition(samples)
    assert got.shape == want.shape == (len(samples) // 160, 80) and got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_a_tone_is_in_its_band():
    for hz, band in ((500, 13), (1000, 26), (4000, 61)):  # by the scale: corners of 0 and 8 kHz, 82 of them
        frames = log_mel(np.sin(2 * np.pi * hz * np.arange(16_000) / 16_000))
        assert abs(int(np.median(frames.argmax(1))) - band) <= 1


def test_a_long_clip_is_done_in_blocks_of_the_same_frames():
    long = np.random.default_rng(0).normal(size=(BLOCK + 50) * 160)
    frames = log_mel(long)
    assert len(frames) == BLOCK + 50
    around = log_mel(long[(BLOCK - 20) * 160: (BLOCK + 20) * 160])
    np.testing.assert_allclose(frames[BLOCK - 18: BLOCK + 18], around[2:38], atol=1e-5)


def test_too_short_is_no_frame():
    assert log_mel(np.ones(159)).shape == (0, 80) and log_mel(np.ones(160)).shape == (1, 80)


def write(path: Path, samples: np.ndarray, rate: int = 16_000, text: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.round(samples * 32767).astype(np.int16), rate)
    if text is not None:
        path.with_suffix(".txt").write_text(text)


def test_a_clip_has_the_same_features_in_any_file(tmp_path):
    """WAV, FLAC, two channels, another rate."""
    write(tmp_path / "a.wav", clip(0.5))
    write(tmp_path / "b.flac", clip(0.5))
    write(tmp_path / "c.wav", np.stack([clip(0.5), np.zeros(8000)], 1))
    write(tmp_path / "d.wav", clip(0.5, noise=0))
    write(tmp_path / "e.wav", clip(0.5, rate=48_000, noise=0), 48_000)
    corpus = prepare_sequences([str(tmp_path)], tmp_path / "out", Audio(eval_fraction=0))
    wav, flac, stereo, clean, resampled = [np.float32(row["features"]) for row in corpus.train]
    assert wav.shape == (50, 80) and np.array_equal(wav, flac)
    np.testing.assert_allclose(wav, log_mel(soundfile.read(tmp_path / "a.wav")[0]), atol=1e-3)
    loud = wav > 0.3
    np.testing.assert_allclose(stereo[loud], wav[loud] - np.log10(4) / 4, atol=2e-3)  # half as loud
    assert resampled.shape == clean.shape and np.abs(resampled - clean)[clean > 0.3].mean() < 0.01


def test_what_is_said_may_lie_beside_a_clip_or_be_its_folder(tmp_path):
    for i, text in enumerate(["yes", " no \n", "yés"]):
        write(tmp_path / "in" / ("even" if i % 2 == 0 else "odd") / f"{i}.wav", clip(0.1, i), text=text)
    said = prepare_sequences([str(tmp_path / "in")], tmp_path / "said", Audio("text", eval_fraction=0)).train
    assert [bytes(row["target"].tolist()).decode() for row in said] == ["yes", "yés", "no"]
    named = prepare_sequences([str(tmp_path / "in")], tmp_path / "named", Audio("folder", eval_fraction=0))
    assert named.manifest["labels"] == ["even", "odd"] and [int(row["label"][0]) for row in named.train] == [0, 0, 1]


def test_what_cannot_be_read_is_left_out_and_counted(tmp_path):
    write(tmp_path / "in/a.wav", clip(0.1))
    write(tmp_path / "in/short.wav", clip(0.1)[:100])
    (tmp_path / "in/broken.flac").write_bytes(b"fLaC, but no more")
    corpus = prepare_sequences([str(tmp_path / "in")], tmp_path / "out", Audio(eval_fraction=0))
    assert len(corpus.train) == 1
    assert corpus.manifest["left_out"] == {"not readable as audio": 1, "shorter than a frame": 1}


def test_a_damaged_clip_or_one_without_a_transcript_costs_only_itself(tmp_path):
    whole, into = clip(0.5), tmp_path / "in"
    for name in ("whole", "cut", "piped", "alone", "off"):
        write(into / f"{name}.wav", whole, text=None if name == "alone" else name)
    content = (into / "cut.wav").read_bytes()
    (into / "off.wav").write_bytes(content[:-2])
    at = content.index(b"data") + 4
    tags = b"LIST" + (5).to_bytes(4, "little") + b"title\0"  # an odd length, after which there is one byte more
    (into / "cut.wav").write_bytes(content[:at - 4] + tags + content[at - 4:3000])  # libsndfile returns what is left
    (into / "piped.wav").write_bytes(content[:at] + b"\xff" * 4 + content[at + 4:])  # as ffmpeg writes to a pipe
    soundfile.write(into / "nan.wav", np.append(whole, np.nan), 16_000, subtype="FLOAT")
    (into / "nan.txt").write_text("nan")
    (into / "empty.wav").touch()
    (into / "empty.txt").write_text("empty")
    corpus = prepare_sequences([str(into)], tmp_path / "out", Audio("text", eval_fraction=0))
    said = {bytes(row["target"].tolist()).decode(): len(row["features"]) for row in corpus.train}
    assert said == {"whole": 50, "piped": 50, "off": 49}
    assert corpus.manifest["left_out"] == {
        "a clip without a transcript": 1, "cut off: its header announces more": 1, "not readable as audio": 1,
        "damaged: samples that are not finite numbers": 1}


def test_rows_of_parquet_without_audio_or_transcript_are_left_out(tmp_path):
    write(tmp_path / "a.wav", clip(0.1))
    content = (tmp_path / "a.wav").read_bytes()
    pq.write_table(pa.table({"audio": [content, None, content], "text": ["yes", "no", None]}), tmp_path / "A.PARQUET",
                   row_group_size=1)
    corpus = prepare_sequences([f"{tmp_path}/A.PARQUET"], tmp_path / "out", Audio("text", eval_fraction=0))
    assert [bytes(row["target"].tolist()) for row in corpus.train] == [b"yes"]
    assert corpus.manifest["left_out"] == {"a row without audio": 1, "a clip without a transcript": 1}
    for column, value, message in (("audio", {"bytes": None, "path": "a.wav"}, "--audio_field: row 0 of .* no bytes"),
                                   ("text", 5, "--text_field: row 0 of b.parquet has no text")):
        pq.write_table(pa.Table.from_pylist([{"audio": content, "text": "yes"} | {column: value}]),
                       tmp_path / "b.parquet")
        with pytest.raises(UserError, match=message):
            prepare_sequences([f"{tmp_path}/b.parquet"], tmp_path / f"no-{column}", Audio("text"))


def test_clips_without_transcripts_beside_an_archive_with_them_are_left_out(tmp_path):
    """Only where all of the input are clips, and none has a transcript, is that a mistake."""
    write(tmp_path / "in/a.wav", clip(0.1))
    (tmp_path / "b.txt").write_text("b")
    with tarfile.open(tmp_path / "in/b.tar", "w") as archive:
        archive.add(tmp_path / "in/a.wav", "b.wav")
        archive.add(tmp_path / "b.txt", "b.txt")
    corpus = prepare_sequences([f"{tmp_path}/in"], tmp_path / "out", Audio("text", eval_fraction=0))
    assert [bytes(row["target"].tolist()) for row in corpus.train] == [b"b"]
    assert corpus.manifest["left_out"] == {"a clip without a transcript": 1}


def test_the_beginning_of_a_file_says_what_all_of_it_does(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(500), 900)
    soundfile.write(tmp_path / "b.wav", np.zeros(500), 16_000)
    (tmp_path / "c.wav").write_bytes(b"RIFF")
    pieces = inputs.find_pieces([f"{tmp_path}"], 2**62, ends=".wav")
    reasons = ["a sampling rate of 900 Hz", "", "not readable as audio"]
    assert [audio.unusable(piece) for piece in pieces] == reasons
    assert [samples for samples in (audio.samples_of(piece, 1) for piece in pieces)
            if isinstance(samples, str)] == [reason for reason in reasons if reason]
    (tmp_path / "a.wav").unlink()
    with pytest.raises(UserError, match=r"a\.wav cannot be read"):  # one that is there, but not to be read, likewise
        audio.unusable(pieces[0])


def test_what_is_not_there_for_now_is_not_left_out(tmp_path):
    write(tmp_path / "in/a.wav", clip(0.1), text="x")
    source = Audio("text")
    task, = source.find_tasks([str(tmp_path / "in")])
    for name in ("a.txt", "a.wav"):
        (tmp_path / "in" / name).unlink()
        with pytest.raises(UserError, match=rf"{name} cannot be read"):
            list(source.read(0, task, tmp_path, {}))


def test_a_text_that_changed_while_unfinished_is_read_again(tmp_path):
    def killed(line):
        if line.startswith("sequences: 1 of 1"):  # before the manifest
            raise ZeroDivisionError

    write(tmp_path / "in/a.wav", clip(0.1), text="old")
    with pytest.raises(ZeroDivisionError):
        prepare_sequences([str(tmp_path / "in")], tmp_path / "out", Audio("text", eval_fraction=0), say=killed)
    (tmp_path / "in/a.txt").write_text("new")
    corpus = prepare_sequences([str(tmp_path / "in")], tmp_path / "out", Audio("text", eval_fraction=0))
    assert bytes(corpus.train[0]["target"].tolist()) == b"new"


def test_equal_clips_are_in_one_split_whatever_is_said_of_them(tmp_path):
    for i in range(24):
        write(tmp_path / "in" / f"{i}.wav", clip(0.1, i // 2), text=str(i))
    corpus = prepare_sequences([str(tmp_path / "in")], tmp_path / "out", Audio("text", eval_fraction=0.4))
    said = [{int(bytes(row["target"].tolist())) // 2 for row in split} for split in (corpus.train, corpus.eval)]
    assert all(said) and not said[0] & said[1] and len(corpus.train) + len(corpus.eval) == 24


@pytest.mark.parametrize(("files", "options", "reason"), [
    ({"a.wav": None}, {"target": "text"}, "a.wav has no transcript, nor has any other file"),
    ({"a.wav": "x"}, {"target": "folder"}, "not in a subfolder"),
    ({}, {}, "no audio clips"),
    ({"a.wav": "x"}, {"target": "txt"}, "did you mean 'text'"),
    ({"a.wav": "x"}, {"eval_fraction": 1.0}, "not between 0 and 1")])
def test_mistakes_are_told(tmp_path, files, options, reason):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/readme").write_text("no clip")
    for name, text in files.items():
        write(tmp_path / "in" / name, clip(0.1), text=text)
    with pytest.raises(UserError, match=reason):
        prepare_sequences([str(tmp_path / "in")], tmp_path / "out", Audio(**options))
    assert not (tmp_path / "out/manifest.json").exists()


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    write(tmp_path / "a.wav", clip(0.1))
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(UserError, match=r"needs soundfile; run pip install -e '\.\[audio\]'"):
        prepare_sequences([str(tmp_path)], tmp_path / "out", Audio())


def test_the_manifest_says_what_it_was_made_with(tmp_path):
    write(tmp_path / "a.wav", clip(0.1))
    corpus = prepare_sequences([str(tmp_path)], tmp_path / "out", Audio(eval_fraction=0))
    manifest = json.loads((corpus.path / "manifest.json").read_text())
    assert manifest["code"]["versions"]["soundfile"] and manifest["columns"]["features"] == {
        "dtype": "<f2", "shape": [80], "per": "step"}


def test_clips_may_lie_behind_a_url_among_other_files(tmp_path):
    for name in ("no/a.wav", "yes/b.v2.WAV"):
        write(tmp_path / "in" / name, clip(0.1), text=name)
    (tmp_path / "in/features.bin").write_bytes(b"1234")  # tokens, for anyone else
    for path in (tmp_path / "in").rglob("*.*"):
        storage.put(path, f"memory://clips/{path.relative_to(tmp_path / 'in').as_posix()}")
    for target in ("text", "folder"):
        here, there = (prepare_sequences([source], tmp_path / f"{target}{i}", Audio(target, eval_fraction=0))
                       for i, source in enumerate([str(tmp_path / "in"), "memory://clips"]))
        assert here.manifest_hash == there.manifest_hash and len(there.train) == 2


@pytest.mark.parametrize("rate", [1, 999, 2**31 - 1])
def test_a_clip_with_a_rate_that_cannot_be_costs_only_itself(tmp_path, rate):
    write(tmp_path / "in/a.wav", clip(0.5))
    write(tmp_path / "in/b.wav", clip(50), rate)
    corpus = prepare_sequences([str(tmp_path / "in")], tmp_path / "out", Audio(eval_fraction=0))
    assert len(corpus.train) == 1 and corpus.manifest["left_out"] == {f"a sampling rate of {rate:,} Hz": 1}


@pytest.mark.parametrize("rate", [16_000, 1_000, 48_000])
def test_a_clip_that_is_too_long_costs_only_itself(tmp_path, rate):
    write(tmp_path / "in/a.wav", clip(1.0, rate=rate), rate)
    write(tmp_path / "in/b.flac", np.zeros(rate * 5), rate)
    options = {"eval_fraction": 0, "clip_hours": 2 / 3600}
    corpus = prepare_sequences([str(tmp_path / "in")], tmp_path / "out", Audio(**options))
    assert len(corpus.train) == 1 and list(corpus.manifest["left_out"].values()) == [1]
    assert "(--clip_hours)" in next(iter(corpus.manifest["left_out"]))
    assert len(prepare_sequences([str(tmp_path / "in")], tmp_path / "all", Audio(eval_fraction=0)).train) == 2


@pytest.mark.parametrize("rate", [16_000, 44_100, 8_000])
def test_blocks_are_resampled_to_the_same_samples(tmp_path, monkeypatch, rate):
    write(tmp_path / "a.wav", samples := clip(1.0, rate=rate), rate)
    piece, = inputs.find_pieces(str(tmp_path / "a.wav"), 2**26)
    stored = np.float32(np.round(samples * 32767).astype(np.int16)) / 2**15
    whole = stored if rate == 16_000 else soxr.resample(stored, rate, 16_000)
    for size in (1000, 2**14, 2**20):
        monkeypatch.setattr(audio, "DECODED", size)
        np.testing.assert_array_equal(audio.samples_of(piece, 1), whole)


def test_a_limit_identifies_a_corpus_only_where_it_was_changed():
    assert Audio().identity() == Audio(clip_hours=4).identity() != Audio(clip_hours=5).identity()
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(UserError, match="--clip_hours"):
            Audio(clip_hours=wrong)


def test_a_sparse_clip_is_left_out(tmp_path):
    with open(tmp_path / "a.wav", "wb") as file:
        file.truncate(2**40)
    piece, = inputs.find_pieces(str(tmp_path / "a.wav"), 2**26)
    assert audio.samples_of(piece, 1) == "larger than 4,294,967,296 bytes"


def test_clips_of_files_tars_and_parquet_are_the_same(tmp_path):
    """The clips have transcripts, and a tar may hold them in any order."""
    for name in ("plain", "tar", "table"):
        (tmp_path / name).mkdir()
    rows = []
    for n in range(4):
        write(tmp_path / "plain" / f"{n}.wav", clip(0.2, seed=n), text=f"said {n}")
        content = (tmp_path / "plain" / f"{n}.wav").read_bytes()
        rows.append({"audio": {"bytes": content, "path": None}, "text": f"said {n}"})
    with tarfile.open(tmp_path / "tar/clips.tar", "w") as tar:
        for name in ("0.txt", "1.wav", "0.wav", "1.txt", "2.wav", "2.txt", "3.txt", "3.wav"):
            tar.add(tmp_path / "plain" / name, name)
        tar.add(tmp_path / "plain/0.wav", "alone.wav")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "table/clips.parquet", row_group_size=3)
    made = {name: prepare_sequences([str(tmp_path / name)], tmp_path / f"{name}-corpus", Audio("text", eval_fraction=0))
            for name in ("plain", "tar", "table")}

    def said(corpus):
        return sorted((bytes(one["target"].astype(np.uint8)), one["features"].tobytes()) for one in corpus.train)

    assert len(said(made["plain"])) == 4
    assert said(made["plain"]) == said(made["tar"]) == said(made["table"])
    assert made["tar"].manifest["left_out"] == {"a clip without a transcript": 1}
    assert made["tar"].tokenizer.name == "bytes"
    for keys, message in (({"audio_column": "sound"}, "--audio_field: clips.parquet has no column 'sound'; it has au"),
                          ({"target": "folder"}, "--label: clips in clips.parquet are in no folders")):
        with pytest.raises(UserError, match=message):
            prepare_sequences([f"{tmp_path}/table"], tmp_path / "other", Audio(**({"target": "text"} | keys)))


def test_special_tokens_are_such_if_asked(tmp_path):
    write(tmp_path / "a.wav", clip(0.2), text="<|endoftext|>a")
    for asked, ids in ((True, [256, 97]), (False, [*b"<|endoftext|>a"])):
        corpus = prepare_sequences([f"{tmp_path}/a.wav"], tmp_path / f"corpus-{asked}", Audio(
            "text", eval_fraction=0, mels=128, special_tokens=asked))
        row, = corpus.train
        assert row["target"].tolist() == ids and row["features"].shape == (20, 128)
