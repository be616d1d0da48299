"""Runs below a folder, and below a URL: what a line says of each, however damaged or large it is."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxtrain import storage
from jaxtrain.checkpoint.mirror import Mirror
from jaxtrain.commands.runs import main
from jaxtrain.distributed import run_processes
from jaxtrain.errors import UserError
from jaxtrain.files import bounded_files, log_tail
from jaxtrain.runs import comparison, run_index, tags
from tests.runs.folders import RUN, make


def listed(capsys, *words):
    assert main(["list", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_runs_are_found_and_summed_up(tmp_path, capsys):
    now = time.time()
    make(tmp_path / "old", began=now - 9000, loss=1.0)
    make(tmp_path / "new" / "deep", checkpoints=(2, 4), ended="failed")
    make(tmp_path / "new" / "deep" / "tuned", ended="", began=now - 2005)
    make(tmp_path / "new" / "deep" / "checkpoints" / "run")  # not looked for there
    os.symlink(tmp_path / "old", tmp_path / "link")
    os.symlink(tmp_path, tmp_path / "new" / "circle")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text("{}")  # of a published model, say
    found = run_index.summaries(f"{tmp_path}")
    assert [Path(one.place).name for one in found] == ["tuned", "deep", "old"]
    deep = found[1]
    assert (deep.state, deep.step, deep.last_step, deep.loss, deep.eval_loss) == ("failed", 4, 4, 1.0, 1.5)
    assert deep.goodput == 0.9 and deep.cost == pytest.approx(run_index.price(RUN["device_kind"]) * 2 * 2000 / 3600)
    assert deep.cost > 1 and deep.config_hash == "0" * 16 and deep.commit == "1" * 40 and deep.size > 5000
    tags.change(tmp_path / "old", ["baseline"])
    lines = listed(capsys, tmp_path).splitlines()
    assert lines[0].split() == ["RUN", "STATE", "STEP", "LOSS", "EVAL", "GOODPUT", "COST", "SIZE", "AGE", "HASH",
                                "COMMIT", "TAGS"]
    assert lines[1].split()[:4] == ["new/deep/tuned", "running", "4/4", "1.0000"]
    lines = [json.loads(line) for line in listed(capsys, tmp_path, "--json", "--sort=loss", "--state=finished,failed")
             .splitlines()]
    assert [one["loss"] for one in lines] == [1.0, 1.0] and all(one["state"] != "running" for one in lines)
    tagged = listed(capsys, tmp_path, "--tag=baseline")
    assert "old" in tagged and "deep" not in tagged
    assert "deep" not in listed(capsys, tmp_path, "--depth=1")
    assert main(["list", f"{tmp_path / 'nowhere'}"]) == 2 and "there is no folder" in capsys.readouterr().err
    assert main(["list", f"{tmp_path}", "--state=done"]) == 2 and "known: running" in capsys.readouterr().err


@pytest.mark.parametrize(("damage", "reason"), [
    (lambda run: (run / "config.json").write_text("{"), "config.json is not valid JSON"),
    (lambda run: (run / "config.json").unlink(), "has no config.json"),
    (lambda run: (run / "run.json").write_text('{"mesh": 3}'), "mesh is not an object"),
    (lambda run: (run / "config.json").write_text('{"train": {"steps": "x"}}'), "train.steps is not a whole number"),
    (lambda run: (run / "tags.json").write_text("[]"), "tags.json is not of the form expected"),
    (lambda run: ((run / "run.json").unlink(), os.mkfifo(run / "run.json")), "run.json"),
])
def test_a_damaged_run_is_a_line_with_the_reason(tmp_path, capsys, damage, reason):
    damage(make(tmp_path / "bad\x1b[2J"))
    make(tmp_path / "right")
    shown = listed(capsys, tmp_path)
    assert reason in shown and "damaged" in shown and "finished" in shown and "\x1b" not in shown


def test_only_the_end_of_a_log_is_read(tmp_path, monkeypatch):
    """A run of a million lines is listed in milliseconds."""
    run = make(tmp_path / "long")
    with open(run / "metrics.jsonl", "wb") as file:
        file.truncate(4 * 10**8)  # of holes, in which no line ends
        file.seek(4 * 10**8)
        file.write(b'\n{"step": 6, "loss": 2.0}\n' * 5000 + b'{"step": 7, "loss": 0.5}\n{"step": 8, "lo')
    read = []
    monkeypatch.setattr(log_tail, "lines_with_ends", lambda path, start: read.append(start) or iter(
        bounded_files.lines_with_ends(path, start)))
    found = run_index.summary(run)
    assert (found.step, found.loss) == (7, 0.5) and min(start for start in read if start) > 4 * 10**8


def test_a_line_that_is_longer_than_the_end_is_found(tmp_path):
    run = make(tmp_path / "run")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": 0.25, "of_layers": [0.0] * 50_000}) + "\n")
    assert run_index.summary(run).loss == 0.25


def test_listing_imports_no_jax():
    code = "import sys, jaxtrain.runs.run_index, jaxtrain.commands.runs; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_tags(tmp_path, capsys):
    run = f"{make(tmp_path / 'run')}"
    assert main(["tag", run, "b", "a.1"]) == 0 and capsys.readouterr().out == "a.1, b\n"
    assert main(["tag", run, "b", "--remove"]) == 0 and tags.of(run) == ["a.1"]
    assert main(["tag", run, "b", "--remove"]) == 2 and "not tagged 'b'; it has a.1" in capsys.readouterr().err
    assert main(["tag", run, "../x"]) == 2 and "'../x' is not a tag" in capsys.readouterr().err
    assert main(["tag", f"{tmp_path}", "x"]) == 2 and "not the workdir of a run" in capsys.readouterr().err
    assert sorted(path.name for path in Path(run).glob("tags*")) == ["tags.json"]


def test_two_runs_are_compared(tmp_path, capsys):
    one = make(tmp_path / "one")
    two = make(tmp_path / "two", config={"train": {"steps": 4, "seed": 1}}, loss=0.5)
    assert main(["compare", f"{one}", f"{two}"]) == 0
    rows = {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert rows["train.seed"] == ["train.seed", "0", "1"] and "train.steps" not in rows
    assert rows["best loss"][2:] == ["1.0000", "at", "step", "4", "0.5000", "at", "step", "1"]
    assert rows["goodput"][1:] == ["90.0%"] * 2 and rows["cost"][1].startswith("$")
    assert main(["compare", f"{one}", f"{one}"]) == 0 and "the configs are the same" in capsys.readouterr().out
    assert main(["compare", f"{one}"]) == 2
    assert main(["show", f"{one}"]) == 0 and "100 (median)" in capsys.readouterr().out
    assert main(["show", f"{one}", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["tokens_per_s"], said["best_loss"], said["best_loss_step"], said["goodput"]) == (100.0, 1.0, 4, 0.9)
    assert main(["compare", f"{one}", f"{two}", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["workdir"], one["state"], one["best_loss"], one["config"]["train.seed"]) for one in found] == [
        (f"{one}", "finished", 1.0, 0), (f"{two}", "finished", 0.5, 1)] and "train.steps" not in found[0]["config"]
    assert main(["show", f"{tmp_path}"]) == 2 and "has no config.json" in capsys.readouterr().err


def test_copies_elsewhere_are_listed_with_what_is_known(tmp_path, capsys):
    """A path and a URL work alike; the mirror of checkpoints says less than a workdir that was copied."""
    run = make(tmp_path / "run", checkpoints=(2, 4))
    place = f"file://{tmp_path}/store"
    Mirror(run / "checkpoints", f"{place}/team/mirror").send(4)
    for file in storage.find(f"file://{run}"):
        storage.put(Path(file.path.removeprefix("file://")), storage.join(f"{place}/copy", file.name))
    check(capsys, place, run)
    assert main(["show", f"{place}/team/mirror"]) == 2 and "has no config.json; give" in capsys.readouterr().err


def check(capsys, place, run):
    copy, mirror = sorted(run_index.summaries(place), key=lambda one: one.place)
    assert copy.place == f"{place}/copy" and (copy.state, copy.step, copy.loss, copy.goodput) == ("finished", 4, 1, 0.9)
    assert mirror.place == f"{place}/team/mirror" and (mirror.state, mirror.step, mirror.last_step, mirror.loss) == (
        "mirror", 4, 4, 1.25)
    assert mirror.cost is None and mirror.commit == "1" * 40 and mirror.size > 4000
    shown = listed(capsys, place)
    assert "mirror: only checkpoints are there" in shown and "team/mirror  mirror    4/4" in shown
    facts = [comparison.facts(f"{where}") for where in (run, f"{place}/copy")]
    for one in facts:
        assert one.pop("last sign").endswith("ago") and "checkpoints" in one
    assert facts[0] == facts[1]
    assert main(["compare", f"{run}", f"{place}/copy"]) == 0 and "configs are the same" in capsys.readouterr().out


@pytest.mark.slow
def test_object_storage(tmp_path, capsys, bucket, network):
    run = make(tmp_path / "run", checkpoints=(4,))
    Mirror(run / "checkpoints", f"{bucket}/team/mirror").send(4)
    for path in (path for path in run.rglob("*") if path.is_file()):
        storage.put(path, f"{bucket}/copy/{path.relative_to(run)}")
    network.calm()
    check(capsys, bucket, run)
    network.shake(3, share=0.2)
    check(capsys, bucket, run)
    network.fault = lambda number, method, path: "forbidden"
    with pytest.raises(UserError, match="check the credentials"):
        run_index.summaries(bucket)


def test_the_config_of_a_run_keeps_its_variant_where_that_names_a_folder(tmp_path):
    make(tmp_path / "run", run={"config_file": "configs/finetune.py:lora:models/base"})
    assert run_index.summary(tmp_path / "run").config == "finetune.py:lora:base"


def test_a_summary_reads_the_newest_lines_and_no_events(tmp_path, monkeypatch):
    """In lines parsed and heartbeats read: a list of hundreds of runs takes as long as these take."""
    run = make(tmp_path / "run")
    steps = [json.dumps({"step": step, "loss": float(step), "grad_norm": 1.0}) + "\n" for step in range(1, 1001)]
    (run / "events.jsonl").write_text('{"kind": "skip"}\n' * 1000)
    parsed, beats = [], []
    values, heartbeats = log_tail._values, run_processes.heartbeats
    monkeypatch.setattr(log_tail, "_values", lambda lines: parsed.extend(lines) or values(lines))
    monkeypatch.setattr(run_processes, "heartbeats", lambda workdir: beats.append(workdir) or heartbeats(workdir))

    def summed_up(*after):
        (run / "metrics.jsonl").write_text("".join([*steps, *after]))
        parsed.clear(), beats.clear()
        made = run_index.summary(run)
        return made.step, made.eval_loss, len(parsed)

    *said, lines = summed_up()
    assert said == [1000, None] and 0 < lines < 100 and len(beats) == 1
    evaluated = json.dumps({"step": 1000, "eval_loss": 0.5}) + "\n"
    *said, lines = summed_up(evaluated, *steps[:300])
    assert said == [300, 0.5] and 300 < lines < 310
    *said, lines = summed_up(evaluated, *steps[:300], evaluated[5:])  # a damaged line: as many as ever are read
    assert said == [300, 0.5] and lines > 1000
