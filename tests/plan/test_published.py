"""The comparison with published results: its rows, what is recorded of them, its page, and the program it predicts."""

import dataclasses
import json

import pytest

from tools.benchmarks import bench_published, published_rows, published_tables
from tools.benchmarks import published_predictions as predictions
from tools.benchmarks.published_rows import Row

ROW = Row("a run", "a system", "Llama-3.1 8B", "h100", 8, 4096, 16, {"fsdp": 8}, 9_000, "tokens", source="a table",
          address="https://example.com")


@pytest.fixture(scope="module")
def rows():
    return published_rows.rows()


def test_rows_are_as_the_files_promise(rows):
    assert len(rows) > 500 and published_rows.problems(rows) == []


@pytest.mark.parametrize(("change", "said"), [
    ({"model": "Llama-9"}, "model is unknown"), ({"target": "h1"}, "target is unknown"),
    ({"unit": "miles"}, "unit is unknown"), ({"mesh": {"fsdp": 4}}, "another number of devices"),
    ({"printed": 0}, "not positive"), ({"address": ""}, "no address")])
def test_a_wrong_row_is_told(change, said):
    (problem,) = published_rows.problems([dataclasses.replace(ROW, **change)])
    assert said in problem
    assert "given twice" in published_rows.problems([ROW, ROW])[0]


def test_rows_are_divided_by_what_the_planner_is_asked(rows):
    """The rule must not change: a row that is held out today stays so."""
    assert sum(row.fitted for row in rows) == 39
    assert (ROW.question, ROW.half) == (dataclasses.replace(ROW, release="2", printed=1, name="b").question, ROW.half)
    halves = {dataclasses.replace(ROW, global_batch=8 * n).half for n in range(1, 9)}
    assert halves == {"open", "held out"}
    assert ROW.half == ("held out" if int(ROW.question, 16) % 2 else "open")
    assert dataclasses.replace(ROW, reached={"attention": 0.1}).half == ROW.half, "a fit moves no row"
    of = {}
    for row in rows:
        of.setdefault(row.question, set()).add(row.half)
    assert all(len(halves) == 1 for halves in of.values())
    counts = {half: sum(row.half == half for row in rows) for half in ("fitted", "open", "held out")}
    assert counts["held out"] > 250 and counts["open"] > 200


@pytest.mark.parametrize(("unit", "printed", "seconds"), [
    ("tokens", 1000, 8.192), ("seconds", 3.0, 3.0), ("TFLOP/s", 400, 8192 * 5e10 / 400e12),
    ("MFU", 0.4, 8192 * 5e10 / (0.4 * 989e12))])
def test_every_unit_is_a_time(unit, printed, seconds):
    assert dataclasses.replace(ROW, unit=unit, printed=printed).seconds(5e10) == pytest.approx(seconds)


def test_micro_batches_are_passes_or_those_of_a_pipeline():
    keys = dataclasses.replace(ROW, micro_batch=1).keys("none")
    assert keys["train.accumulation"] == 2
    staged = dataclasses.replace(ROW, mesh={"stage": 4, "data": 2}, micro_batch=2, schedule="interleaved", chunks=2)
    keys = staged.keys("none")
    assert (keys["pipeline.microbatches"], keys["pipeline.chunks"], keys["train.accumulation"]) == (4, 2, 1)


def test_a_machine_is_like_its_chip():
    row = dataclasses.replace(ROW, target="a3")
    assert (row.chip, row.machine.name) == ("h100", "h100")
    assert row.machine.links[1].bandwidth < published_rows.machines()["h100"].links[1].bandwidth


def test_kernels_that_are_others_have_their_own_rate():
    row = dataclasses.replace(ROW, reached={"flat_attention": 0.1})
    assert row.machine.efficiency == {**ROW.machine.efficiency, "flat_attention": 0.1} and row.question != ROW.question


def test_every_row_has_one_record(rows):
    assert {row.question for row in rows} == set(predictions.recorded())


def test_errors_are_of_tokens_a_second():
    line = {"seconds": 8.192, "flops": 1.0, "platform": "cuda", "experts": 0}
    one = predictions.Answer(dataclasses.replace(ROW, printed=800), line)
    assert (one.predicted, one.published, one.error) == (1000, 800, pytest.approx(0.25))
    assert not one.inside and predictions.Answer(dataclasses.replace(ROW, printed=1000), line).inside
    assert predictions.Answer(ROW, {**line, "platform": "rocm"}).inside is None
    found = predictions.summary([one, predictions.Answer(dataclasses.replace(ROW, printed=1000), line)])
    assert (found["rows"], found["median"], found["near"]) == (2, pytest.approx(0.125), 0.5)


def test_the_page_is_made_from_the_record():
    page = published_tables.PAGE.read_text()
    assert published_tables.rendered(page, predictions.answers()) == page, (
        "run python -m tools.benchmarks.bench_published --update")
    for kind in (*published_tables.GROUPS, "rows", "refused", "sources"):
        assert f"<!-- rendered: published {kind} -->" in page


def test_the_command_of_the_page_prints_its_tables(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench_published", "--rows=v6e", "--parts"])
    assert bench_published.main() == 0
    said = capsys.readouterr().out
    assert "| held out |" in said and "| v6e |" in said and "| v5p |" not in said
    assert "MaxText Llama-3.1 8B, 8 v6e (fitted): 7,139 published," in said
    assert "python -m tools.benchmarks.bench_published\n" in published_tables.PAGE.read_text()


def test_what_is_recorded_is_not_asked_again(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(predictions, "RECORD", tmp_path / "record.jsonl")
    monkeypatch.setattr(published_tables, "PAGE", tmp_path / "none.md")
    monkeypatch.setattr(predictions, "predict", lambda row: asked.append(row.name) or {
        "question": row.question, "refused": "no"})
    for again, count in ((False, 1), (False, 1), (True, 2)):
        bench_published.update("MaxText Llama-3.1 8B, 8 v6e", again)
        assert len(asked) == count
    assert list(predictions.recorded()) == [json.loads((tmp_path / "record.jsonl").read_text())["question"]]


def test_the_planner_s_page_says_what_the_tables_say():
    text = " ".join((published_rows.ROOT / "docs/planner.md").read_text().split())
    found = [one for one in predictions.answers() if not one.refused and one.row.half == "held out"]
    for program in ("", *{published_tables.program(one) for one in found}):
        mine = predictions.summary([one for one in found if program in ("", published_tables.program(one))])
        assert f"{mine['rows']:.0f}" in text and f"{100 * mine['median']:.1f} %" in text, program
    every, alike = (predictions.summary(mine) for mine in (
        found, [one for one in found if published_tables.program(one) == "alike, dense"]))
    assert f"the median error is {100 * alike['median']:.1f} %, and {100 * alike['near']:.0f} % are within 20 %" in text
    assert f"the median is {100 * every['median']:.1f} %, and {100 * every['near']:.0f} % are within 20 %" in text


@pytest.mark.parametrize(("change", "said"), [
    ({"mesh": {"stage": 8}}, "other pipeline"), ({"precision": "mxfp8"}, "other experts"), ({}, "alike, dense"),
    ({"precision": "fp8"}, "alike, experts"),
    ({"system": "llm-foundry", "seq_len": 8192}, "other attention"), ({"system": "llm-foundry"}, "alike, dense")])
def test_programs_are_told_apart_by_the_row_alone(change, said):
    line = {"experts": 8 if said.endswith("experts") else 0}
    assert published_tables.program(predictions.Answer(dataclasses.replace(ROW, **change), line)) == said


@pytest.mark.parametrize("name", [
    "MaxText (JAX-Toolbox) Llama-2 7B, 8 h100", "llm-foundry MPT 7B, 8 h100, rows of 2048",
    pytest.param("MaxText Llama-3.1 8B, 8 v6e", marks=pytest.mark.slow),
    pytest.param("Megatron-Bridge 26.04 Llama-3.1 70B, 64 gb200, fp8", marks=pytest.mark.slow),
    pytest.param("Megatron-Bridge 26.04 Llama-3.1 70B, 64 gb200, mxfp8", marks=pytest.mark.slow),
    pytest.param("Automodel Qwen3-30B-A3B, 8 h100", marks=pytest.mark.slow)])
def test_the_record_is_what_the_planner_says_today(rows, name):
    row = next(row for row in rows if row.name == name)
    said, now = predictions.recorded()[row.question], predictions.predict(row)
    assert now["seconds"] == pytest.approx(said["seconds"], rel=0.01)
    assert now["gb"] == pytest.approx(said["gb"], rel=0.02) and now["flops"] == said["flops"]


@pytest.mark.slow
def test_attention_is_a_kernel_on_gpus_and_tpus(rows):
    found = {row.name: row for row in rows}
    (gpu,) = found["MaxText (JAX-Toolbox) Llama-2 7B, 8 h100"].predict()
    (tpu,) = found["MaxText Llama-3.1 8B, 8 v6e"].predict()
    assert gpu.time.parts["attention"] > 0
    model, batch, length = tpu.config.model, 3, tpu.config.data.seq_len
    scores = 4 * batch * model.num_heads * length**2  # float32, of one layer
    assert tpu.memory["working memory"] < scores
    # Blocks of 1,024: 36 of 64 are computed, in the first pass, again in the backward pass, and by seven products.
    blocks = 2 * batch * model.num_layers * model.num_heads * model.head_dim * length**2 * 36 / 64
    rate = tpu.target.peak["bfloat16"] * tpu.target.efficiency["attention"]
    assert abs(tpu.time.parts["attention"] / (blocks * (2 + 2 + 7) / rate) - 1) < 0.02
