"""Tokenise small text once, into a cache folder of memory-mapped tokens named by the hash of all its inputs.

A cache folder appears by one rename, complete or not at all, so that a kill or several processes building it at once
do no harm; later damage on disk is caught by the hashes in its manifest.
"""

import os
import shutil
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxtrain.config.data_stages import Source, sources
from jaxtrain.config.schema import DataConfig
from jaxtrain.data.corpus.corpus import SPLITS, Corpus, Shard, Tokens, is_corpus
from jaxtrain.data.corpus.text_source import Document, find_documents
from jaxtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.files.atomic_files import digest, file_digest, sync, write_json
from jaxtrain.files.bounded_files import LARGE, read_json

FORMAT = 1


def load_corpus(config: DataConfig) -> Corpus:
    """Open the tokens of `config.source`, or of all sources of `config.mixture`; tokenise them first if needed.

    Every process of a run may call this at once.
    """
    if not config.mixture:
        return _load(config)
    parts = {one.name: _part(config, one) for one in sources(config)}
    for name, part in parts.items():
        first, other = next(iter(parts.items()))
        if part.tokenizer.fingerprint != other.tokenizer.fingerprint:
            raise UserError(f"data.mixture.{name}.source", f"its tokenizer is not that of {first!r}",
                            "prepare all sources with the same tokenizer")
    manifests = digest({name: part.manifest_hash for name, part in parts.items()})
    return Corpus(_joined([part.train for part in parts.values()]), _joined([part.eval for part in parts.values()]),
                  next(iter(parts.values())).tokenizer, manifests, cache_root(config),
                  max(part.threads for part in parts.values()), parts,
                  pairs=all(part.pairs for part in parts.values()),
                  labelled=all(part.labelled for part in parts.values()))


def _part(config: DataConfig, one: Source) -> Corpus:
    try:
        return _load(replace(config, source=one.source, mixture={}, stages=[]))
    except UserError as error:
        key = f"data.mixture.{one.name}.source" if error.key == "data.source" else error.key
        raise UserError(key, error.reason, error.fix) from error


def _joined(parts: list[Tokens]) -> Tokens:
    return Tokens(tuple(shard for part in parts for shard in part.shards), sum(part.num_bytes for part in parts))


def _load(config: DataConfig) -> Corpus:
    root = cache_root(config)
    if config.source != "stdlib" and is_corpus(config.source):
        from jaxtrain.data.corpus.open import open_corpus  # not needed for plain text

        return open_corpus(config.source, root, config.corrupt, config.cache_bytes)
    tokenizer = load_tokenizer(config.tokenizer)
    documents = find_documents(config.source, config.eval_fraction)
    identity = _identity(config, tokenizer, documents)
    folder = root / digest(identity)[:32]
    if not folder.exists():
        try:
            _build(folder, identity, tokenizer, documents)
        except OSError as error:
            raise UserError("data.cache_dir", f"{root} cannot be written ({error.strerror or error})",
                            "name a writable folder with room, here or in $JAXTRAIN_CACHE") from error
    return _open(folder, tokenizer)


def cache_root(config: DataConfig) -> Path:
    """Return the folder for everything that is derived from data."""
    return Path(config.cache_dir or os.environ.get("JAXTRAIN_CACHE") or "~/.cache/jaxtrain").expanduser() / "data"


def _identity(config: DataConfig, tokenizer: Tokenizer, documents: list[Document]) -> dict:
    """Return all that the tokens depend on, without absolute paths: the same text elsewhere gives the same hash."""
    files = {split: [{"name": d.name, "start": d.start, "bytes": d.stop - d.start, "sha256": d.sha256}
                     for d in documents if d.split == split] for split in SPLITS}
    return {
        "format": FORMAT,
        "source": "stdlib" if config.source == "stdlib" else "files",
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        "eval_fraction": config.eval_fraction,
        **{split: {"files": files[split]} for split in SPLITS},
    }


def _build(folder: Path, manifest: dict, tokenizer: Tokenizer, documents: list[Document]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.partial")
    partial.mkdir()
    try:
        dtype = np.min_scalar_type(tokenizer.vocab_size - 1).newbyteorder("<")
        manifest["dtype"] = dtype.str
        for split in SPLITS:
            texts = [document for document in documents if document.split == split]
            _write_split(partial, split, manifest[split], texts, tokenizer, dtype)
        manifest["sha256"] = digest(manifest)
        write_json(partial / "manifest.json", manifest)
        sync(partial)
        try:
            os.rename(partial, folder)
        except OSError:
            if not folder.exists():  # otherwise another process was faster, with the same content
                raise
        sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_split(folder: Path, split: str, entry: dict, documents: list[Document], tokenizer: Tokenizer,
                 dtype: np.dtype) -> None:
    """Write the tokens and offsets of one split, and add the counts and hashes to its manifest entry."""
    tokens_path, offsets_path = _paths(folder, split)
    lengths = []
    with open(tokens_path, "wb") as file:
        for document in documents:
            ids = np.append(tokenizer.encode(document.read()), tokenizer.eod).astype(dtype)
            file.write(ids.tobytes())
            lengths.append(len(ids))
        _flush(file)
    with open(offsets_path, "wb") as file:
        np.save(file, np.cumsum([0, *lengths], dtype="<i8"))
        _flush(file)
    for described, length in zip(entry["files"], lengths, strict=True):
        described["tokens"] = length
    entry["documents"] = len(documents)
    entry["bytes"] = sum(described["bytes"] for described in entry["files"])
    entry["tokens"] = sum(lengths)
    entry["sha256"] = {path.name: file_digest(path) for path in (tokens_path, offsets_path)}


def _open(folder: Path, tokenizer: Tokenizer) -> Corpus:
    try:
        manifest = read_json(folder / "manifest.json", {"sha256": str}, LARGE)
        recorded = manifest.pop("sha256")
    except (OSError, ValueError) as error:
        raise _corrupt(folder / "manifest.json") from error
    if digest(manifest) != recorded:
        raise _corrupt(folder / "manifest.json")
    splits = {split: _open_split(folder, split, manifest[split], np.dtype(manifest["dtype"])) for split in SPLITS}
    return Corpus(splits["train"], splits["eval"], tokenizer, recorded, folder)


def _open_split(folder: Path, split: str, entry: dict, dtype: np.dtype) -> Tokens:
    for path in _paths(folder, split):
        try:
            most = 8 * (entry["tokens"] + entry["documents"]) + 4096  # a sparse file would take minutes to hash
            intact = path.stat().st_size <= most and file_digest(path) == entry["sha256"][path.name]
        except OSError:
            intact = False
        if not intact:
            raise _corrupt(path)
    tokens_path, offsets_path = _paths(folder, split)
    # Plain arrays over the maps: each slice of np.memmap itself costs microseconds more.
    tokens = np.asarray(np.memmap(tokens_path, dtype, mode="r"))
    offsets = np.asarray(np.load(offsets_path, mmap_mode="r"))
    return Tokens((Shard(tokens, offsets),), num_bytes=entry["bytes"])


def _paths(folder: Path, split: str) -> tuple[Path, Path]:
    return folder / f"{split}.bin", folder / f"{split}.offsets.npy"


def _corrupt(path: Path) -> UserError:
    return UserError("data.cache_dir", f"{path} is corrupt or missing", f"delete {path.parent}, it is rebuilt")


def _flush(file) -> None:
    file.flush()
    os.fsync(file.fileno())
