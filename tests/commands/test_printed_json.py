"""With --json, a command prints JSON objects only, one a line, with the same keys and the numbers of its table."""

import importlib
import json

import pytest

from jaxtrain.distributed import authentication
from jaxtrain.main import main as train
from tests.tiny import tiny_flags

pytestmark = pytest.mark.usefixtures("cache")
KEYS = ["model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32",
        "data.global_batch_size=8", "train.steps=2", "train.eval_every=0", "checkpoint.every=1"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The flags of a run, its workdir after two steps, and the folder of text that it read."""
    flags, workdir = tiny_flags(tmp_path_factory, KEYS), tmp_path_factory.mktemp("made") / "run"
    assert train([*flags, f"--workdir={workdir}"]) == 0
    return flags, workdir, flags[-1].partition("data.source=")[2]


@pytest.fixture
def printed(capsys):
    """A function that returns a command's standard output, and refuses any other end than status 0."""
    def run(name, *words):
        capsys.readouterr()
        assert importlib.import_module(f"jaxtrain.commands.{name}").main([*map(str, words)]) == 0, capsys.readouterr()
        return capsys.readouterr().out

    return run


@pytest.fixture
def objects(printed):
    def objects_of(*words):
        return [json.loads(line, parse_constant=pytest.fail) for line in printed(*words, "--json").splitlines()]

    return objects_of


def test_elastic(made, objects, printed):
    flags, workdir, _ = made
    words, flags = ["elastic", workdir, "--min_processes=1", "--processes=4"], [*flags, "--config.mesh.data=4"]
    found = [json.loads(line) for line in printed(*words, "--json", "--", *flags).splitlines()]
    text = printed(*words, "--", *flags).splitlines()
    assert [one["processes"] for one in found] == [int(line.split()[0]) for line in text] and found
    assert found[0]["mesh"].keys() == {"data", "fsdp", "stage", "context", "expert", "tensor"}


def test_top(made, objects, printed):
    _, workdir, _ = made
    (found,) = objects("top", workdir)
    *_, last, evaluation = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    assert (found["metrics"], found["evaluation"]) == (last, evaluation)
    assert f"{last['loss']:.4f}" in printed("top", workdir, "--once")
    assert (found["state"], found["step"], found["last_step"], found["checkpoints"]) == ("finished", 2, 2, [1, 2])
    (workdir.parent / "other").mkdir()
    (workdir.parent / "other" / "run.json").write_text("{}")
    (workdir.parent / "other" / "config.json").write_text("no JSON")
    every = {one["workdir"]: one["state"] for one in objects("top", workdir.parent)}
    assert every == {f"{workdir}": "finished", f"{workdir.parent}/other": "damaged"}


def test_checkpoint(made, objects, printed):
    _, workdir, _ = made
    assert [(one["step"], one["good"], one["problems"]) for one in objects("checkpoint", "verify", workdir)] == [
        (1, True, []), (2, True, [])]
    *different, same = objects("checkpoint", "diff", workdir, 1, 2)
    text = printed("checkpoint", "diff", workdir, 1, 2)
    assert f"{same['same']} of {same['arrays']} arrays are the same" in text
    assert {"key": "step", "a": 1, "b": 2} in different
    assert len(text.splitlines()) == len(different) + 1 and sum("array" in one for one in different) > 3


def test_runs(made, objects, printed, capsys):
    _, workdir, _ = made
    assert objects("runs", "tag", workdir, "kept") == [{"workdir": f"{workdir}", "tags": ["kept"]}]
    assert objects("runs", "tag", workdir, "kept", "--remove") == [{"workdir": f"{workdir}", "tags": []}]
    try:
        (found,) = objects("runs", "reproduce", workdir, "--no_data")
        assert not found["differences"]
    except SystemExit as differs:  # the commit, where the checkout was edited
        assert differs.code == 1
        found, = map(json.loads, capsys.readouterr().out.splitlines())
        assert found["differences"]
    assert found["commands"]


def test_prepare(made, objects, printed, tmp_path):
    _, _, text = made
    (dry,) = objects("prepare", "--input", text, "--dry_run", "--filters", "quality", "--deduplicate")
    assert [row["step"] for row in dry["steps"]] == ["quality", "deduplicate=exact"]
    shown = printed("prepare", "--input", text, "--dry_run", "--filters", "quality", "--deduplicate")
    assert all(f"of {row['seen']:,} documents" in shown for row in dry["steps"])
    (found,) = objects("prepare", "--input", text, f"--output={tmp_path / 'corpus'}", "--workers=1")
    assert found["splits"]["train"]["tokens"] > 0 and found["path"] == f"{tmp_path / 'corpus'}"
    assert found["splits"].keys() == {"train", "eval"} and found["seconds"] > 0


def test_inspect(made, objects, printed):
    flags, _, _ = made
    rows = objects("inspect", *flags, "--step=1")
    shown = printed("inspect", *flags, "--step=1")
    assert [row["row"] for row in rows] == [*range(8)] and all(row["step"] == 1 for row in rows)
    for row in rows:
        assert f"row {row['row']}: {row['tokens']} tokens" in shown
        assert sum(len(part["token_ids"]) for part in row["documents"]) + row["padding"] == row["tokens"]
        assert sum(weight > 0 for part in row["documents"] for weight in part["weights"]) == row["trained_on"]


def test_schedules(objects, printed):
    (one,) = objects("schedules", "--schedule=zb_h1", "--stages=4", "--microbatches=8")
    assert (one["schedule"], one["stages"], len(one["idle"])) == ("zb_h1", 4, 4)
    assert f"{one['ticks']}, {one['bubble']:.1%} empty" in printed("schedules", "--schedule=zb_h1")
    table = printed("schedules", "--all")
    every = objects("schedules", "--all")
    assert len(every) == 32 and all(f"{each['busy']:.1%}" in table for each in every)


def test_refusals_stay_on_stderr(capsys):
    for words, told in ((["prepare", "--input=x", "--output=y", "--json", "--part=0/2"], "--json: a script, or a part"),
                        (["transcribe", "x", "y", "--json", "--stream"], "--json: with --stream words"),
                        (["bench", "--render", "x", "--json"], "--json: the files of --render are JSON")):
        assert importlib.import_module(f"jaxtrain.commands.{words[0]}").main(words[1:]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(told)


def test_calibrate(objects, printed):
    planned, text = objects("calibrate", "--quick", "--dry_run"), printed("calibrate", "--quick", "--dry_run")
    assert len(planned) == len(text.splitlines()) - 1
    assert {row["what"] for row in planned} >= {"llm", "attention", "memory"}


@pytest.mark.slow
def test_bench(made, objects, tmp_path):
    flags, _, _ = made
    (record,) = objects("bench", *flags, "--steps=1", "--warmup=1", f"--output={tmp_path / 'kept'}")
    assert record == json.loads((tmp_path / "kept").read_text()) and record["what"] == "run"


@pytest.mark.slow
def test_compile(made, objects, tmp_path, monkeypatch):
    flags, _, _ = made
    for name in ("JAXTRAIN_SECRET", "JAXTRAIN_SECRET_FILE"):
        monkeypatch.setenv(name, "")  # so that what the command sets ends with the test
        monkeypatch.delenv(name)
    authentication.secret.cache_clear()
    programs = objects("compile", *flags, f"--output={tmp_path / 'compiled'}", f"--workdir={tmp_path / 'run'}")
    assert programs and all(one["bytes"] > 0 and one["seconds"] > 0 and one["program"] for one in programs)
    authentication.secret.cache_clear()
