"""The entry of a shard describes its files correctly, whatever the sizes of documents and chunks."""

import base64
import hashlib
import zlib

import numpy as np
import pytest

from jaxtrain.data.corpus import shard_writer
from jaxtrain.data.corpus.shard_writer import Origin, ShardWriter


@pytest.mark.parametrize("chunk", [2, 16, 1000])
def test_tokens_hashes_and_checksums_are_those_of_the_files(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(shard_writer, "CHUNK", chunk)
    documents = [np.arange(n, dtype=np.uint32) for n in (3, 0, 1, 40, 7)]
    writer = ShardWriter(tmp_path / "train-00000", np.dtype("<u2"), end=99, trained=True)
    for i, ids in enumerate(documents):
        writer.add(ids, bytes(16), len(ids), Origin(0, i), np.arange(len(ids) + 1) % 2)
    entry = writer.close()
    written = (tmp_path / "train-00000.bin").read_bytes()
    assert np.frombuffer(written, "<u2").tolist() == [id for ids in documents for id in [*ids.tolist(), 99]]
    assert len(entry["sha256"]) == 5
    for name, sha256 in entry["sha256"].items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == sha256
    for name, sums in entry["crc32"].items():
        content = (tmp_path / name).read_bytes()
        expected = [zlib.crc32(content[at: at + chunk]) for at in range(0, len(content), chunk)]
        assert np.frombuffer(base64.b64decode(sums), "<u4").tolist() == expected
