"""A corpus of random tokens, of which some are only read: large enough for several chunks."""

import uuid
from pathlib import Path

import numpy as np

from jaxtrain import storage
from jaxtrain.data.corpus.open import FORMAT
from jaxtrain.data.corpus.shard_writer import Origin, ShardWriter
from jaxtrain.data.publish import publish
from jaxtrain.data.tokenizers.tokenizer import ByteTokenizer
from jaxtrain.files import atomic_files


def corpus(folder: Path, shards: int = 2, tokens: int = 1_300_000, seed: int = 0) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(seed)
    splits = {}
    for split, count, size in (("train", shards, tokens), ("eval", 1, 5000)):
        entries = []
        for number in range(count):
            writer = ShardWriter(folder / f"{split}-{number:05}", np.dtype("<u2"), 256, trained=True)
            left = size
            while left > 0:
                length = min(left, int(rng.integers(2, 5000)))
                ids = rng.integers(0, 256, length - 1).astype(np.uint16)
                writer.add(ids, rng.bytes(16), length, Origin(0, 0), rng.random(length) < 0.7)
                left -= length
            entries.append({"task": number} | writer.close())
        splits[split] = {"bytes": size * count, "shards": entries}
    manifest = {"format": FORMAT, "plan": "", "dtype": "<u2", "probes": [], "splits": splits, "tokenizer": {
        "name": "bytes", "fingerprint": ByteTokenizer.fingerprint, "file": "", "eod": "", "bos": "",
        "vocab_size": 257}}
    atomic_files.write_json(folder / "manifest.json", manifest | {"sha256": atomic_files.digest(manifest)})
    return folder


_KEPT: dict[Path, str] = {}  # where each corpus was sent to once, in a bucket that no test harms


def send(folder: Path, url: str) -> str:
    """Publish a corpus, the first time; from then on the server copies what it has, which takes a tenth."""
    fs = storage._connected("s3")
    if folder not in _KEPT:
        kept = f"kept{uuid.uuid4().hex}"
        fs.mkdir(kept)
        publish(folder, f"s3://{kept}/corpus")
        _KEPT[folder] = f"s3://{kept}/corpus"
    for found in storage.find(_KEPT[folder]):
        fs.cp_file(found.path, storage.join(url, found.name))
    return url
