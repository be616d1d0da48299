"""Open a prepared corpus, local or remote: read its manifest, verify its files, and test its tokenizer.

A corpus is a folder with a manifest.json, which lists the shards and their hashes; other files are ignored. A corpus in
object storage is read through a cache (remote.py).
"""

import json
import platform
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain import storage
from jaxtrain.data.corpus import remote
from jaxtrain.data.corpus.corpus import SPLITS, UNFINISHED, Corpus, Shard, Tokens, mapped, unreadable
from jaxtrain.data.corpus.corruption import DamagedColumn, Lost
from jaxtrain.data.tokenizers.tokenizer import Tokenizer, encode_documents, load_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.files.safe_names import Outside, inside

FORMAT = "jaxtrain-corpus-2"
BESIDE = ("sha256", "code", "stamps")  # manifest keys that its hash does not cover


def open_corpus(folder: str | Path, cache: Path | None = None, corrupt: str = "fail",
                cache_bytes: int = 2**36) -> Corpus:
    """Open a corpus that `prepare` wrote, from a folder or a URL; each version of a file is verified once.

    Corrupt tokens are an error; with `corrupt="skip_and_count"`, rows that need them raise `corruption.Lost` instead.
    """
    spare = corrupt == "skip_and_count"
    if storage.is_url(folder):
        url, manifest = str(folder), read_manifest(folder)
        store = remote.Store(url, manifest, cache, cache_bytes, spare)
        return _corpus(store.folder, manifest, store.column, remote.THREADS)
    folder = Path(folder).expanduser()
    manifest = read_manifest(folder)
    for shard in (shard for split in SPLITS for shard in manifest["splits"][split]["shards"]):
        for name in shard["sha256"].keys() - shard["crc32"].keys():
            check(folder / name, shard["sha256"][name], cache)
    return _corpus(folder, manifest, partial(_column, folder, cache, spare))


def _corpus(folder: Path, manifest: dict[str, Any], column: Callable[..., Any], threads: int = 0) -> Corpus:
    tokenizer, dtype = _tokenizer(folder, manifest), np.dtype(manifest["dtype"])
    splits = {}
    for split in SPLITS:
        entry = manifest["splits"][split]
        splits[split] = Tokens(tuple(_shard(folder, shard, column, dtype) for shard in entry["shards"]), entry["bytes"])
        looked_at = splits[split].shards[: 1 if threads else None]  # checking every shard over a network would be slow
        if tokenizer.bos is not None and any(_begins_without(tokenizer.bos, shard) for shard in looked_at):
            raise UserError("data.source", f"{folder} has documents without {manifest['tokenizer']['bos']} in front",
                            "prepare the corpus again")
        if splits[split].num_tokens and splits[split].lost >= splits[split].num_tokens:
            raise UserError("data.corrupt", f"the whole {split} split of {folder} is corrupt", "prepare it again")
    return Corpus(splits["train"], splits["eval"], tokenizer, manifest["sha256"], folder, threads)


def _begins_without(bos: int, shard: Shard) -> bool:
    try:
        return shard.tokens[:1].tolist() != [bos]
    except Lost:
        return False


def read_manifest(folder: str | Path, format: str = FORMAT) -> dict[str, Any]:
    """Return the manifest of a corpus, checked against its own hash."""
    path = storage.join(folder, "manifest.json")
    if not storage.is_url(folder) and not Path(path).exists() and Path(folder, UNFINISHED).is_dir():
        raise UserError("data.source", f"{folder} is not finished", "run the same prepare command again")
    if not storage.is_url(folder) and not Path(path).exists():
        raise UserError("data.source", f"{folder} has no manifest.json, so it is not a corpus",
                        "copy the corpus whole, or prepare it")
    try:
        content = storage.read(path)
    except storage.Gone as error:
        raise UserError("data.source", f"{folder} has no manifest.json, so it is not a corpus",
                        "check the name, or put one there with python -m jaxtrain.data.publish") from error
    except OSError as error:
        raise UserError("data.source", f"{path} cannot be read ({error})", "prepare the corpus again") from error
    try:
        manifest = json.loads(content)
        recorded = manifest["sha256"]
        content = {key: value for key, value in manifest.items() if key not in BESIDE}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError("data.source", f"{path} cannot be read ({error})", "prepare the corpus again") from error
    if str(manifest.get("format")).startswith("jaxtrain-sequences") and format == FORMAT:
        raise UserError("data.source", f"{folder} is a corpus of sequences, not of text",
                        "read it with open_sequences, as docs/data-sequences.md shows")
    if manifest.get("format") != format:
        raise UserError("data.source", f"{path} is of format {manifest.get('format')!r}, not {format!r}",
                        "prepare the corpus again with this version")
    if atomic_files.digest(content) != recorded:
        raise UserError("data.source", f"{path} was changed after it was written", "prepare the corpus again")
    try:
        for name in _named_files(manifest):
            inside(folder, name)
    except Outside as error:
        raise UserError("data.source", f"{path} names a file outside of the corpus: {error}",
                        "use a corpus from a source that you trust") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError("data.source", f"{path} cannot be read ({error!r})", "prepare the corpus again") from error
    return manifest


def _named_files(manifest: dict[str, Any]) -> Iterator[str]:
    """Yield every name of a file in a manifest, of text or of sequences."""
    if file := manifest.get("tokenizer", {}).get("file"):
        yield file
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            yield from (shard["name"], *shard["sha256"], *shard.get("crc32", ()))
            yield from (f"{shard['name']}.{column}" for column in manifest.get("columns", ()))


def _tokenizer(folder: Path, manifest: dict[str, Any]) -> Tokenizer:
    """Load the corpus's own tokenizer, and check that it still gives the ids recorded in the manifest."""
    said = manifest["tokenizer"]
    where = str(folder / said["file"]) if said["file"] else "bytes"
    named = () if where == "bytes" else (said["eod"], said["bos"])
    tokenizer = load_tokenizer(where, *named)
    if tokenizer.fingerprint != said["fingerprint"]:
        raise UserError("data.source", f"{folder} has a different tokenizer from when it was prepared",
                        f"restore its {said['file']} or prepare the corpus again")
    for probe in manifest["probes"]:
        if not _same(tokenizer, probe):
            raise UserError("data.source", f"the tokenizer of {folder} gives other ids than when it was prepared: "
                            f"{probe.get('text', probe.get('marked'))[:40]!r}",
                            "install the versions that its manifest names")
    return tokenizer


def _same(tokenizer: Tokenizer, probe: dict[str, Any]) -> bool:
    if "marked" not in probe:
        return encode_documents([probe["text"].encode()], tokenizer)[0].tolist() == probe["ids"]
    from jaxtrain.data.chat.loss_masks import check_probe  # needed only for corpora of conversations

    return check_probe(tokenizer, probe)


_SEEN: set[str] = set()  # file versions that this process has written or verified


def check(path: Path, sha256: str, cache: Path | None = None) -> None:
    """Raise a UserError if a file does not match its hash in the manifest.

    A version that this process has verified, or with a `cache` any process, is not read again.
    """
    try:
        version = _version(path, sha256)
        seen = cache and cache / "checked" / version
        if version in _SEEN or (seen and seen.exists()):
            return
        intact = atomic_files.file_digest(path) == sha256
    except OSError as error:
        raise unreadable(path, error) from error
    if not intact:
        raise UserError("data.source", f"{path} is corrupt: its sha256 is not the manifest's",
                        "delete the corpus and run the same prepare command again")
    _SEEN.add(version)
    if seen:
        try:
            seen.parent.mkdir(parents=True, exist_ok=True)
            seen.touch()
        except OSError:
            pass  # it will be verified again next time


def trust(path: Path, sha256: str) -> None:
    """Mark a file as verified, because it was hashed while it was written."""
    _SEEN.add(_version(path, sha256))


def _version(path: Path, sha256: str) -> str:
    stat = path.stat()  # includes the machine: a shared cache may serve machines with different disks
    identity = [platform.node(), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    return atomic_files.digest([str(path.absolute()), *identity, sha256])


def _shard(folder: Path, shard: dict[str, Any], column: Callable[..., Any], dtype: np.dtype) -> Shard:
    name = shard["name"]
    tokens = column(shard, f"{name}.bin", dtype)
    trained = column(shard, f"{name}.trained.bin", np.dtype(np.uint8)) if "learnt" in shard else None
    # Plain arrays over the maps: each slice of np.memmap itself costs microseconds more.
    return Shard(tokens, np.asarray(np.load(folder / f"{name}.offsets.npy", mmap_mode="r")), trained)


def _column(folder: Path, cache: Path | None, spare: bool, shard: dict[str, Any], name: str, dtype: np.dtype) -> Any:
    try:
        check(folder / name, shard["sha256"][name], cache)
    except UserError as refused:
        if not spare:
            raise
        try:
            return DamagedColumn(folder / name, dtype, shard["tokens"], shard["crc32"][name])
        except OSError:
            raise refused from None  # the file exists, but this user may not read it
    return mapped(folder / name, dtype)
