"""Events are whole lines, whoever writes them and however often."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.observe.events import events, record
from tests.odd_files import ODD, in_time

ROOT = Path(__file__).parents[2]


def test_lines_of_several_processes_do_not_mix(tmp_path):
    write = ("import sys; from jaxtrain.observe.events import record\n"
             "for n in range(100): record(sys.argv[1], 'test', n=n, by=sys.argv[2], text='x' * 2000)")
    writers = [subprocess.Popen([sys.executable, "-c", write, str(tmp_path), name], cwd=ROOT) for name in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    found = events(tmp_path)
    assert len(found) == 200 and {event["kind"] for event in found} == {"test"}
    for name in "ab":
        assert [event["n"] for event in found if event["by"] == name] == list(range(100))


def test_a_torn_line_is_left_out(tmp_path):
    assert events(tmp_path) == []
    record(tmp_path, "first")
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"kind": "torn')  # the disk was full
    record(tmp_path, "second", where=Path("somewhere"))
    found = [(event["kind"], event.get("where")) for event in events(tmp_path)]
    assert found == [("first", None), ("second", "somewhere")]


def test_a_full_disk_costs_the_event_and_not_the_run(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    record(tmp_path / "nowhere", "first")
    monkeypatch.setattr(os, "write", full)
    record(tmp_path, "second")
    assert events(tmp_path) == []


@pytest.mark.parametrize("line", ["null", "[1]", "3", '{"kind": 3}', "{}", "[" * 100_000, "\udc80"])
def test_a_line_that_is_no_event_is_left_out(tmp_path, line):
    record(tmp_path, "first")
    with open(tmp_path / "events.jsonl", "a", errors="surrogateescape") as file:
        file.write(line + "\n")
    record(tmp_path, "second")
    assert [event["kind"] for event in events(tmp_path)] == ["first", "second"]


@pytest.mark.parametrize("make", ODD[:3])
def test_whatever_lies_in_its_place_costs_the_events_and_not_the_run(tmp_path, make):
    make(tmp_path / "events.jsonl")
    in_time(lambda: [record(tmp_path, "test", text="x" * 10_000) for _ in range(20)])  # more than a pipe holds
    assert in_time(lambda: events(tmp_path)) == []
