"""Storms go well, and what a storm may not change is noticed if it does."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from jaxtrain.main import main
from tests.chaos import storms
from tests.tiers import exhaustive
from tests.tiny import ROOT, tiny_flags

pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once
STEPS = 4


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return tiny_flags(tmp_path_factory, [
        "model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "mesh.data=8",
        "data.global_batch_size=8", f"train.steps={STEPS}", "train.eval_every=0", "train.eval_batches=1"])


@pytest.fixture(scope="module")
def calm(flags, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("calm") / "run"
    assert main([*flags, f"--workdir={workdir}"]) == 0
    return storms.Training(workdir, 1, STEPS, 0)


@pytest.fixture
def stormy(calm, tmp_path):
    """The same run, to be made another one."""
    shutil.copytree(calm.workdir, tmp_path / "run")
    return storms.Training(tmp_path / "run", 1, STEPS, 0)


@pytest.mark.slow
def test_the_same(calm, stormy):
    assert storms.differences(stormy, calm) == []


@pytest.mark.slow
@pytest.mark.parametrize("elastic, by, noticed", [(False, 1e-7, True), (True, 1e-7, False), (True, 1e-5, True)])
def test_another_loss(calm, stormy, elastic, by, noticed):
    lines = [json.loads(line) for line in (stormy.workdir / "metrics.jsonl").read_text().splitlines()]
    lines[1]["loss"] *= 1 + by
    (stormy.workdir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    stormy.elastic = elastic
    assert bool(storms.differences(stormy, calm)) == noticed


@pytest.mark.slow
def test_a_line_too_few(calm, stormy):
    lines = (stormy.workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stormy.workdir / "metrics.jsonl").write_text("".join([*lines[:1], *lines[2:]]))
    assert "lines" in storms.differences(stormy, calm)[0]


@pytest.mark.parametrize("elastic", exhaustive(False, True))
def test_other_parameters(flags, calm, tmp_path, elastic):
    """Another run to the same step is whole, and not the same."""
    other = tmp_path / "other"
    assert main([*flags, "--config.train.seed=1", f"--workdir={other}"]) == 0
    shutil.copy(calm.workdir / "metrics.jsonl", other)
    [found] = storms.differences(storms.Training(other, 1, STEPS, 0, elastic), calm)
    assert found.startswith("the final parameters differ by ")


@pytest.mark.slow
def test_a_flipped_byte(calm, stormy):
    largest = max((path for path in stormy.workdir.glob(f"checkpoints/{STEPS}/state/**/*") if path.is_file()),
                  key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    assert any(found.startswith("the final checkpoint is damaged") for found in storms.differences(stormy, calm))


@pytest.mark.slow
@pytest.mark.parametrize("missing, found", [(0, 0), (2 * storms.ASTRAY, 1), (-2 * storms.ASTRAY, 1)])
def test_seconds_that_the_ledger_misses_or_has_too_many(stormy, missing, found):
    [file] = stormy.workdir.glob("ledger/*.json")
    one = json.loads(file.read_text())
    stormy.began, stormy.seconds = one["began"], sum(one["seconds"].values())
    file.write_text(json.dumps(one | {"began": one["began"] - missing}))
    assert len(storms.misbooked(stormy)) == found


@pytest.mark.exhaustive
def test_storms():
    command = [sys.executable, "-m", "tests.chaos.storms", "--storms=3", "--seed=0", "--steps=60", "--every=10",
               "--only", "kill_one", "damage", "lose_one", "preempt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2400,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and "3 of 3 storms right" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count(" steps lost") > 2  # something was done to them
