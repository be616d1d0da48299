"""A measured run: what its record says, a mesh's collectives in its profile, and what goes wrong."""

import json
import math
import os
import subprocess
import sys

import jax
import pytest

from jaxtrain.bench import measured_run as bench
from jaxtrain.bench import measurement, sweep
from jaxtrain.builder import build
from jaxtrain.commands import bench as bench_command
from jaxtrain.config.load import load_config
from jaxtrain.plan.estimate import estimate
from jaxtrain.plan.targets import here
from tests.tiny import free_address, tiny_flags

MESH = ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory, cache):
    return tiny_flags(tmp_path_factory, MESH)


@pytest.fixture(scope="module")
def record(flags, tmp_path_factory):
    file = tmp_path_factory.mktemp("json") / "measured.jsonl"
    assert bench_command.main([*flags, "--steps=4", "--warmup=2", "--profile", "--label=mine", f"--output={file}"]) == 0
    line, = file.read_text().splitlines()
    return json.loads(line)


@pytest.mark.slow
def test_the_record_says_what_was_measured_and_on_what(record, flags):
    assert record["what"] == "run" and record["label"] == "mine" and record["steps"] == 4
    assert record["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2} and record["device"] == "cpu"
    assert record["commit"] and record["versions"]["jax"] == jax.__version__
    assert record["command"].startswith("python -m jaxtrain.bench --config=") and "--output" not in record["command"]
    config = load_config(flags[0].removeprefix("--config="), {**dict(w.split("=") for w in MESH), "data.source": "x"})
    assert record["config_hash"] != config.hash(), "the source is part of it"


@pytest.mark.slow
def test_the_figures_agree_with_each_other_and_with_the_planner(record, flags):
    keys = dict(word.removeprefix("--config.").split("=", 1) for word in flags[1:])
    config = load_config(flags[0].removeprefix("--config="), keys)
    tokens = config.data.global_batch_size * config.data.seq_len
    ms = record["step_ms"]
    assert 0 < ms["p10"] <= ms["median"] <= ms["p90"] and record["tokens_per_step"] == tokens
    assert 0 < record["tokens_per_s"] <= 1.01e3 * tokens / ms["p10"]
    assert 0 <= record["data_wait_share"] < 1 and record["compile_s"] > 0
    assert record["mfu"] is None and record["memory"]["peak"] is None, "not known on a CPU"
    guess = estimate(config, here(), 8)
    assert record["memory"]["planner"] == guess.bytes and record["predicted_ms"] == pytest.approx(1e3 * guess.seconds)
    assert record["memory"]["compiler"] > 0.3 * guess.bytes
    assert record["loss"]["last"] < record["loss"]["first"] < 2 * math.log(320)


@pytest.mark.slow
def test_the_kinds_add_up_to_the_step_and_name_the_axes(record):
    profile = record["profile"]
    kinds = profile["kinds_ms"]
    assert 0 < sum(kinds.values()) < 1.05 * profile["wall_ms"], "no moment counts twice"
    assert {"matmul", "attention", "loss head", "optimizer", "elementwise"} <= set(kinds)
    assert any(kind.startswith("all-gather over") and "fsdp" in kind for kind in kinds)
    assert any(kind.endswith("over tensor") for kind in kinds)
    assert all(0 < kernel["share"] <= 1 and kernel["ms"] > 0 for kernel in profile["kernels"])
    assert len(profile["kernels"]) == 20
    for kernel in profile["kernels"]:
        if kernel["kind"] in ("matmul", "attention"):  # each on 8 devices
            assert kernel["runs"] >= 8 and kernel["runs"] % 8 == 0, kernel


@pytest.mark.slow
def test_losses_are_those_of_training(flags, record):
    """The measured run is the run: the same batches, the same losses."""
    keys = dict(word.removeprefix("--config.").split("=", 1) for word in flags[1:])
    run = build(load_config(flags[0].removeprefix("--config="), keys))
    state, metrics = run.step(run.init(), run.batch(0))
    assert record["loss"]["first"] == pytest.approx(float(metrics["loss"]), rel=1e-6)
    for step in range(1, 6):
        state, metrics = run.step(state, run.batch(step))
    assert record["loss"]["last"] == pytest.approx(float(metrics["loss"]), rel=1e-6)


def test_out_of_memory_is_said_and_recorded(flags, tmp_path, monkeypatch, capsys):
    def exhausted(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore")

    monkeypatch.setattr(measurement, "measure", exhausted)
    file = tmp_path / "measured.jsonl"
    with pytest.raises(SystemExit) as status:
        bench_command.main([*flags, f"--output={file}"])
    assert status.value.code == 1
    line = json.loads(file.read_text())
    assert line["failed"] == "out of memory: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."
    assert line["failed"] in capsys.readouterr().err and "tokens_per_s" not in line


@pytest.mark.slow
def test_a_profile_that_fails_does_not_cost_the_measurement(flags, monkeypatch, tmp_path, capsys):
    def broken(*_, **__):
        raise RuntimeError("no trace today")

    monkeypatch.setattr(jax.profiler, "start_trace", broken)
    file = tmp_path / "measured.jsonl"
    assert bench_command.main([*flags, "--steps=1", "--warmup=1", "--profile", f"--output={file}"]) == 0
    line = json.loads(file.read_text())
    assert line["profile_failed"] == "RuntimeError: no trace today" and line["tokens_per_s"] > 0
    assert "no trace today" in capsys.readouterr().err


def test_rows_of_several_lengths_are_measured_and_not_traced(flags, capsys):
    stages = [{"from_step": 2, "seq_len": 32}]
    words = [*flags, f"--config.data.stages={stages}", "--steps=2", "--warmup=1"]
    assert bench_command.main([*words, "--profile"]) == 2
    assert "data: batches of several sequence lengths cannot be profiled or compared" in capsys.readouterr().err


def test_answers_of_the_model_are_not_measured(flags, capsys):
    keys = {"prompts": "a", "reward": "b", "group_size": 2, "max_new_tokens": 8}
    assert bench_command.main([*flags, "--config.train.eval_every=0",
                       *(f"--config.rl.{key}={value}" for key, value in keys.items())]) == 2
    assert "rl.prompts: a bench has no answers of the model to train on; train" in capsys.readouterr().err


def test_numbers_computed_beforehand_are_not_measured(flags, capsys):
    assert bench_command.main([*flags, "--config.preference.loss=dpo", "--config.preference.reference=precomputed",
                       "--config.data.packing=pairs"]) == 2
    assert "preference.reference: a bench does not compute the reference's numbers" in capsys.readouterr().err


@pytest.mark.parametrize("error", [
    "RESOURCE_EXHAUSTED: Out of memory", "CUDA error: out of memory", "CUDA_ERROR_OUT_OF_MEMORY",
    "CUBLAS_STATUS_ALLOC_FAILED when calling"])
def test_memory_that_ran_out_is_known_in_all_words(error):
    assert bench.out_of_memory(RuntimeError(error)) and not bench.out_of_memory(RuntimeError("shapes differ"))


@pytest.mark.parametrize(("words", "said"), [
    ([], "CONFIG: it is missing"), (["--config=configs/gpt.py", "--steps=0"], "--steps: 0 is too few"),
    (["--config=configs/gpt.py:tiny", "--compare=torhc"], "did you mean 'torch'"),
    (["--config=configs/gpt.py:tiny", "--compare=plain", "--profile"], "--profile: "),
    (["--config=configs/gpt.py:tiny", "--sweep", "train.remat"], "--sweep: 'train.remat' gives no values"),
    (["--config=configs/gpt.py:tiny", "--stesp=4"], "did you mean '--steps'"),
    (["--config=configs/gpt.py:tiny", "--sweep", "train.remta=none"], "did you mean 'remat'"),
    (["--config=configs/gpt.py:tiny", "--sweep", "train.remat=none", "--compare=plain"], "--sweep: it ranks runs"),
    (["--config=configs/gpt.py:tiny", "--output=/proc/x.jsonl"], "--output: /proc/x.jsonl cannot be written"),
    (["--config=configs/gpt.py:tiny", "--label=two words"], "--label: 'two words' is not one word"),
    (["--config=configs/gpt.py:tiny", "--timeout=-1"], "--timeout: -1 seconds"),
    (["--config=configs/gpt.py:tiny", "--into=x.md"], "--into: it needs --render"),
    (["--config=configs/mixtral_8x7b.py:tiny", "--config.mesh.expert=1", "--compare=plain"], "model.name: mixtral"),
    (["--render", sys.executable], "it is not text"), (["--render", "README.md"], "README.md: it has no measurements"),
    (["--render", "docs/measurements/cpu.jsonl", "--into=README.md"], "README.md has no place for a table"),
    (["--render", "nowhere.jsonl"], "nowhere.jsonl: it cannot be read"),
    (["--config=configs/gpt.py:tiny", "--targets=nowhere.json"], "--targets: nowhere.json cannot be read")])
def test_mistakes_take_one_line(words, said, capsys):
    assert bench_command.main(words) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert said in errors[-1]


def test_doubtful_figures_are_said_to_be():
    sure = {"step_ms": {"median": 10.0, "p90": 11.0}, "load": 1.0, "cores": 2}
    assert bench.doubts(sure) == []
    assert "one step in ten" in bench.doubts({**sure, "step_ms": {"median": 10.0, "p90": 30.0}})[0]
    assert "load 5.0 on 2 cores" in bench.doubts({**sure, "load": 5.0})[0]
    assert "traced steps" in bench.doubts({**sure, "profile": {"step_ms": 20.0}})[0]


def test_a_key_given_twice_has_all_its_values():
    assert list(sweep.combinations(["train.unroll=1,0", "train.unroll=0,2"])) == [
        {"train.unroll": "1"}, {"train.unroll": "0"}, {"train.unroll": "2"}]


def test_combinations():
    assert list(sweep.combinations(["train.remat=none,full", "train.unroll=1,0"])) == [
        {"train.remat": "none", "train.unroll": "1"}, {"train.remat": "none", "train.unroll": "0"},
        {"train.remat": "full", "train.unroll": "1"}, {"train.remat": "full", "train.unroll": "0"}]


@pytest.mark.exhaustive
def test_a_sweep_ranks_what_fits_and_goes_on_behind_what_does_not(flags, tmp_path, capsys):
    file = tmp_path / "swept.jsonl"
    words = [*flags, "--steps=2", "--warmup=1", f"--output={file}", "--sweep", "train.remat=full,no,none"]
    assert bench_command.main(words) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(line["name"].endswith(f"train.remat={value}") for line, value in zip(
        lines, ("full", "no", "none"), strict=True)), lines
    assert "train.remat: unknown policy 'no'" in lines[1]["failed"]
    rows = [row.split("|")[1].strip() for row in capsys.readouterr().out.splitlines() if row.startswith("| train.")]
    speeds = {line["name"].split()[-1]: line.get("tokens_per_s", 0) for line in lines}
    assert rows == sorted(speeds, key=lambda name: -speeds[name]) and rows[-1] == "train.remat=no"


@pytest.mark.exhaustive
def test_two_processes_measure_as_one_run(flags, record, tmp_path):
    coordinator, file = free_address(), tmp_path / "measured.jsonl"
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    processes = [subprocess.Popen(
        [sys.executable, "-m", "jaxtrain.bench", *flags, "--steps=4", "--warmup=2", f"--output={file}",
         f"--coordinator={coordinator}", "--num_processes=2", f"--process_id={number}"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for number in range(2)]
    try:
        told = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], told
    assert "tokens/s" in told[0][0] and "tokens/s" not in told[1][0], "one of them prints"
    line, = [json.loads(line) for line in file.read_text().splitlines()]
    assert line["mesh"] == record["mesh"] and line["tokens_per_step"] == record["tokens_per_step"]
    for when in ("first", "last"):
        assert line["loss"][when] == pytest.approx(record["loss"][when], rel=1e-5)


@pytest.mark.slow
def test_one_that_hangs_is_ended(flags):
    record = sweep.measured([*flags, "--steps=100000"], seconds=3)
    assert record["failed"] == "took longer than 3 s" and record["what"] == "run"
