"""jaxtrain data trace: the steps of a run that saw a document, the way back, and a run that goes on without it."""

import contextlib
import json
import shutil
from collections import defaultdict
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.checkpoint import CheckpointManager
from jaxtrain.checkpoint.commands import restore_to
from jaxtrain.commands.data import main
from jaxtrain.config.load import load_config
from jaxtrain.data.corpus.text_cache import load_corpus
from jaxtrain.data.loading.batches import train_batches
from jaxtrain.data.loading.skipped_batches import SkippedBatches, remaining
from jaxtrain.data.prepare.prepare import Options, prepare
from jaxtrain.data.tracing.found_documents import find, numbered
from jaxtrain.runs.traced_run import open_traced

ROOT = Path(__file__).parents[2]
STEPS = 40
KEYS = {"data.global_batch_size": 2, "data.seq_len": 32, "train.steps": STEPS, "train.eval_every": 0}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A corpus of 300 documents, and a run with checkpoints of steps 10, 20 and 30 that is at step 33."""
    folder = tmp_path_factory.mktemp("traced")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": f"number {i}. " + f"word{i} " * (3 + i % 9)}) + "\n"
                                            for i in range(300)))
    prepare([str(folder / "a.jsonl")], folder / "corpus", Options(eval_fraction=0.1))
    work = folder / "work"
    work.mkdir()
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with contextlib.closing(CheckpointManager(work / "checkpoints", keep=9)) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, {"w": jax.device_put(np.float32(step), here)}, {"step": step, "time": 1e9})
        checkpoints.wait()
    (work / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, 34)))
    return folder


@pytest.fixture
def work(made, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(made / "cache"))
    shutil.copytree(made / "work", tmp_path / "work")
    config = load_config("configs/gpt.py:tiny", KEYS | {"data.source": str(made / "corpus")})
    (tmp_path / "work/config.json").write_text(json.dumps(config.to_dict()))
    return tmp_path / "work"


def ran(capsys, *argv, status=0):
    assert main(["trace", *map(str, argv)]) == status
    found = capsys.readouterr()
    return found.err if status else [json.loads(line) for line in found.out.splitlines()] if "--json" in argv else (
        found.out)


def by_look(work, steps=STEPS) -> dict[int, set[int]]:
    """The steps that have each document of the training split, from all batches that are not skipped."""
    data = load_config(work / "config.json").data
    corpus = load_corpus(data)
    batches = remaining(train_batches(data, corpus), SkippedBatches.read(work) or SkippedBatches())
    found = defaultdict(set)
    for step in range(steps):
        for row in range(batches.shape(step)[0]):
            _, rows, number = batches.origin(step, row)
            for place in rows.places(number):
                found[corpus.train.document(place)[1]].add(step)
    return found


def test_documents_and_the_way_back(work, capsys):
    truth = by_look(work)
    by_first = sorted(truth, key=lambda number: min(truth[number]))
    late = next(number for number in by_first if min(truth[number]) > 12)
    numbers = [by_first[0], late, next(number for number in range(250) if number not in truth)]
    *documents, summary = ran(capsys, work, "--document", *numbers, "--json")
    for number, one in zip(numbers, documents, strict=True):
        assert one["document"] == f"{number}" and one["origin"].startswith("a.jsonl byte ")
        assert set(one["steps_done"]) == {step for step in truth[number] if step < 33}
        assert set(one["steps_to_come"]) == {step for step in truth[number] if step >= 33}
        assert {row["step"] for row in one["seen"]} == truth[number]
    assert summary["redo"] | {"commands": 0} == {
        "first_seen": 0, "from_step": 0, "to_step": 32, "checkpoint": None, "checkpoints_that_have_it": [10, 20, 30],
        "commands": 0}
    run, firsts = open_traced(f"{work}"), set()
    for number, steps in truth.items():
        if min(steps, default=99) < 33:
            redo = run.redo(run.seen([find(run.corpus, f"{number}")[0].stretch])[0])
            firsts.add(min(steps))
            assert redo is not None and redo.first == min(steps) and redo.done == 33
            assert redo.checkpoint == max((step for step in (10, 20, 30) if step <= min(steps)), default=None)
    assert firsts & {10, 20, 30}, "a checkpoint has the steps before its number"
    first = min(truth[late])
    summary = ran(capsys, work, "--document", late, "--json")[-1]["redo"]
    assert summary["first_seen"] == first and summary["checkpoint"] == first // 10 * 10
    assert summary["checkpoints_that_have_it"] == [step for step in (10, 20, 30) if step > first]
    shown = ran(capsys, work, "--document", late)
    assert f"step {first} (done): row" in shown and all(f"\n  {line}\n" in shown for line in summary["commands"])
    assert f"jaxtrain checkpoint restore-to {work} {summary['checkpoint']}" in shown
    evaluated = next(one for one in ran(capsys, work, "--document", "a.jsonl", "--json") if one.get("split") == "eval")
    assert evaluated["seen"] == [] and "(eval)" in evaluated["document"]


def test_a_run_that_skips_a_document(work, capsys):
    """The batches to come with it are skipped, and so are those that come in their place and have it."""
    truth, later = by_look(work), by_look(work, STEPS + 2)
    number = next(number for number in truth if min(truth[number]) > 12 and len(later[number]) > len(truth[number]))
    refused = ran(capsys, work, "--document", number, "--skip", work, status=2)
    back = min(truth[number]) // 10 * 10
    assert f"--skip: checkpoint 30 has it, from batch {min(truth[number])} on; first go back: jaxtrain checkpoint " \
        f"restore-to {work} {back}\n" == refused
    restore_to(work, back)
    assert "The run skips " in ran(capsys, work, "--document", number, "--skip", work)
    record = SkippedBatches.read(work)
    assert record is not None and record.agrees(SkippedBatches(), back) and {*record.batches} >= truth[number]
    left = by_look(work)
    assert number not in left and max(record.batches) >= STEPS
    run, found = open_traced(f"{work}"), {}
    for one, seen in zip(every := [*run_documents(run)], run.seen([one.stretch for one in every]), strict=True):
        if steps := {row.step for row in seen} - {None}:
            found[one.number] = steps
    assert found == left != truth
    shown = ran(capsys, work, "--document", number)
    assert f"batch {record.batches[0]}, skipped: row" in shown and "No step that is done saw it" in shown
    assert f" of {back} done" in shown and "the state of the run has nothing of it" not in shown
    aside = [f"{step}.set_aside" for step in (10, 20, 30) if step > min(truth[number])]
    summary = ran(capsys, work, "--document", number, "--json")[-1]
    assert summary["done"] == back and summary["redo"] is None and summary["unused_checkpoints"] == aside
    assert f"delete them too: {', '.join(f'{work}/checkpoints/{name}' for name in aside)}\n" in shown
    for name in aside:
        shutil.rmtree(work / "checkpoints" / name)
    assert "the state of the run has nothing of it." in ran(capsys, work, "--document", number)
    lines = (work / "metrics.jsonl").read_text().splitlines(keepends=True)
    (work / "metrics.jsonl").write_text("".join(lines[:back + 2]))  # it was started again
    assert f" of {back + 2} done" in ran(capsys, work, "--document", number)
    assert "The run skips all batches" in ran(capsys, work, "--document", number, "--skip", work)
    other = next(one for one in truth if one != number)  # one more, in a new workdir from the start
    new = work.parent / "new"
    ran(capsys, work, "--document", other, "--skip", new)
    shutil.copy(work / "config.json", new)
    assert {number, other}.isdisjoint(by_look(new))
    assert "has another run" in ran(capsys, work, "--document", other, "--skip", new, status=2)


def test_a_text_and_an_evaluation_set(work, capsys, made, tmp_path):
    truth, texts = by_look(work), (made / "a.jsonl").read_text().splitlines()
    one, summary = ran(capsys, work, "--text", "number 17. word17", "--json")
    number = int(one["document"].split()[0])
    assert one["bytes"] == [0, 17] and one["text_tokens"] == [0, 17] and one["same_tokens"] and "redo" in summary
    if one["split"] == "train":
        assert {row["step"] for row in one["seen"]} <= truth[number]
    assert "no document has exactly this text" in ran(capsys, work, "--text", "Number 17.")
    (tmp_path / "items.jsonl").write_text("".join(json.dumps({"question": json.loads(texts[i])["text"].upper()}) + "\n"
                                                  for i in range(0, 60, 3)) + '{"question": "too short"}\n')
    *items, summary = ran(capsys, work, "--eval", tmp_path / "items.jsonl", "--json", "--ngram=8")
    known = load_corpus(load_config(work / "config.json").data).train.num_documents
    assert summary["exact"] > 5 and summary["short"] > 0 and known < 300
    assert summary["exact"] + summary["near"] + summary["clean"] + summary["short"] == summary["items"] == 21
    for item in items:
        for place in item["found_in"]:
            steps = {*place["steps_done"], *place["steps_to_come"]}
            assert steps == truth[int(place["document"])]
    trained = [item for item in items if any(place["steps_done"] for place in item["found_in"])]
    assert summary["seen_by_steps_done"] == len(trained) > 0
    shown = ran(capsys, work, "--eval", tmp_path / "items.jsonl", "--ngram=8")
    assert f"21 items: {summary['exact']} share 8 words in a row" in shown and " done, " in shown
    short = ran(capsys, work, "--eval", tmp_path / "items.jsonl", "--ngram=40")  # no item has so many words
    assert " share 40 words in a row, or all of an item that has fewer, with a training document, " in short
    alone = ran(capsys, made / "corpus", "--eval", tmp_path / "items.jsonl", "--ngram=8", "--json")
    assert [item["verdict"] for item in alone[:-1]] == [item["verdict"] for item in items]
    assert not any("steps_done" in place for item in alone[:-1] for place in item["found_in"])


def test_a_run_that_has_not_begun(work, made, capsys):
    keys = [f"--config.{key}={value}" for key, value in KEYS.items()] + [f"--config.data.source={made / 'corpus'}"]
    number = next(iter(by_look(work)))
    one, summary = ran(capsys, "configs/gpt.py:tiny", "--document", number, "--json", *keys)
    assert one["steps_done"] == [] and set(one["steps_to_come"]) == by_look(work)[number] and summary["redo"] is None
    assert "will be seen by" in ran(capsys, "configs/gpt.py:tiny", "--document", number, *keys)
    longer = ran(capsys, "configs/gpt.py:tiny", "--document", number, "--json", *keys, "--config.train.steps=0",
                 "--config.train.epochs=3")[0]
    assert len({row["epoch"] for row in longer["seen"]}) == 3


def test_a_recorded_run_is_traced_as_it_was(work, made, capsys):
    """Only what a resumed run may change may be set: other rows, or batches, are not what the run saw."""
    asked = ran(capsys, work, "--document=1", "--json")
    for key in ("data.seed=7", "data.seq_len=16", "data.global_batch_size=4", "train.steps=50"):
        told = ran(capsys, work, "--document=1", f"--config.{key}", status=2)
        assert told.startswith(f"CORPUS_OR_RUN: {work} holds a run with {key.partition('=')[0]}=")
        assert f", this config has {key.partition('=')[2]}; leave that key out" in told and told.count("\n") == 1
    moved = work.parent / "moved"
    shutil.copytree(made / "corpus", moved)
    again = ran(capsys, work, "--document=1", "--json", f"--config.data.source={moved}", "--config.data.seq_len=32",
                "--config.data.prefetch=1")
    assert again == asked


def test_mistakes(work, made, capsys, tmp_path):
    def config(**keys):
        found = json.loads((work / "config.json").read_text())
        for key, value in keys.items():
            section, name = key.split("__")
            found[section][name] = value
        (work / "config.json").write_text(json.dumps(found))

    for argv, words in (
            ([work], "command line: it does not say what to trace"),
            ([work, "--document=1", "--text=a"], "--document and --text are given"),
            ([work, "--document=5000"], "there is no document 5000"),
            ([work, "--document=1", "--workers=0"], "--workers"),
            (["/nope", "--document=1"], "CORPUS_OR_RUN: /nope does not exist"),
            ([made / "corpus", "--document=1", "--config.data.seq_len=8"], "is a corpus, which has no config"),
            ([made / "corpus", "--document=1", "--skip", work], "without a run"),
            ([work, "--eval=/nope", "--skip", work], "--skip: an evaluation set"),
            ([work, "--document=1", "--skip", "/proc/x"], "--skip: /proc/x cannot be written (No such file"),
            ([work, "--document=1", "--skip", made / "a.jsonl"], "a.jsonl cannot be written (File exists)"),
            ([work, "--document=1", "--skip", made / "a.jsonl/x"], "x cannot be written (Not a directory)"),
            ([work, "--document", next(iter(by_look(work))), "--skip", "/proc/self"], "/proc/self cannot be written"),
            ([work, "--eval=/nope"], "--eval: /nope cannot be read"),
            ([work, "--document=1", "--stop"], "there is no such flag")):
        assert words in ran(capsys, *argv, status=2)
    assert "no document has exactly this text" in ran(capsys, made / "corpus", "--text=\udcff")  # $'\\xff' of a shell
    assert "document 1: a.jsonl byte " in ran(capsys, made / "corpus", "--document=1")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/manifest.json").write_text("{")
    assert ran(capsys, tmp_path / "damaged", "--document=1", status=2).startswith("CORPUS_OR_RUN: ")
    (tmp_path / "one.txt").write_text("the only text there is\n" * 9)
    assert "--skip: nearly every batch has it" in ran(
        capsys, "configs/gpt.py:tiny", f"--config.data.source={tmp_path / 'one.txt'}", "--document=0", "--skip",
        tmp_path / "skipping", "--config.data.seq_len=16", "--config.data.global_batch_size=12",
        "--config.train.steps=4", "--config.optimizer.warmup_steps=1", status=2)
    assert not (tmp_path / "skipping/skipped_batches.json").exists()
    (work / "run.json").write_text(json.dumps({"data_manifests": {"": "0" * 64}}))
    assert "was trained on another version of it" in ran(capsys, work, "--document=1", status=2)
    (work / "run.json").write_text(json.dumps({"own_parts": {"data": {"class": "Mine"}}}))
    assert ran(capsys, work, "--document=1", status=2).startswith("data: the run trained on batches given by data=")
    (work / "run.json").unlink()
    config(rl__prompts="a", rl__reward="b", rl__group_size=2, rl__max_new_tokens=8)
    assert ran(capsys, work, "--document=1", status=2).startswith("rl.prompts: batches are made of the answers")


@pytest.mark.slow
def test_training_goes_on_without_it(work, made, tmp_path):
    """A run that goes back and skips a document ends as one that skipped it from the start, to the bit."""
    config = load_config("configs/gpt.py:tiny", KEYS | {
        "data.source": str(made / "corpus"), "data.global_batch_size": 8, "data.seq_len": 8, "checkpoint.every": 10,
        "checkpoint.keep": 9})
    jt.train(config, tmp_path / "run")
    run = open_traced(f"{tmp_path / 'run'}")
    stretches = [document.stretch for document in run_documents(run) if (
        redo := run.redo(run.seen([document.stretch])[0])) and redo.first > 12][:1]
    redo = run.redo(run.seen(stretches)[0])
    assert redo is not None and redo.checkpoint in (10, 20, 30) and redo.done == STEPS
    restore_to(tmp_path / "run", redo.checkpoint)
    skipped = open_traced(f"{tmp_path / 'run'}").skip(stretches, tmp_path / "run")
    assert skipped and open_traced(f"{tmp_path / 'run'}").skip(stretches, tmp_path / "fresh") == skipped
    ends = [jt.train(config, tmp_path / name).params for name in ("run", "fresh")]
    assert all(np.array_equal(*map(np.asarray, pair)) for pair in zip(*map(jax.tree.leaves, ends), strict=True))
    assert run.redo(open_traced(f"{tmp_path / 'run'}").seen(stretches)[0]) is None


def run_documents(run):
    return (numbered(run.corpus, "", "train", number) for number in range(run.corpus.train.num_documents))
