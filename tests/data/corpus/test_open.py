"""A corpus is data from elsewhere: its manifest names files inside it and nothing else."""

import json
import shutil
from pathlib import Path

import pytest

from jaxtrain.data import open_corpus
from jaxtrain.data.corpus.open import BESIDE
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from tests.data import made


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


def test_a_link_out_of_a_corpus_is_refused(corpus, tmp_path):
    folder = shutil.copytree(corpus, tmp_path / "corpus")
    shard = next(folder.glob("*.bin"))
    shard.rename(tmp_path / "elsewhere.bin")
    shard.symlink_to(tmp_path / "elsewhere.bin")
    with pytest.raises(UserError, match="is a link that leads out of"):
        open_corpus(folder)


@pytest.mark.parametrize("change", [lambda manifest: manifest.pop("splits"),
                                    lambda manifest: manifest["splits"].update(train=None),
                                    lambda manifest: first_shard(manifest).pop("sha256")])
def test_a_manifest_without_its_parts_is_one_line(corpus, tmp_path, change):
    with pytest.raises(UserError, match=r"data\.source: .*manifest.json cannot be read"):
        open_corpus(rewritten(corpus, tmp_path / "corpus", change))
