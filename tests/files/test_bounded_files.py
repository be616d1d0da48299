"""Small files are read whole or refused in a moment, whatever is in their place."""

import os
import tracemalloc

import pytest

from jaxtrain.errors import UserError
from jaxtrain.files import bounded_files
from jaxtrain.files.bounded_files import Refused, misfit, parsed, read, read_json, reason, user_json, whole_lines
from tests.odd_files import ODD, WRONG, device, fifo, folder, in_time, sparse, unix_socket


@pytest.mark.parametrize("make", [*ODD, unix_socket])
def test_what_is_not_a_small_file_is_refused_at_once(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    make(path := tmp_path.joinpath("f").relative_to(tmp_path))
    with pytest.raises(OSError, match="f") as refused:
        in_time(lambda: read(path))
    assert reason(refused.value).startswith("cannot be read (")
    if make is not sparse:
        with pytest.raises(OSError):
            in_time(lambda: bounded_files.opened(path))


@pytest.mark.parametrize("make", [fifo, device, folder])
def test_what_is_not_a_file_is_not_appended_to(tmp_path, make):
    make(tmp_path / "log")
    with pytest.raises(OSError):
        in_time(lambda: bounded_files.appended(tmp_path / "log"))


def test_appending_goes_on_at_the_end(tmp_path):
    for part in (b"a", b"b"):
        with bounded_files.appended(tmp_path / "log") as file:
            file.write(part)
    assert read(tmp_path / "log") == b"ab"


def test_the_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read(tmp_path / "file", 5) == b"12345"
    with pytest.raises(bounded_files.Refused, match="Larger than 4 bytes"):
        read(tmp_path / "file", 4)


def test_a_file_that_grows_past_the_limit_while_it_is_read(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"12345")
    small = os.stat_result((0o100644, *os.stat(tmp_path / "file")[1:6], 3, 0, 0, 0))
    monkeypatch.setattr(bounded_files.os, "fstat", lambda handle: small)
    with pytest.raises(bounded_files.Refused):
        read(tmp_path / "file", 4)


@pytest.mark.parametrize("make", WRONG)
def test_wrong_json_is_a_value_error(tmp_path, make):
    make(tmp_path / "file")
    with pytest.raises(ValueError) as error:
        read_json(tmp_path / "file")
    assert reason(error.value).startswith("is ")


def test_nesting_is_bounded():
    assert parsed("[" * 100 + "]" * 100, list)
    for content in ("[" * 101 + "]" * 101, b'{"a":' * 101 + b"1" + b"}" * 101):
        with pytest.raises(ValueError, match="nested too deeply"):
            parsed(content, object)
    assert parsed('["' + "[" * 1000 + '"]', list)  # brackets in text do not count
    assert len(parsed("[" + ",".join(["[]"] * 1000) + "]", list)) == 1000  # nor do neighbours


@pytest.mark.parametrize("value, form, expected", [
    (1, int, ""), (True, int, "it is not a whole number"), (True, bool, ""), (None, int | None, ""),
    (1.5, int | float, ""), ("1", int | float, "it is not int | float"), ([1, "a"], [int], "1 is not a whole number"),
    ([1], (int, str), "it is not a list of 2"), ([1, "a"], (int, str), ""), ([1, 2], (int, str), "1 is not text"),
    ({"a": 1}, {"a": int, "b?": int}, ""), ({"a": 1, "b": None}, {"a": int, "b?": int}, "b is not a whole number"),
    ({}, {"a": int}, "it has no 'a'"), ({"a": {"b": [{}]}}, {"a": {"b": [{"c": int}]}}, "a.b.0 has no 'c'"),
    ({"x": [1], "y": 2}, {str: [int]}, "y is not a list"), ({"x": 1}, {str: int, "n": int}, "it has no 'n'"),
])
def test_forms(value, form, expected):
    assert misfit(value, form) == expected


def test_a_users_file(tmp_path):
    path = tmp_path / "file.json"
    assert user_json(path, dict, "--key", "fix it") is None
    path.write_text('{"a": 1}')
    assert user_json(path, {"a": int}, "--key", "fix it") == {"a": 1}
    with pytest.raises(UserError) as error:
        user_json(path, {"a": str}, "--key", "fix it")
    assert str(error.value) == f"--key: {path} is not of the form expected: a is not text; fix it"


def test_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded_files, "LINE", 8)
    path = tmp_path / "log"
    path.write_bytes(b'{"a":1}\n[1]\n{\n{}\n' + b"9" * 8 + b"\n{}\n")
    assert list(whole_lines(path)) == [b'{"a":1}\n', b"[1]\n", b"{\n", b"{}\n", b"{}\n"]
    assert list(whole_lines(path, 8)) == [b"[1]\n", b"{\n", b"{}\n", b"{}\n"]
    assert list(bounded_files.lines_with_ends(path, 14)) == [(b"{}\n", 17), (b"", 26), (b"{}\n", 29)]
    assert list(bounded_files.json_lines(path)) == [{"a": 1}, {}, {}]
    assert list(bounded_files.json_lines(path, {"a": int})) == [{"a": 1}]


@pytest.mark.parametrize("make", ODD)
def test_a_log_that_cannot_be_read_has_no_lines(tmp_path, make):
    make(tmp_path / "log")
    assert in_time(lambda: list(bounded_files.json_lines(tmp_path / "log"))) == []


def test_reading_takes_the_memory_of_the_content_not_of_the_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 5_000_000)
    tracemalloc.start()
    try:
        assert read(tmp_path / "file", 2**30) == b"x" * 5_000_000
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()
    with pytest.raises(Refused):
        read(tmp_path / "file", 4_999_999)
