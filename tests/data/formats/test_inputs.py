"""Odd content in input files: each kind is read as it is, counted, or refused in one sentence."""

import gzip
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from jaxtrain.commands import prepare_sequences
from jaxtrain.commands.prepare import main
from jaxtrain.data.formats import conversations, inputs, parquet_pages
from jaxtrain.data.formats.inputs import Piece, Text, find_tasks, read
from jaxtrain.data.prepare import prepare as prepare_module
from jaxtrain.data.prepare.prepare import Options, prepare
from jaxtrain.errors import UserError
from tests.odd_files import device, fifo, folder, in_time


def texts(corpus) -> list[str]:
    ids = corpus.train.read(0, corpus.train.num_tokens)
    return bytes(int(i) if i < 256 else 0 for i in ids).decode().split("\0")[:-1]


def left_out(corpus) -> dict[str, int]:
    return json.loads((corpus.path / "manifest.json").read_text())["left_out"]


def refusal(capsys, tmp_path: Path, *flags: str) -> str:
    assert main([f"--input={tmp_path / 'in'}", f"--output={tmp_path / 'out'}", "--workers=1", *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.fixture
def source(tmp_path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.mark.parametrize("type", [pa.binary(), pa.large_binary(), pa.string(), pa.dictionary(pa.int32(), pa.string())])
def test_bytes_in_parquet_are_text_as_they_are_and_nothing_is_counted(tmp_path, source, type):
    pq.write_table(pa.table({"text": pa.array(["hello", None, "café"]).cast(type)}), source / "a.parquet")
    corpus = prepare([str(source)], tmp_path / "out", Options(eval_fraction=0))
    assert texts(corpus) == ["hello", "café"] and left_out(corpus) == {"no text": 1}


def test_parquet_without_text_is_told(tmp_path, source, capsys):
    pq.write_table(pa.table({"text": [b"\xff", b"x"]}), source / "a.parquet")
    assert left_out(prepare([str(source)], tmp_path / "made", Options(eval_fraction=0))) == {"not UTF-8 text": 1}
    pq.write_table(pa.table({"text": [None, 1]}), source / "a.parquet")
    assert "a.parquet, row 1 of group 0: 'text' is not text; name another field" in refusal(capsys, tmp_path)


@pytest.mark.parametrize("flags", [[], ["--part=0/2"], ["--engine=slurm"], ["audio"]])
def test_an_output_behind_a_url_is_refused(source, tmp_path, monkeypatch, capsys, flags):
    monkeypatch.chdir(tmp_path)
    (source / "a.wav").write_bytes(b"text, too")
    program = prepare_sequences.main if flags == ["audio"] else main
    assert program([*flags, "--input=in", "--output=s3://bucket/x", "--workers=1"]) == 2
    assert "s3://bucket/x is not a folder on this machine; prepare into a folder, then" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("cut", [0, 4, 60, -20])
def test_a_table_that_is_none_is_named(tmp_path, source, capsys, cut):
    pq.write_table(pa.table({"text": ["x" * 99] * 9}), source / "a.parquet")
    content = (source / "a.parquet").read_bytes()
    (source / "a.parquet").write_bytes(content[:cut] if cut >= 0 else content[: cut] + bytes(20))
    assert "a.parquet cannot be read (" in refusal(capsys, tmp_path)


def test_a_table_with_a_broken_row_group_is_named(tmp_path, source, capsys):
    pq.write_table(pa.table({"text": ["x" * 99, "y"] * 99}), source / "a.parquet")
    content = bytearray((source / "a.parquet").read_bytes())
    content[4:60] = b"\xff" * 56
    (source / "a.parquet").write_bytes(content)
    assert "a.parquet cannot be read (" in refusal(capsys, tmp_path)


@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_file_that_goes_away_meanwhile_is_named(tmp_path, source, capsys, monkeypatch, when):
    from jaxtrain.data.formats import inputs

    (source / "a.txt").write_text("x")
    plan, read = prepare_module.plan_tasks, inputs.read

    def planned(*arguments):
        found = plan(*arguments)
        (source / "a.txt").unlink()
        return found

    def gone(*arguments):
        yield from read(*arguments)
        (source / "a.txt").unlink()

    if when == "before":
        monkeypatch.setattr(prepare_module, "plan_tasks", planned)
    else:
        monkeypatch.setattr(inputs, "read", gone)
    assert "a.txt cannot be read (" in refusal(capsys, tmp_path)


DEEP = "[" * 100_000


@pytest.mark.parametrize("name, content, flags, words", [
    ("a.jsonl", DEEP, [], "a.jsonl, its first record, is not a JSON object (is nested too deeply)"),
    ("a.jsonl", DEEP, ["--format=text"], "a.jsonl, line 1 is not a JSON object (is nested too deeply)"),
    ("a.jsonl", '{"messages":' + DEEP, ["--format=messages"], "a.jsonl, line 1 is not a JSON object"),
    ("a.jsonl", '{"text": "x", "x":' * 101 + "1" + "}" * 101, ["--format=text"], "nested too deeply"),
    ("a.jsonl", "null", ["--format=text"], "a.jsonl, line 1 is not a JSON object"),
])
def test_deep_json_is_one_line(tmp_path, source, capsys, name, content, flags, words):
    (source / name).write_text(content + "\n")
    assert words in refusal(capsys, tmp_path, *flags)


def test_json_within_text_that_is_deep_stays_text():
    assert conversations._parsed(DEEP) == DEEP


@pytest.mark.parametrize(("begins", "why"), [
    ("", "not UTF-8 text"), ("words " * 2000, "larger than this machine's memory")], ids=["binary", "text"])
def test_a_sparse_file_is_no_text(tmp_path, begins, why):
    """A TB of zeros, which nobody reads into memory."""
    (tmp_path / "in.txt").write_text(begins)
    os.truncate(tmp_path / "in.txt", 2**40)
    (piece,), = find_tasks(str(tmp_path / "in.txt"))
    assert in_time(lambda: list(read(piece, "text"))) == [f"in.txt: {why}"]


@pytest.mark.parametrize("make", [fifo, device, folder])
def test_what_is_no_file_is_no_input(tmp_path, capsys, make):
    make(tmp_path / "in.txt")
    with pytest.raises(UserError, match=r"has no files|is empty"):
        in_time(lambda: find_tasks(str(tmp_path / "in.txt")))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("task_bytes", [700, 2000, 2**26])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_that_is_too_long_is_left_out_and_the_others_stay(source, tmp_path, name, task_bytes, end):
    long = b'{"text": "' + b"x" * 5000 + b'"}'
    content = b'{"text": "a"}\n' + long + b'\n{"text": "b"}\n\n' + long + end
    packed = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}.get(name.rpartition(".")[2], bytes)
    (source / name).write_bytes(packed(content))
    options = Options(eval_fraction=0, task_bytes=task_bytes, record_bytes=1000, format="text")
    corpus = prepare([str(source)], tmp_path / "out", options)
    assert texts(corpus) == ["a", "b"] and left_out(corpus) == {"a line of more than 1,000 bytes": 2}
    corpus = prepare([str(source)], tmp_path / "more", Options(eval_fraction=0, task_bytes=task_bytes))
    assert corpus.train.num_documents == 4 and left_out(corpus) == {}


def test_a_first_line_that_is_too_long_does_not_decide_the_format(source, tmp_path):
    (source / "a.jsonl").write_text(json.dumps({"text": "x" * 5000}) + '\n{"text": "b"}\n')
    assert texts(prepare([str(source)], tmp_path / "out", Options(eval_fraction=0, record_bytes=1000))) == ["b"]


def test_the_limit_identifies_a_corpus_only_where_it_was_changed():
    assert Options().identity() == Options(record_bytes=Options.record_bytes).identity()
    assert Options().identity() != Options(record_bytes=5).identity()
    with pytest.raises(UserError, match="--record_bytes"):
        Options(record_bytes=0)


def test_a_sparse_file_of_lines_is_not_read_into_memory(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    os.truncate(tmp_path / "a.jsonl", 2**40)
    size = 2**20
    pieces = [Piece("a.jsonl", str(tmp_path / "a.jsonl"), "jsonl", start, start + size, size) for start in (0, size)]
    found = in_time(lambda: [list(read(piece, "text", most=1000)) for piece in pieces])
    assert found == [[Text("a.jsonl, line 1", b"a"), "a.jsonl: a line of more than 1,000 bytes"], []]


def test_a_table_that_inflates_is_left_out_and_the_others_stay(source, tmp_path):
    huge = pa.table({"text": ["x" * 2**20] * 40})
    pq.write_table(huge, source / "a.parquet", compression="zstd", use_dictionary=False)
    pq.write_table(pa.table({"text": ["b"]}), source / "b.parquet")
    assert (source / "a.parquet").stat().st_size < 2**16
    corpus = prepare([str(source)], tmp_path / "out", Options(eval_fraction=0, record_bytes=2**20))
    assert texts(corpus) == ["b"] and list(left_out(corpus).values()) == [1]
    (piece,), = find_tasks(str(source / "a.parquet"))
    assert len(list(read(piece, "text"))) == 40  # with room for it


def _varint(number):
    return bytes([number % 128 + 128]) + _varint(number // 128) if number > 127 else bytes([number])


def test_a_page_that_claims_more_than_the_footer_is_left_out(source, tmp_path):
    pq.write_table(pa.table({"text": ["x" * 20_000]}), source / "a.parquet", compression="zstd", use_dictionary=False)
    (piece,), = find_tasks(str(source / "a.parquet"))
    assert [len(found.content) for found in read(piece, "text", most=1000)] == [20_000]
    content = (source / "a.parquet").read_bytes()
    footer = pq.ParquetFile(source / "a.parquet").metadata.row_group(0).column(0)
    page, = parquet_pages.pages(lambda start, stop: content[start:stop], 4, 4 + footer.total_compressed_size)
    claimed = _varint(2 * page.size), _varint(2 * 1_000_000)  # numbers are doubled, for their sign
    assert len(claimed[0]) == len(claimed[1]) and content.index(claimed[0]) < 20
    (source / "a.parquet").write_bytes(content.replace(*claimed, 1))
    assert list(read(piece, "text", most=1000)) == [
        "a.parquet: a row group that is compressed more than 1,000 to 1, to over 1,000 bytes"]
    pq.write_table(pa.table({"text": ["b"]}), source / "b.parquet")
    assert texts(prepare([str(source)], tmp_path / "out", Options(eval_fraction=0, record_bytes=1000))) == ["b"]


def test_a_row_of_millions_of_nulls_is_left_out(source):
    pq.write_table(pa.table({"text": pa.array([[None] * 3_000_000], pa.list_(pa.int32()))}), source / "a.parquet")
    assert (source / "a.parquet").stat().st_size < 2000
    (piece,), = find_tasks(str(source / "a.parquet"))
    before = pa.default_memory_pool().max_memory()
    assert "compressed more than" in next(iter(read(piece, "text", most=2**20)))
    assert pa.default_memory_pool().max_memory() == before
    with pytest.raises(UserError, match="'text' is not text"):
        list(read(piece, "text"))  # with room for it


@pytest.mark.parametrize(("first", "size"), [(4, 10**9), (10**9, 1), (4, -10)])
def test_a_column_outside_of_the_file_is_one_line(source, first, size):
    pq.write_table(pa.table({"text": ["a"]}), source / "a.parquet")
    column = SimpleNamespace(dictionary_page_offset=None, data_page_offset=first, total_compressed_size=size)
    with pytest.raises(UserError, match=r"a\.parquet cannot be read \(a column lies outside of the file\)"):
        inputs._pages(str(source / "a.parquet"), column)


def test_events_that_inflate_are_refused(source, monkeypatch):
    pq.write_table(pa.table({"user": ["x" * 2**20] * 4}), source / "a.parquet", compression="zstd",
                   use_dictionary=False)
    (piece,), = find_tasks(str(source / "a.parquet"))
    assert inputs.row_group(piece, ["user"]).num_rows == 4
    monkeypatch.setattr(inputs, "RECORD_BYTES", 2**20)
    with pytest.raises(UserError, match="is compressed more than 1,000 to 1"):
        inputs.row_group(piece, ["user"])


def test_a_value_that_repeats_is_in_memory_once(source):
    value = pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int32()), pa.array(["x" * 2**20]))
    pq.write_table(pa.table({"text": value}), source / "a.parquet", store_schema=False)
    (piece,), = find_tasks(str(source / "a.parquet"))
    before = pa.total_allocated_bytes()
    for found in itertools.islice(read(piece, "text"), 2000):
        assert len(found.content) == 2**20 and pa.total_allocated_bytes() - before < 2**28


def test_empty_files_are_called_empty(tmp_path):
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(UserError, match=r"--input: .*a\.jsonl is empty; "):
        find_tasks(str(tmp_path / "a.jsonl"))
    (tmp_path / "b.txt").touch()
    with pytest.raises(UserError, match="has 2 files, all empty; "):
        find_tasks(str(tmp_path))


def test_json_arrays_of_records_are_refused_unless_a_folder_has_more_of_other_things(capsys, tmp_path, source):
    (source / "alpaca.json").write_text(json.dumps([{"instruction": "Say hi", "output": "hi"}], indent=1))
    (source / "more").mkdir()
    (source / "more" / "b.json").write_text('\ufeff [{"text": "a"}]')
    (source / "README.md").write_text("A data set.")
    for given, said in ((source / "alpaca.json", "is one JSON array of records, and records are read one a line; "
                         "convert it (jq -c '.[]' alpaca.json > alpaca.jsonl), and give that file"),
                        (source, f"and 1 more in {source} are each one JSON array of records, and records are read one "
                         "a line; convert each (jq -c '.[]' alpaca.json > alpaca.jsonl), and give the new files")):
        assert main([f"--input={given}", f"--output={tmp_path / 'out'}", "--workers=1"]) == 2
        assert capsys.readouterr().err == f"--input: alpaca.json {said}\n"
    (source / "text.json").write_text('{"a": [1]}')
    (source / "code.py").write_text("print(1)\n" * 20)
    for kept in (source, source / "text.json"):
        assert find_tasks(str(kept))
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe("/arrays/short.json", b'[{"text": "a"}]')
    with pytest.raises(UserError, match=r"short\.json is one JSON array of records"):
        find_tasks("memory://arrays")
