"""Events are whole lines, whoever writes them and however often."""

import os
import subprocess
import sys
from pathlib import Path

from jaxtrain.observe.events import events, record

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
