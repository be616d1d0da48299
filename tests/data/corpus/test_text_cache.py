import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config.schema import DataConfig
from jaxtrain.data import load_corpus
from jaxtrain.data.corpus import text_cache
from jaxtrain.errors import UserError
from tests.odd_files import ODD, WRONG, in_time

FILES = {"a.txt": "first é\n", "b/c.txt": "second\n", "d.txt": "third\n", "e.txt": "fourth\n"}


@pytest.fixture
def config(tmp_path) -> DataConfig:
    for name, text in FILES.items():
        (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / name).write_text(text, encoding="utf-8")
    return DataConfig(source=str(tmp_path / "text"), eval_fraction=0.3, cache_dir=str(tmp_path / "cache"))


def folders(config) -> list[Path]:
    """Return the folders in the cache that would be opened: everything but unfinished work."""
    return [path for path in Path(config.cache_dir, "data").glob("*") if path.suffix != ".partial"]


def start(code: str, config: DataConfig) -> subprocess.Popen:
    """Run `code` in a process of its own."""
    script = ("import os, signal, time\nfrom pathlib import Path\nfrom jaxtrain.config.schema import DataConfig\n"
              "from jaxtrain.data.corpus import text_cache as cache\n"
              f"from jaxtrain.data import load_corpus\nconfig = {config!r}\n" + textwrap.dedent(code))
    env = {**os.environ, "PYTHONPATH": str(Path(text_cache.__file__).parents[3])}
    return subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)


def test_manifest_tokens_and_offsets_say_the_same(config):
    corpus = load_corpus(config)
    manifest = json.loads((corpus.path / "manifest.json").read_text())
    assert corpus.path == folders(config)[0] and corpus.path.parent == Path(config.cache_dir, "data")
    assert manifest["source"] == "files" and manifest["eval_fraction"] == 0.3
    assert manifest["tokenizer"] == {"name": "bytes", "fingerprint": corpus.tokenizer.fingerprint}
    assert corpus.manifest_hash == manifest["sha256"]
    names = []
    for split in ("train", "eval"):
        tokens, entry = getattr(corpus, split), manifest[split]
        texts = [FILES[file["name"]].encode() for file in entry["files"]]
        names += [file["name"] for file in entry["files"]]
        assert [file["sha256"] for file in entry["files"]] == [hashlib.sha256(text).hexdigest() for text in texts]
        assert [file["tokens"] for file in entry["files"]] == [len(text) + 1 for text in texts]
        shard, = tokens.shards
        assert entry["documents"] == len(texts) == tokens.num_documents
        assert entry["bytes"] == tokens.num_bytes == sum(map(len, texts))
        assert entry["tokens"] == tokens.num_tokens == len(shard.tokens) == shard.offsets[-1]
        assert shard.tokens.tolist() == [id for text in texts for id in [*text, 256]]
        assert (corpus.path / f"{split}.bin").read_bytes() == np.array(shard.tokens, "<u2").tobytes()
        assert shard.offsets.dtype == np.int64 and shard.offsets[0] == 0
        assert (shard.tokens[shard.offsets[1:] - 1] == 256).all()
        for name, digest in entry["sha256"].items():
            assert hashlib.sha256((corpus.path / name).read_bytes()).hexdigest() == digest
    assert sorted(names) == sorted(FILES)


def test_tokenised_once_and_again_only_when_something_changes(config, monkeypatch):
    def kept():
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in Path(config.cache_dir).rglob("*")}

    first = load_corpus(config)
    before = kept()
    assert load_corpus(config).manifest_hash == first.manifest_hash and kept() == before
    seen = {first.path}
    for change in (lambda: Path(config.source, "a.txt").write_text("changed"),
                   lambda: Path(config.source, "a.txt").rename(Path(config.source, "renamed.txt")),
                   lambda: object.__setattr__(config, "eval_fraction", 0.7),
                   lambda: monkeypatch.setattr(text_cache.load_tokenizer("bytes").__class__, "fingerprint", "other"),
                   lambda: monkeypatch.setattr(text_cache, "FORMAT", 2)):
        change()
        seen.add(load_corpus(config).path)
    assert len(seen) == 6


def test_identity_does_not_know_where_the_text_lies(config, tmp_path):
    first = load_corpus(config)
    Path(config.source).rename(tmp_path / "moved")
    moved = DataConfig(source=str(tmp_path / "moved"), eval_fraction=0.3, cache_dir=str(tmp_path / "other"))
    assert load_corpus(moved).manifest_hash == first.manifest_hash


def test_sources_are_read_once_per_process(config):
    """A file whose size and time are as before is not read again to learn whether it has changed."""
    first, path = load_corpus(config), Path(config.source, "a.txt")
    before = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load_corpus(config).path == first.path


@pytest.mark.parametrize("call", ["rename", "fsync"])
def test_an_interrupted_build_leaves_nothing(config, monkeypatch, call):
    with monkeypatch.context() as patch:
        patch.setattr(text_cache.os, call, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            load_corpus(config)
    assert not list(Path(config.cache_dir, "data").iterdir())
    assert load_corpus(config).train.num_tokens


@pytest.mark.parametrize(("call", "nth"), [("os.rename", 1), ("os.fsync", 1), ("os.fsync", 6), ("cache.np.save", 2)])
def test_a_killed_build_leaves_nothing_that_counts(config, call, nth):
    killed = start(f"""
        real, calls = {call}, []
        def kill(*args, **kwargs):
            calls.append(1)
            return real(*args, **kwargs) if len(calls) < {nth} else os.kill(os.getpid(), signal.SIGKILL)
        {call} = kill
        load_corpus(config)""", config)
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert list(Path(config.cache_dir, "data").glob("*.partial")) and not folders(config)
    corpus = load_corpus(config)
    assert corpus.train.num_bytes + corpus.eval.num_bytes == sum(len(text.encode()) for text in FILES.values())


def test_processes_may_prepare_at_once(config, tmp_path):
    """Each waits, its work done, until all have done theirs: only then they rename."""
    (tmp_path / "ready").mkdir()
    processes = [start(f"""
        real, ready = os.rename, Path({str(tmp_path / "ready")!r})
        def rename(*args):
            (ready / str(os.getpid())).touch()
            while len(list(ready.iterdir())) < 3:
                time.sleep(0.01)
            real(*args)
        os.rename = rename
        print(load_corpus(config).manifest_hash)""", config) for _ in range(3)]
    hashes = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert hashes == {load_corpus(config).manifest_hash}
    assert list(Path(config.cache_dir, "data").iterdir()) == folders(config) and len(folders(config)) == 1


@pytest.mark.parametrize("name", ["train.bin", "eval.bin", "train.offsets.npy", "eval.offsets.npy", "manifest.json"])
def test_every_flipped_byte_a_cut_and_a_loss_are_found(config, name):
    path = load_corpus(config).path / name
    content = path.read_bytes()
    for at in range(0, len(content), 1 if len(content) < 300 else 7):
        damaged = bytearray(content)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="corrupt") as caught:
            load_corpus(config)
        assert name in str(caught.value) and f"delete {path.parent}" in str(caught.value)
    for damaged in (content[:-1], b"", None):
        path.write_bytes(damaged) if damaged is not None else path.unlink()
        with pytest.raises(UserError, match="corrupt"):
            load_corpus(config)
    for file in path.parent.iterdir():
        file.unlink()
    path.parent.rmdir()
    load_corpus(config)
    assert path.read_bytes() == content  # the fix in the message works, and gives the same bytes


def test_a_cache_dir_that_cannot_be_written_is_told(config, tmp_path):
    (tmp_path / "file").write_text("in the way")
    object.__setattr__(config, "cache_dir", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot be written") as caught:
        load_corpus(config)
    assert caught.value.key == "data.cache_dir"


def test_cache_dir_falls_back_to_the_environment(config, tmp_path, monkeypatch):
    object.__setattr__(config, "cache_dir", "")
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "named"))
    assert load_corpus(config).path.parent == tmp_path / "named" / "data"
    monkeypatch.delenv("JAXTRAIN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert load_corpus(config).path.parent == tmp_path / "home" / ".cache" / "jaxtrain" / "data"


def test_the_default_source_makes_a_corpus(tmp_path):
    corpus = load_corpus(DataConfig(cache_dir=str(tmp_path)))
    assert corpus.train.num_tokens > 10 * corpus.eval.num_tokens // 5 > 100_000
    assert "def " in corpus.tokenizer.decode(corpus.eval.read(0, 20_000))
    start, stop = corpus.train.shards[0].offsets[0:2]
    assert corpus.train.read(stop - 1, stop) == 256 and 256 not in corpus.train.read(start, stop - 1)


@pytest.mark.parametrize("make", [*ODD, *WRONG], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["manifest.json", "train.bin"])
def test_whatever_lies_in_place_of_a_file_is_one_line(config, name, make):
    folder = load_corpus(config).path
    (folder / name).unlink()
    make(folder / name)
    with pytest.raises(UserError, match=rf"data\.cache_dir: .*{name} is corrupt or missing; delete"):
        in_time(lambda: load_corpus(config))
