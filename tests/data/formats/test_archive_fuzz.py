"""Damaged and forged archives of clips, images and records: each is read, or refused in one line."""

import gzip
import io
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.data.formats import inputs
from jaxtrain.data.prepare_sequences import audio, image_patches
from jaxtrain.errors import UserError
from tests import fuzzing
from tests.data.formats.test_tar_members import forged, info

SIZES = (0, 1, 511, 513, 2**20, 2**33, 2**60, -1, -512, -(2**40))
KINDS = (tarfile.REGTYPE, tarfile.GNUTYPE_SPARSE, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME,
         tarfile.GNUTYPE_LONGLINK, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, b"Z")
PAX = ({"size": "9" * 25}, {"size": "-1"}, {"path": "/dev/zero"}, {"path": "x" * 10**5}, {"GNU.sparse.major": "1"},
       {"GNU.sparse.size": "8589934592", "GNU.sparse.map": "0,1"}, {"hdrcharset": "BINARY"})
TEXT = b'{"text": "some words of a document"}\n' * 50


def wave(rng: random.Random) -> bytes:
    """A second of sound, whose header may claim anything."""
    size = rng.choice([32000, 0, 2**31, 2**32 - 1])
    head = b"WAVEfmt " + bytes([16, 0, 0, 0, 1, 0, 1, 0]) + b"".join(n.to_bytes(4, "little") for n in (16000, 32000))
    whole, data = (size + 36 & 2**32 - 1).to_bytes(4, "little"), size.to_bytes(4, "little")
    return b"RIFF" + whole + head + bytes([2, 0, 16, 0]) + b"data" + data + bytes(32000)


def image(rng: random.Random) -> bytes:
    """An image, whose header may claim any size."""
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.fromarray(np.zeros((20, 20, 3), np.uint8)).save(out, rng.choice(["png", "bmp", "gif", "jpeg"]))
    content = bytearray(out.getvalue())
    if rng.random() < 0.5:
        at = rng.randrange(8, 40)
        content[at:at + 4] = rng.choice([b"\xff\xff\xff\x7f", bytes(4), b"\0\0\xff\xff"])
    return bytes(content)


def archive(rng: random.Random) -> bytes:
    """A tar of clips, images and texts, with members that lie."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=rng.choice([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT,
                                                                tarfile.PAX_FORMAT])) as tar:
        for n in range(rng.randrange(6)):
            name, content = rng.choice([
                (f"{n}.wav", wave(rng)), (f"{n}.png", image(rng)), (f"{n // 2}.txt", b"said")])
            name = rng.choice(["", "../", "/", "a" * 150 + "/"]) + name if tar.format != tarfile.USTAR_FORMAT else name
            keys = {"pax_headers": rng.choice(PAX)} if rng.random() < 0.3 else {}
            tar.addfile(info(name, len(content), **keys), io.BytesIO(content))
    parts = [out.getvalue()[:-1024 if rng.random() < 0.7 else None]]
    parts += [forged(f"x{rng.choice(['.wav', '.png', '.txt'])}", rng.choice(SIZES), rng.choice(KINDS),
                     rng.choice([b"", bytes(512), b"9" * 512, b"17 size=99999999\n".ljust(512, b"\0")]))
              for _ in range(rng.randrange(4))]
    return b"".join(parts) + bytes(rng.choice([0, 100, 1024]))


def records(rng: random.Random, folder: Path) -> Path:
    """JSON lines, compressed or a table; some become much more than they are."""
    part = rng.choice([b"\n", b"\0", b'{"text": "' + b"x" * 999, b"[" * 10])
    bomb = part * (rng.choice([0, 1, 2**23]) // len(part))
    content = rng.choice([TEXT + bomb, bomb + b"\n" + TEXT])
    kind = rng.choice(["gz", "zst", "jsonl", "parquet"])
    path = folder / ("a.parquet" if kind == "parquet" else "a.jsonl" if kind == "jsonl" else f"a.jsonl.{kind}")
    if kind == "gz":
        content = gzip.compress(content, 1)
        content = gzip.compress(content, 1) if rng.random() < 0.2 else content
    elif kind == "zst":
        zstd = pytest.importorskip("zstandard")
        content = b"".join(zstd.compress(content) for _ in range(rng.choice([1, 3])))
    elif kind == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"text": [f"document {n}" * 9 for n in range(99)]}), path)
        content = path.read_bytes()
    path.write_bytes(content)
    return path


def damaged(rng: random.Random, path: Path) -> None:
    """Change some bytes of a file, or cut it."""
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([0, 1, 3])):
        if content:
            at = rng.choice([rng.randrange(len(content)), rng.randrange(min(len(content), 600)), -1 - rng.randrange(
                min(len(content), 100))])
            content[at] = rng.randrange(256)
    path.write_bytes(content[:rng.randrange(len(content) + 1)] if rng.random() < 0.2 else content)


def all_of(path: Path, rng: random.Random) -> int:
    """Return how many clips, images or records were read."""
    if path.suffix != ".tar":
        with inputs.readable(str(path)):
            return sum(isinstance(one, inputs.Text) for part in inputs.find_pieces(str(path), 2**26)
                       for one in inputs.read(part, "text", most=2**20))
    source: Callable = rng.choice([audio.Audio, image_patches.Images])
    source = source(target=rng.choice(["none", "text"]))
    return sum(1 for task in source.find_tasks([str(path)]) for _ in source.read(0, task, path.parent, {}))


def case(rng: random.Random, folder: Path) -> str:
    """Read a drawn archive."""
    path = folder / "a.tar"
    if rng.random() < 0.6:
        path.write_bytes(archive(rng))
    else:
        path = records(rng, folder)
    if rng.random() < 0.5:
        damaged(rng, path)
    try:
        count = all_of(path, rng)
    except UserError as mistake:
        text = f"{mistake}"
        assert len(text.splitlines()) == 1 and len(text) < 1000 and path.name in text, text[:1000]
        return "refused"
    return "read" if count else "read, of which nothing is used"


def test_hostile_archives_end(tmp_path):
    outcomes = fuzzing.run(case, range(50), tmp_path)
    assert {"refused", "read"} <= outcomes.keys()


if __name__ == "__main__":
    fuzzing.main(case)
