"""Tables come from recorded lines alone, those of docs/benchmarks.md too."""

from pathlib import Path

import pytest

from jaxtrain.bench import records, tables
from jaxtrain.commands import bench
from jaxtrain.errors import UserError

ROOT = Path(__file__).parents[2]
MEASUREMENTS = sorted((ROOT / "docs" / "measurements").glob("*.jsonl"))
ABOUT = {"time": "2026-01-01T00:00:00+00:00", "commit": "a" * 40, "command": "python -m jaxtrain.bench --config=x",
         "device": "NVIDIA H100 80GB HBM3", "devices": 1, "processor": "P", "cores": 2, "load": 0.5,
         "versions": {"python": "3.12.1", "jax": "0.12.0"}, "environment": {}}
RUN = {**ABOUT, "what": "run", "label": "speed", "name": "8B", "rows": 8, "seq_len": 4096, "accumulation": 2,
       "step_ms": {"median": 1234.56, "p10": 1200.0, "p90": 1300.0}, "tokens_per_s": 26543.2, "mfu": 0.4567,
       "mfu_full": 0.4891, "predicted_ms": 1200.0, "data_wait_share": 0.0012, "compile_s": 61.2,
       "compile_cached": False, "memory": {"peak": 70e9, "compiler": 71e9, "planner": 68e9, "room": 78.1e9}}


def lines(tmp_path, *records_):
    file = tmp_path / "lines.jsonl"
    for record in records_:
        records.append(file, record)
    return file


def test_a_run_is_a_row_and_its_memory_another(tmp_path):
    text = tables.render([lines(tmp_path, RUN)])
    assert "| 8B | 8 x 4,096, 2 parts | 1,234.6 (1,200.0 to 1,300.0) | 26,543 | 45.7 % / 48.9 % | 1,200.0 |" in text
    assert "| 8B | 70 | 71 | 68 | 78.1 | -2.9% | 1,234.6 | 1,200.0 | -2.8% |" in text
    assert "1 x NVIDIA H100 80GB HBM3; python 3.12.1, jax 0.12.0; commit aaaaaaa:\n- `python -m jaxtrain.bench" in text


def test_the_newest_measurement_of_a_name_counts_and_failures_say_why(tmp_path):
    newer = {**RUN, "tokens_per_s": 30000.0}
    failed = {**ABOUT, "what": "run", "label": "speed", "name": "70B", "failed": "out of memory", "rows": 8,
              "seq_len": 4096, "accumulation": 1}
    text = tables.render([lines(tmp_path, RUN, failed, newer)])
    assert "30,000" in text and "26,543" not in text and "| 70B | 8 x 4,096 | out of memory |" in text


def test_places_in_a_document_are_filled(tmp_path):
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- rendered: run speed -->\nold\n<!-- end -->\nafter\n")
    file = lines(tmp_path, RUN)
    assert bench.main(["--render", str(file), f"--into={document}"]) == 0
    text = document.read_text()
    assert "26,543" in text and "old" not in text and text.startswith("before\n") and text.endswith("-->\nafter\n")
    assert bench.main(["--render", str(file), f"--into={document}"]) == 0 and document.read_text() == text
    with pytest.raises(UserError, match="a line of 'run' lacks 'step_ms'"):
        tables.render([lines(tmp_path / "", {**ABOUT, "what": "run", "name": "x"})])
    document.write_text("<!-- rendered: run other -->\n<!-- end -->\n")
    assert bench.main(["--render", str(file), f"--into={document}"]) == 2


def test_a_line_that_was_cut_off_costs_only_itself(tmp_path, capsys):
    file = lines(tmp_path, RUN)
    file.write_text(file.read_text() + '{"what": "ru')
    records.append(file, {**RUN, "name": "next"})
    assert [line["name"] for line in records.read(file)] == ["8B", "next"]
    assert "line 2 of" in capsys.readouterr().err
    file.write_text('{"loss": 3}\n')
    with pytest.raises(UserError, match="line 1 is not a measurement"):
        records.read(file)


def test_cells_keep_to_their_row():
    assert tables.markdown(["a"], [["one\ntwo | three"]]).splitlines()[2] == "| one two / three |"


def test_a_command_can_be_repeated():
    words = ["--config=x.py", "--name=two words", "--output", "here.jsonl", "--output=there.jsonl", "--steps=3"]
    assert records.command_line("-m jaxtrain.bench", words) == (
        "python -m jaxtrain.bench --config=x.py '--name=two words' --steps=3")


def test_the_reason_of_a_failure_is_its_exception():
    traceback = """Traceback (most recent call last):
  File "x.py", line 1, in <module>
jax.errors.JaxRuntimeError: INTERNAL: ptxas failed
--------------------
For simplicity, JAX has removed its internal frames from the traceback of the following exception.
"""
    assert records.reason(traceback) == "jax.errors.JaxRuntimeError: INTERNAL: ptxas failed"
    assert records.reason("predicted: 3 GB\ntrain.remat: 'no' is not supported\n\n").startswith("train.remat: ")
    assert records.reason("") == ""


def test_benchmarks_has_what_was_recorded():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    groups = tables.grouped(line for file in MEASUREMENTS for line in records.read(file))
    assert "<!-- rendered: " in text
    assert tables.filled(text, groups) == text, (
        "run: python -m jaxtrain.bench --render docs/measurements/*.jsonl --into=docs/benchmarks.md")
