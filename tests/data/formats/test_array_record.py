"""ArrayRecord files give every record once and in order, whatever its form and however they are cut."""

import json
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from jaxtrain.commands.prepare import main
from jaxtrain.data.formats.inputs import find_tasks, read
from jaxtrain.data.prepare.prepare import Options, prepare

TEXTS = [f"document {i}: " + "é word\n" * (i % 13 * 40) for i in range(100)]


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def field(number: int, content: bytes) -> bytes:
    """Return a field of a protobuf message: a string or a message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(text: str) -> bytes:
    """A tf.train.Example of a float, two integers and the text."""
    features = {"score": field(2, field(1, np.float32(0.5).tobytes())), "ids": field(3, field(1, b"\x05\xac\x02")),
                "text": field(1, field(1, text.encode()))}
    entries = [field(1, field(1, name.encode()) + field(2, feature)) for name, feature in features.items()]
    return field(1, b"".join(entries))


FORMS = {"text": str.encode, "json": lambda text: json.dumps({"id": 1, "text": text}).encode(), "example": example}


def write(path: Path, records: list[bytes], options: str = "group_size:1") -> Path:
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return path


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task_bytes", [1, 3000, 2**26])
@pytest.mark.parametrize("name", ["a.array_record", "a.array_record-00003-of-00010", "a.arrayrecord"])
def test_every_form_gives_every_document_once_and_in_order(tmp_path, monkeypatch, form, task_bytes, name):
    monkeypatch.setattr("jaxtrain.data.formats.array_record.TOGETHER", 500)
    path = write(tmp_path / name, [FORMS[form](text) for text in TEXTS], "group_size:7")
    tasks = find_tasks([str(path)], task_bytes)
    found = [text for task in tasks for piece in task for text in read(piece, "text")]
    assert [text.content.decode() for text in found] == TEXTS and [text.place for text in found] == list(range(100))
    assert {piece.kind for task in tasks for piece in task} == {f"records {form}"}
    assert sum(piece.size for task in tasks for piece in task) == path.stat().st_size
    assert len(tasks) == {1: 100, 2**26: 1}.get(task_bytes, len(tasks)) and (task_bytes != 3000 or len(tasks) > 2)


def test_an_example_is_the_one_that_protobuf_writes():
    """The bytes here are of tf.train.Example(features={"a": bytes_list([b"xy"])}), by the format's definition."""
    assert field(1, field(1, field(1, b"a") + field(2, field(1, field(1, b"xy"))))) == bytes.fromhex(
        "0a0d0a0b0a01611206 0a04 0a027879".replace(" ", ""))


@pytest.mark.slow
def test_any_number_of_workers_writes_the_same_bytes(tmp_path):
    source, options = str(write(tmp_path / "a.array_record", [text.encode() for text in TEXTS])), Options(
        eval_fraction=0.2, task_bytes=400)
    one, two = (prepare([source], tmp_path / str(workers), options, workers).path for workers in (1, 2))
    names = sorted(path.name for path in one.iterdir())
    assert len(names) > 20 and names == sorted(path.name for path in two.iterdir())
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names)


def test_what_is_no_text_is_left_out_and_counted(tmp_path):
    corpus = prepare([str(write(tmp_path / "a.array_record", [b"x", b"\xff", b"", b"\xfe", b"y"]))], tmp_path / "out",
                     Options(eval_fraction=0))
    assert corpus.train.read(0, 4).tolist() == [ord("x"), 256, ord("y"), 256]
    manifest = json.loads((corpus.path / "manifest.json").read_text())
    assert manifest["left_out"] == {"not UTF-8 text": 2, "empty": 1}


def test_a_file_without_records_is_no_input(tmp_path, capsys):
    write(tmp_path / "a.array_record", [])
    assert main([f"--input={tmp_path}", f"--output={tmp_path / 'out'}"]) == 2
    assert "is empty" in capsys.readouterr().err


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("records", "harm", "flags", "words"), [
    ([b"x" * 9] * 9, lambda path: path.write_bytes(path.read_bytes()[:-100]), [], "is not a complete ArrayRecord file"),
    ([b"x" * 9] * 9, lambda path: path.write_bytes(b"text"), [], "is not a complete ArrayRecord file"),
    ([bytes([32 + i % 90]) * 99 for i in range(99)], flipped, [], "is corrupt"),
    ([FORMS["json"]("x"), b"{}"], None, [], "a.array_record, record 1 has no field 'text'"),
    ([FORMS["json"]("x"), b"text"], None, [], "a.array_record, record 1 is not a JSON object"),
    ([example("x"), b"text"], None, [], "a.array_record, record 1 is not a tf.train.Example, but the first record is"),
    ([example("x")], None, ["--text_field=txt"], "record 0 has no feature 'txt'; it has ids, score, text"),
    ([example("x")], None, ["--text_field=ids"], "record 0: 'ids' is not one string of bytes; name another feature"),
])
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, records, harm, flags, words):
    monkeypatch.chdir(tmp_path)
    path = write(Path("a.array_record"), records)
    if harm:
        harm(path)
    assert main(["--input=a.array_record", "--output=out", "--workers=1", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
