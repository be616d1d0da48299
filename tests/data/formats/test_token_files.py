"""Tokens that other programs wrote: each format, written here from its description, gives its documents."""

import hashlib
import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.commands.prepare import main
from jaxtrain.data.formats import token_files
from jaxtrain.data.formats.inputs import find_tasks, read
from jaxtrain.data.prepare.prepare import Options, prepare, prepare_part
from jaxtrain.errors import UserError

EOD = 256
TEXTS = ["one", "a somewhat longer one", "é", "x"] * 15
DOCUMENTS = [list(text.encode()) for text in TEXTS]


def packed(ids, letter: str) -> bytes:
    return struct.pack(f"<{len(ids)}{letter}", *ids)


def closed(documents=DOCUMENTS) -> list[int]:
    return [id for ids in documents for id in [*ids, EOD]]


def opened(documents=DOCUMENTS) -> list[int]:
    return [id for ids in documents for id in [EOD, *ids]]


def npy(path: Path):
    """Return an array of the file as numpy saves it."""
    head = b"{'descr': '<u4', 'fortran_order': False, 'shape': (%d,), }" % len(closed())
    head = head.ljust(128 - 11) + b"\n"
    path.with_suffix(".npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head
                                         + packed(closed(), "I"))


def npy_of_int64(path: Path):
    buffer = io.BytesIO()
    np.save(buffer, np.array(closed(), ">i8"))
    path.with_suffix(".npy").write_bytes(buffer.getvalue())


def olmo(path: Path):
    """The name of numpy's format without its header."""
    path.with_suffix(".npy").write_bytes(packed(closed(), "H"))


def nanogpt(path: Path):
    path.with_suffix(".bin").write_bytes(packed(closed(), "H"))


def modded(path: Path, magic=20240520, letter="H"):
    """256 numbers, then the tokens; the id stands before each document."""
    head = [magic, 1, len(opened())] + [0] * 253
    path.with_suffix(".bin").write_bytes(packed(head, "i") + packed(opened(), letter))


def llm_c(path: Path):
    modded(path, 20240801, "I")


def datatrove(path: Path, letter="H"):
    ends = np.cumsum([len(ids) + 1 for ids in DOCUMENTS]).tolist()
    path.with_name("a.ds").write_bytes(packed(closed(), letter))
    path.with_name("a.ds.index").write_bytes(packed(ends, "Q"))
    path.with_name("a.ds.metadata").write_text(f"gpt2|2\n{ends[-1]}\n0 T")


def datatrove_of_4_bytes(path: Path):
    datatrove(path, "I")


def megatron(path: Path, documents=DOCUMENTS, letter="H", code=8, gap=0):
    """Every document in sequences, here of two each; some documents bring their end along."""
    sequences = [part for i, ids in enumerate(documents) for part in (ids[:3], [*ids[3:], *[EOD] * (i % 2)])]
    places = np.cumsum([0] + [struct.calcsize(letter) * (len(part) + gap) for part in sequences]).tolist()[:-1]
    index = struct.pack("<QBQQ", 1, code, len(sequences), len(documents) + 1)
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0" + index + packed([len(part) for part in sequences], "i") + packed(places, "q")
        + packed(range(0, len(sequences) + 1, 2), "q"))
    path.with_suffix(".bin").write_bytes(b"".join(packed([*part, *[7] * gap], letter) for part in sequences))


def megatron_of_int32(path: Path):
    megatron(path, letter="i", code=4, gap=2)


FORMATS = [npy, npy_of_int64, olmo, nanogpt, modded, llm_c, datatrove, datatrove_of_4_bytes, megatron,
           megatron_of_int32]


def folder(tmp_path: Path, write) -> str:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in/a")
    return str(tmp_path / "in")


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("task_bytes", [1, 30, 2**26])
@pytest.mark.parametrize("scan", [5, 2**20])
def test_every_format_gives_every_document_once_and_in_order(tmp_path, monkeypatch, write, task_bytes, scan):
    monkeypatch.setattr(token_files, "SCAN", scan)
    tasks = find_tasks([folder(tmp_path, write)], task_bytes, "uint16")
    found = [ids for task in tasks for piece in task for ids in read(piece, "text", EOD)]
    assert [ids.ids.tolist() for ids in found] == DOCUMENTS
    assert len({ids.place for ids in found}) == len(found)
    assert len(tasks) > 30 if task_bytes < 2**26 else len(tasks) == 1


@pytest.mark.parametrize("write", FORMATS)
def test_they_become_the_corpus_that_their_text_becomes(tmp_path, write):
    options = Options(eval_fraction=0, task_bytes=100, token_dtype="uint16")
    corpus = prepare([folder(tmp_path, write)], tmp_path / "out", options)
    assert corpus.train.read(0, corpus.train.num_tokens).tolist() == closed()
    assert corpus.train.num_bytes == sum(len(text.encode()) for text in TEXTS)


@pytest.mark.slow
def test_any_number_of_workers_writes_the_same_bytes(tmp_path):
    source, options = folder(tmp_path, modded), Options(eval_fraction=0.2, task_bytes=64, deduplicate=True)
    one, two = (prepare([source], tmp_path / str(workers), options, workers) for workers in (1, 2))
    names = sorted(path.name for path in one.path.iterdir())
    assert len(names) > 30 and names == sorted(path.name for path in two.path.iterdir())
    assert all((one.path / name).read_bytes() == (two.path / name).read_bytes() for name in names)
    assert one.train.num_documents + one.eval.num_documents == len(set(TEXTS))


def test_equal_documents_are_equal_in_every_format(tmp_path):
    sources = []
    for write in FORMATS[2:]:
        (tmp_path / write.__name__).mkdir()
        write(tmp_path / write.__name__ / "a")
        sources.append(str(tmp_path / write.__name__))
    corpus = prepare(sources, tmp_path / "out", Options(eval_fraction=0, deduplicate=True, token_dtype="uint16"))
    assert corpus.train.num_documents == len(set(TEXTS))


def test_ends_that_follow_each_other_and_a_file_without_a_last_one(tmp_path):
    (tmp_path / "a.bin").write_bytes(packed([EOD, EOD, 1, 2, EOD, EOD, 3], "H"))
    for task_bytes in (1, 4, 100):
        tasks = find_tasks([str(tmp_path)], task_bytes, "uint16")
        found = [ids for task in tasks for piece in task for ids in read(piece, "text", EOD)]
        assert [(ids.place, ids.ids.tolist()) for ids in found] == [(2, [1, 2]), (6, [3])]


def test_a_document_of_many_stretches_is_read_once(tmp_path):
    (tmp_path / "a.bin").write_bytes(packed([*[1] * 1000, EOD, 2], "H"))
    tasks = find_tasks([str(tmp_path)], 20, "uint16")
    found = [len(ids.ids) for task in tasks for piece in task for ids in read(piece, "text", EOD)]
    assert len(tasks) == 101 and found == [1000, 1]


def test_the_wrong_id_for_the_end_is_told_before_a_whole_file_becomes_a_document(tmp_path, monkeypatch):
    (tmp_path / "a.bin").write_bytes(packed([*[1, 2, 3, 0] * 100], "H"))
    monkeypatch.setattr(token_files, "SCAN", 16)
    monkeypatch.setattr(token_files, "LONGEST", 64)
    with pytest.raises(UserError, match=r"a\.bin has no id 256 in 64 tokens"):
        prepare([str(tmp_path / "a.bin")], tmp_path / "out", Options(token_dtype="uint16", eval_fraction=0))


def npy_header(shape, dtype="<u2"):
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + b"\0\0"


ARRAY = io.BytesIO()
np.save(ARRAY, np.zeros((3, 4), np.float32))


@pytest.mark.parametrize(("names", "flags", "words"), [
    ({"a.bin": b"\0\0"}, [], "a.bin has no header with the type of its tokens; name their type with --token_dtype"),
    ({"a.npy": b"\0\0"}, [], "a.npy has no header"),
    ({"a.bin": b"\0\0\0"}, ["--token_dtype=uint16"], "a.bin has 3 bytes, not a whole number of uint16 tokens"),
    ({"a.bin": b"\0\0"}, ["--token_dtype=int16"], "'int16' is not a token type; did you mean 'uint16'?"),
    ({"a.npy": ARRAY.getvalue()}, [], "a.npy has 2 dimensions of float32"),
    ({"a.npy": b"\x93NUMPY\x01\x00v\x00{'descr"}, [], "a.npy is not a complete array"),
    ({"a.bin": packed([20240520, 1, 5] + [0] * 253, "i") + b"\0\0"}, [], "does not have the 5 tokens that its header"),
    ({"a.bin": packed([1, 70000], "I")}, ["--token_dtype=uint32"], "a.bin has id 70000 (document at 0) and bytes"),
    ({"a.bin": packed([1, -1], "q")}, ["--token_dtype=int64"], "has id -1 (document at 0)"),
    ({"a.bin": packed([1, 2**32], "Q")}, ["--token_dtype=uint64"], "has id 4294967296 (document at 0)"),
    ({"a.ds": b"\0\0\0\0"}, [], "a.ds.index cannot be read"),
    ({"a.ds": b"\0\0\0\0", "a.ds.index": packed([3], "Q")}, [], "they do not belong together"),
    ({"a.ds": b"\0\0", "a.ds.index": packed([1], "Q"), "a.ds.loss": b"\1"}, [], "a.ds.loss is a loss mask"),
    ({"a.idx": b"MMIDIDX"}, [], "is not a Megatron index"),
    ({"a.idx": b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2)}, [], "a.idx is shorter than its header declares"),
    ({"a.idx": b"MMIDIDX\0\0" + struct.pack("<QBQQiqqq", 1, 8, 1, 2, 5, 0, 0, 1)}, [], "a.bin cannot be read"),
    *(({"a.idx": b"MMIDIDX\0\0" + struct.pack("<QBQQiqqq", 1, 8, 1, 2, *entry), "a.bin": b"\0\0"}, [], words)
      for entry, words in [((5, 0, 0, 1), "a.bin is shorter than its index declares"),
                           ((1, 2, 0, 1), "a.bin is shorter than its index declares"),
                           ((1, 2**63 - 1, 0, 1), "a.bin is shorter than its index declares"),
                           ((-1, 0, 0, 1), "a.idx has sequences with a negative size or place"),
                           ((1, -2, 0, 1), "a.idx has sequences with a negative size or place"),
                           ((1, 0, 0, 2), "a.idx has documents of sequences that are not there"),
                           ((1, 0, -1, 1), "a.idx has documents of sequences that are not there"),
                           ((1, 0, 1, 0), "a.idx has documents of sequences that are not there"),
                           ((1, 0, 2**62, 2**62), "a.idx has documents of sequences that are not there")]),
    ({"a.idx": b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2**63, 2**63)}, [], "a.idx is shorter than its header"),
    ({"a.ds": b"\0" * 8, "a.ds.index": packed([9, 1, 4], "Q")}, [], "they do not belong together"),
    ({"a.npy": npy_header("(-1,)")}, [], "a.npy is not a complete array"),
    ({"a.npy": npy_header(f"({10**30},)")}, [], "a.npy is not a complete array"),
    ({"a.npy": npy_header("(1,)", "|O")}, [], "a.npy has 1 dimensions of object"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, names, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for name, content in names.items():
        (tmp_path / "in" / name).write_bytes(content)
    assert main(["--input=in", "--output=out", "--workers=1", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.parametrize(("write", "beside"), [(megatron, "a.bin"), (datatrove, "a.ds.index")])
def test_what_lies_beside_is_watched_and_hashed_too(tmp_path, write, beside):
    source, options = folder(tmp_path, write), Options(eval_fraction=0, task_bytes=2**26)
    prepare_part([source], tmp_path / "out", options)  # as far as a run that was killed before the manifest
    path = tmp_path / "in" / beside
    ends = np.frombuffer(path.read_bytes(), "<u8").tolist() if beside.endswith(".index") else []
    path.write_bytes(packed([ends[0] + 1, *ends[1:]], "Q") if ends else bytes(path.stat().st_size))  # as long as before
    corpus = prepare([source], tmp_path / "out", options)
    assert corpus.manifest_hash == prepare([source], tmp_path / "fresh", options).manifest_hash
    assert corpus.train.read(0, corpus.train.num_tokens).tolist() != closed()
    told = json.loads((corpus.path / "manifest.json").read_text())["inputs"][0][0]["sha256"]
    assert len(told) == 2 and told[beside] == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("write", FORMATS)
def test_a_plan_fetches_no_tokens(tmp_path, monkeypatch, write):
    from jaxtrain import storage

    source, url, fetched = folder(tmp_path, write), f"memory://plan/{write.__name__}", []
    for path in (tmp_path / "in").iterdir():
        storage.put(path, f"{url}/{path.name}")
    here = storage.here
    monkeypatch.setattr(storage, "here", lambda path: fetched.append(path) or here(path))
    local, remote = (find_tasks([where], 64, "uint16") for where in (source, url))
    assert [[piece.identity() for piece in task] for task in local] == [
        [piece.identity() for piece in task] for task in remote]
    assert not [path for path in fetched if path.startswith("memory") and not path.endswith((".idx", ".index"))]
    assert [ids.ids.tolist() for task in remote for piece in task for ids in read(piece, "text", EOD)] == DOCUMENTS
