"""Open a prepared corpus, local or remote: read its manifest, verify its files, and test its tokenizer.

A corpus is a folder with a manifest.json, which lists the shards and their hashes; other files are ignored. A corpus in
object storage is read through a cache (remote.py).
"""

import platform
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from jaxtrain import storage
from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.corpus import remote
from jaxtrain.data.corpus.corpus import SPLITS, UNFINISHED, Corpus, Shard, Tokens
from jaxtrain.data.corpus.corruption import DamagedColumn, Lost
from jaxtrain.data.tokenizers.tokenizer import Tokenizer, encode_documents, load_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import LARGE, misfit, parsed, reason
from jaxtrain.files.safe_names import linked, parts_of

FORMAT = "jaxtrain-corpus-2"
_FILES = {"name": str, "sha256": {str: str}, "crc32?": {str: str}}
_SPLIT = {"bytes": int, "shards": [_FILES | {"tokens": int, "documents": int, "crc32": {str: str}}]}
_PROBE = {"ids": [int], "text?": str, "marked?": str}
# What is read of manifests.
_TEXT = {"dtype": str, "probes": [_PROBE], "chat?": dict | None,
         "splits": {name: _SPLIT for name in SPLITS},
         "tokenizer": {"file": str, "fingerprint": str, "eod": str, "bos": str, "sha256?": str}}
_OTHER = {"columns?": {str: dict}, "splits": {str: {"shards": [_FILES]}}}
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
            check(folder / name, shard["sha256"][name], cache, most=64 * shard["documents"] + 4096)
    return _corpus(folder, manifest, partial(_column, folder, cache, spare))


def _corpus(folder: Path, manifest: JsonObject, column: Callable[..., Any], threads: int = 0) -> Corpus:
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
    options = manifest.get("options")
    form = options.get("format") if isinstance(options, dict) else ""
    return Corpus(splits["train"], splits["eval"], tokenizer, manifest["sha256"], folder, threads,
                  chat=manifest.get("chat"), pairs=form == "preference", labelled=form == "labelled")


def _begins_without(bos: int, shard: Shard) -> bool:
    try:
        return shard.tokens[:1].tolist() != [bos]
    except Lost:
        return False


def read_manifest(folder: str | Path, format: str = FORMAT) -> JsonObject:
    """Return the manifest of a corpus, checked against its own hash."""
    path = storage.join(folder, "manifest.json")
    if not storage.is_url(folder) and not Path(path).exists() and Path(folder, UNFINISHED).is_dir():
        raise UserError("data.source", f"{folder} is not finished", "run the same prepare command again")
    if not storage.is_url(folder) and not Path(path).exists():
        raise UserError("data.source", f"{folder} has no manifest.json, so it is not a corpus",
                        f"copy the complete corpus, or prepare one: jaxtrain "
                        f"{'prepare' if format == FORMAT else 'prepare_sequences'} --help")
    _refuse_outside(folder, ["manifest.json"])
    try:
        content = storage.read_small(path, LARGE)
    except storage.Gone as error:
        raise UserError("data.source", f"{folder} has no manifest.json, so it is not a corpus",
                        "check the name, or copy one there with jaxtrain publish") from error
    except OSError as error:
        raise UserError("data.source", f"{path} {reason(error)}", "prepare the corpus again") from error
    try:
        manifest = parsed(content, {"sha256": str})
    except ValueError as error:
        raise UserError("data.source", f"{path} cannot be read (it {reason(error)})", "prepare the corpus again"
                        ) from error
    content = {key: value for key, value in manifest.items() if key not in BESIDE}
    if str(manifest.get("format")).startswith("jaxtrain-sequences") and format == FORMAT:
        raise UserError("data.source", f"{folder} is a corpus of sequences, not of text",
                        "name a model of sequences, or read it with open_sequences: docs/data-sequences.md")
    if manifest.get("format") == FORMAT and format != FORMAT:
        raise UserError("data.source", f"{folder} is a corpus of text, not of sequences",
                        "name one that jaxtrain prepare_sequences wrote")
    if manifest.get("format") != format:
        raise UserError("data.source", f"{path} is of format {manifest.get('format')!r}, not {format!r}",
                        "prepare the corpus again with this version")
    if atomic_files.digest(content) != manifest["sha256"]:
        raise UserError("data.source", f"{path} was changed after it was written", "prepare the corpus again")
    if wrong := misfit(manifest, _TEXT if format == FORMAT else _OTHER):
        raise UserError("data.source", f"{path} cannot be read ({wrong})", "prepare the corpus again")
    _refuse_outside(folder, _named_files(manifest))
    if format == FORMAT and (wrong := _contradiction(manifest)):
        raise UserError("data.source", f"{path} cannot be read ({wrong})", "prepare the corpus again")
    return manifest


def _refuse_outside(folder: str | Path, names: Iterable[str]) -> None:
    """Raise a UserError if one of the names, or a link that somebody else made, leads out of a corpus."""
    try:
        for name in names:
            parts_of(name) if storage.is_url(folder) else linked(folder, name)
    except (OSError, ValueError) as error:
        raise UserError("data.source", f"{folder}/manifest.json names a file outside of the corpus: {error}",
                        "use a corpus from a source that you trust") from error


def _contradiction(manifest: JsonObject) -> str:
    """Return what cannot be in a manifest of the right form, or ""."""
    if not is_dtype(manifest["dtype"], "u"):
        return f"dtype {manifest['dtype']!r} is not one of ids"
    for shard in (shard for split in SPLITS for shard in manifest["splits"][split]["shards"]):
        name, files = shard["name"], [f"{shard['name']}.bin", f"{shard['name']}.trained.bin"]
        if not (0 <= shard["tokens"] < 2**53 and 0 <= shard["documents"] < 2**53):
            return f"shard {name!r} cannot have {shard['tokens']} tokens in {shard['documents']} documents"
        for file in files[:2 if "learnt" in shard else 1]:
            if file not in shard["sha256"] or file not in shard["crc32"]:
                return f"shard {name!r} has no checksums of {file}"
        if f"{name}.offsets.npy" not in shard["sha256"]:
            return f"shard {name!r} has no checksum of its offsets"
    return ""


def is_dtype(said: str, kinds: str) -> bool:
    """Return whether a text names a dtype of one of these kinds."""
    try:
        return np.dtype(said).kind in kinds
    except (TypeError, ValueError, SyntaxError):
        return False


def _named_files(manifest: JsonObject) -> Iterator[str]:
    """Yield every name of a file in a manifest, of text or of sequences."""
    if file := manifest.get("tokenizer", {}).get("file"):
        yield file
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            yield from (shard["name"], *shard["sha256"], *shard.get("crc32", ()))
            yield from (f"{shard['name']}.{column}" for column in manifest.get("columns", ()))


def _tokenizer(folder: Path, manifest: JsonObject) -> Tokenizer:
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


def _same(tokenizer: Tokenizer, probe: JsonObject) -> bool:
    if "marked" not in probe:
        return encode_documents([probe["text"].encode()], tokenizer)[0].tolist() == probe["ids"]
    from jaxtrain.data.chat.loss_masks import check_probe  # needed only for corpora of conversations

    return check_probe(tokenizer, probe)


_SEEN: set[str] = set()  # file versions that this process has written or verified


def check(path: Path, sha256: str, cache: Path | None = None, most: int | None = None) -> None:
    """Raise a UserError if a file does not match its hash in the manifest; one of over `most` bytes is not read.

    A version that this process has verified, or with a `cache` any process, is not read again.
    """
    try:
        version = _version(path, sha256)
        seen = cache and cache / "checked" / version
        if version in _SEEN or (seen and seen.exists()):
            return
        intact = (most is None or path.stat().st_size <= most) and atomic_files.file_digest(path) == sha256
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


def _shard(folder: Path, shard: JsonObject, column: Callable[..., Any], dtype: np.dtype) -> Shard:
    name = shard["name"]
    tokens = column(shard, f"{name}.bin", dtype)
    trained = column(shard, f"{name}.trained.bin", np.dtype(np.uint8)) if "learnt" in shard else None
    return Shard(tokens, offsets(folder / f"{name}.offsets.npy", shard["documents"], shard["tokens"]), trained)


def _column(folder: Path, cache: Path | None, spare: bool, shard: JsonObject, name: str, dtype: np.dtype) -> Any:
    try:
        check(folder / name, shard["sha256"][name], cache, most=shard["tokens"] * dtype.itemsize)
    except UserError as refused:
        if not spare:
            raise
        try:
            return DamagedColumn(folder / name, dtype, shard["tokens"], shard["crc32"][name])
        except OSError:
            raise refused from None  # the file exists, but this user may not read it
    return mapped(folder / name, dtype)


def mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """Return a file of numbers as a memory-mapped array."""
    try:
        if not path.stat().st_size:  # an empty file cannot be mapped
            return np.zeros(0, dtype)
        # A plain array over the map: slices of np.memmap itself cost microseconds more each.
        return np.asarray(np.memmap(path, dtype, mode="r"))
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise UserError("data.source", f"{path} does not hold whole numbers of type {dtype} ({error})",
                        "prepare the corpus again") from error


def offsets(path: Path, count: int, end: int | None = None) -> np.ndarray:
    """Return where each of `count` documents begins and the last one ends, memory-mapped."""
    found = array(path)
    if found.dtype != np.int64 or found.shape != (count + 1,) or found[0] or (end is not None and found[-1] != end):
        raise UserError("data.source", f"{path} does not hold the offsets of {count:,} documents",
                        "prepare the corpus again")
    return found


def array(path: Path) -> np.ndarray:
    """Return the array in a .npy file, memory-mapped; an empty one of floats if the file is damaged."""
    try:
        # A plain array over the map: slices of np.memmap itself cost microseconds more each.
        return np.asarray(np.load(path, mmap_mode="r"))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, EOFError, SyntaxError, TokenError, TypeError, OverflowError, MemoryError):  # by its header
        return np.zeros(0)


def unreadable(path: Path, error: OSError) -> UserError:
    """Return the error for a corpus file that cannot be read."""
    return UserError("data.source", f"{path} cannot be read ({error.strerror})", "make it readable, or prepare the "
                     "corpus again")
