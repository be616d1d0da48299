"""A corpus is data from elsewhere: its manifest names files inside it and nothing else."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxtrain.data import open_corpus
from jaxtrain.data.corpus.open import BESIDE
from jaxtrain.data.corpus.origins import origins
from jaxtrain.data.corpus.shard_writer import ORIGIN
from jaxtrain.data.packing.packed_rows import PackedRows
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from tests.data import made
from tests.odd_files import ODD, WRONG, device, fifo, folder, in_time, sparse


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return made.corpus(tmp_path_factory.mktemp("made") / "corpus")


def rewritten(corpus, folder, change):
    """A copy whose manifest was changed and sealed again."""
    shutil.copytree(corpus, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    manifest["sha256"] = atomic_files.digest({key: value for key, value in manifest.items() if key not in BESIDE})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def first_shard(manifest):
    return manifest["splits"]["train"]["shards"][0]


def with_name(name):
    def change(manifest):
        first_shard(manifest)["name"] = name
    return change


def with_file(name):
    def change(manifest):
        first_shard(manifest)["sha256"][f"{name}.offsets.npy"] = "0" * 64
    return change


def with_tokenizer(name):
    def change(manifest):
        manifest["tokenizer"]["file"] = name
    return change


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize("change", [with_name("../../victim"), with_file("/victim"), with_file("../victim"),
                                    with_tokenizer("../tokenizer.json"), with_tokenizer("/etc/hostname")])
def test_a_manifest_that_names_files_outside_is_refused(corpus, tmp_path, scheme, change):
    folder = rewritten(corpus, tmp_path / "corpus", change)
    with pytest.raises(UserError, match=r"data\.source: .*manifest.json names a file outside of the corpus: "):
        open_corpus(f"{scheme}{folder}", tmp_path / "cache")
    assert {path.name for path in tmp_path.iterdir()} <= {"corpus", "cache"}


def hub_layout(corpus, folder):
    """The corpus as a cache of the Hugging Face hub holds it: links to files that are named by their hash."""
    (folder / "blobs").mkdir(parents=True)
    snapshot = folder / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for path in corpus.iterdir():
        blob = folder / "blobs" / atomic_files.file_digest(path)
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def test_the_links_of_a_hub_cache_are_followed(corpus, tmp_path):
    opened, whole = open_corpus(hub_layout(corpus, tmp_path / "hub")), open_corpus(corpus)
    assert opened.manifest_hash == whole.manifest_hash
    assert np.array_equal(opened.train.read(0, 9999), whole.train.read(0, 9999))


def test_a_link_that_somebody_else_put_into_a_corpus_is_refused(corpus, tmp_path, monkeypatch):
    folder = hub_layout(corpus, tmp_path / "hub")
    monkeypatch.setattr(os, "lstat", lambda path: SimpleNamespace(st_uid=os.stat(folder).st_uid + 1))
    with pytest.raises(UserError, match="is a link that somebody else than the owner of"):
        open_corpus(folder)


def test_a_manifest_behind_somebody_elses_link_is_not_read(corpus, tmp_path, monkeypatch):
    place = shutil.copytree(corpus, tmp_path / "corpus")
    (place / "manifest.json").rename(tmp_path / "elsewhere.json")
    (place / "manifest.json").symlink_to("../elsewhere.json")
    open_corpus(place)
    monkeypatch.setattr(os, "lstat", lambda path: SimpleNamespace(st_uid=os.stat(place).st_uid + 1))
    (tmp_path / "elsewhere.json").write_text("{")  # reading it would be another error
    with pytest.raises(UserError, match=r"'manifest\.json' is a link that somebody else"):
        open_corpus(place)


def test_a_link_in_the_cache_of_a_remote_corpus_is_refused(corpus, tmp_path):
    open_corpus(f"file://{corpus}", tmp_path / "cache")
    cached = next((tmp_path / "cache" / "remote").rglob("*.offsets.npy"))
    victim = tmp_path / "victim"
    victim.write_text("not to be touched")
    cached.unlink()
    cached.symlink_to(victim)
    with pytest.raises(UserError, match="is a link that leads out of"):
        open_corpus(f"file://{corpus}", tmp_path / "cache")
    assert victim.read_text() == "not to be touched"


@pytest.mark.parametrize("change", [lambda manifest: manifest.pop("splits"),
                                    lambda manifest: manifest["splits"].update(train=None),
                                    lambda manifest: first_shard(manifest).pop("sha256")])
def test_a_manifest_without_its_parts_is_one_line(corpus, tmp_path, change):
    with pytest.raises(UserError, match=r"data\.source: .*manifest.json cannot be read"):
        open_corpus(rewritten(corpus, tmp_path / "corpus", change))


@pytest.mark.parametrize("make", [*ODD, *WRONG], ids=lambda make: make.__name__)
def test_whatever_lies_in_place_of_the_manifest_is_one_line(corpus, tmp_path, make):
    folder = shutil.copytree(corpus, tmp_path / "corpus")
    (folder / "manifest.json").unlink()
    make(folder / "manifest.json")
    with pytest.raises(UserError, match=r"data\.source: .*manifest.json cannot be read") as error:
        in_time(lambda: open_corpus(folder))
    assert len(str(error.value)) < 400


def put(*keys, value):
    def change(manifest):
        for key in keys[:-1]:
            manifest = manifest[key]
        manifest[keys[-1]] = value
    return change


SHARD = "splits", "train", "shards", 0


@pytest.mark.parametrize("change", [
    *(put("dtype", value=value) for value in ("x", "O", "<f4", "V9", "<i4", None, 3, "<u2,<u2", "(")),
    put("splits", value=None), put("splits", "eval", value=None), put("splits", "train", "shards", value=None),
    put("splits", "train", "bytes", value="1"), put("probes", value=None), put("probes", value=[None]),
    put("probes", value=[{"text": "a"}]), put("tokenizer", value=None), put("tokenizer", "file", value=["x"]),
    put("tokenizer", "eod", value=1), put(*SHARD, "tokens", value=-1), put(*SHARD, "tokens", value=1e9),
    put(*SHARD, "tokens", value=10**400), put(*SHARD, "documents", value=None), put(*SHARD, "sha256", value={}),
    put(*SHARD, "crc32", value={}), put(*SHARD, "crc32", value=[1]), put(*SHARD, "name", value=3),
    put(*SHARD, "name", value="\udc80"), put(*SHARD, "name", value="a\0b"),
])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_manifest_of_another_form_is_one_line(corpus, tmp_path, change, scheme):
    folder = rewritten(corpus, tmp_path / "corpus", change)
    with pytest.raises(UserError) as error:
        open_corpus(f"{scheme}{folder}", tmp_path / "cache")
    assert error.value.key == "data.source" and len(str(error.value)) < 1000


def test_text_or_marks_in_probes(corpus, tmp_path):
    with pytest.raises(UserError, match="gives other ids than when it was prepared"):
        open_corpus(rewritten(corpus, tmp_path / "corpus", put("probes", value=[{"ids": [1], "text": "a"}])))


@pytest.mark.parametrize("spare", ["fail", "skip_and_count"])
@pytest.mark.parametrize("sums", ["", "AAAA", "!", "AAAAAA=="])
def test_checksums_of_another_length_are_one_line(corpus, tmp_path, sums, spare):
    folder = rewritten(corpus, tmp_path / "corpus", put(*SHARD, "crc32", "train-00000.bin", value=sums))
    for place in (folder, f"file://{folder}"):
        if spare == "skip_and_count" and place == folder:
            (folder / "train-00000.bin").write_bytes(b"damaged")
        elif place == folder:
            continue
        with pytest.raises(UserError, match="checksums for 1,300,000 tokens"):
            open_corpus(place, tmp_path / "cache", spare)


@pytest.mark.parametrize("make", [fifo, device, folder, sparse])
@pytest.mark.parametrize("name", ["train-00000.bin", "train-00000.offsets.npy"])
def test_whatever_lies_in_place_of_the_data_is_one_line(corpus, tmp_path, name, make):
    place = shutil.copytree(corpus, tmp_path / "corpus")
    (place / name).unlink()
    make(place / name)
    with pytest.raises(UserError, match=name):
        in_time(lambda: open_corpus(place))


@pytest.mark.parametrize("array", [np.zeros(0, "<i8"), np.array([0, 5], "<i8"), np.array(3), np.zeros((2, 2)),
                                   np.array([{}]), b"nonsense", b"", b"\x93NUMPY\x01\x00\x04\x00{(\n\n",
                                   b"\x93NUMPY\x01\x00\x04\x00{{{{"])
def test_offsets_of_other_documents_are_one_line(corpus, tmp_path, array):
    place = shutil.copytree(corpus, tmp_path / "before")
    path = place / "train-00000.offsets.npy"
    path.write_bytes(array) if isinstance(array, bytes) else np.save(path, array, allow_pickle=True)
    sha256 = atomic_files.file_digest(path)
    place = rewritten(place, tmp_path / "corpus", put(*SHARD, "sha256", path.name, value=sha256))
    with pytest.raises(UserError, match="does not hold the offsets of"):
        open_corpus(place)


@pytest.mark.parametrize("content", [
    b"nonsense", b"", np.zeros(0, ORIGIN), np.zeros(9), np.zeros(9, [("piece", "<u4")])])
def test_origins_that_tell_nothing_are_one_line(corpus, tmp_path, content):
    place = shutil.copytree(corpus, tmp_path / "before")
    path = place / "train-00000.origins.npy"
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content)
    sha256 = atomic_files.file_digest(path)
    opened = open_corpus(rewritten(place, tmp_path / "corpus", put(*SHARD, "sha256", path.name, value=sha256)))
    with pytest.raises(UserError, match="does not tell where its document 0 comes from"):
        origins(opened, "train", "", PackedRows(opened.train, 64), 0)
