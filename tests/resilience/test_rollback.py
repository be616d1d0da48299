"""Steps that are no good are left out, or gone back from; what comes of it is a run that never saw their data."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.build import build
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config import load_config
from jaxtrain.data.loader import Batches
from jaxtrain.data.passed_over import FILE, PassedOver
from jaxtrain.main import main
from jaxtrain.observe.events import events
from jaxtrain.resilience import rollback

ROOT = Path(__file__).parents[2]
STEPS, BAD = 48, 40  # steps of the run; the batch that is poisoned
TINY = ["model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.eval_batches=1",
        "data.global_batch_size=8", f"train.steps={STEPS}", "train.eval_every=16", "checkpoint.every=8",
        "checkpoint.keep=3", "resilience.pass_over=4"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """One cache for the whole session: programs are compiled once."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    before = jax.config.jax_compilation_cache_dir
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXTRAIN_CACHE", str(folder))
        yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("".join(f"line {n} of a text that is long enough\n" for n in range(500)))
    return [f"--config={ROOT}/configs/gpt.py:tiny", *(f"--config.{word}" for word in [*TINY, f"data.source={text}"])]


@pytest.fixture
def poison(monkeypatch):
    """poison(kind, batches): these batches of training have targets that never occur, or a weight that is infinite."""
    def make(kind, numbers, rows=Batches.rows):
        def poisoned(self, step, indices):
            batch = rows(self, step, indices)
            if self.num_batches is None and step in numbers:  # evaluation has an end
                if kind == "strange":
                    batch["targets"] = np.full_like(batch["targets"], 319)
                else:
                    batch["weights"] = np.full_like(batch["weights"], np.inf)
            return batch

        monkeypatch.setattr(Batches, "rows", poisoned)
    return make


def words(**keys):
    return [f"--config.{key.replace('__', '.')}={value}" for key, value in keys.items()]


def told(workdir, name="metrics.jsonl"):
    """What it says, but for the times."""
    lines = [json.loads(line) for line in (workdir / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.endswith(("_s", "_wait", "mfu"))} for line in lines]


def saved(flags, workdir, step=STEPS):
    config = load_config(flags[0].partition("=")[2], dict(f.removeprefix("--config.").split("=") for f in flags[1:]))
    return jax.device_get(Checkpoints(workdir / "checkpoints").restore(step, build(config).abstract))


def assert_same(ours, theirs):
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(one, other)


def decisions(workdir):
    return [(event["kind"], event["step"]) for event in events(workdir)
            if event["kind"] in ("spike", "skip", "rollback", "stop")]


@pytest.fixture(scope="module")
def never_saw(flags, tmp_path_factory):
    """A run that had the record from the start."""
    workdir = tmp_path_factory.mktemp("never") / "work"
    workdir.mkdir()
    (workdir / FILE).write_text(json.dumps({"batches": [37, 38, 39, 40]}))
    assert main([*flags, f"--workdir={workdir}"]) == 0
    return workdir


def test_rolled_back(flags, never_saw, poison, tmp_path, capsys):
    poison("strange", {BAD})
    assert main([*flags, *words(resilience__spikes="rollback"), f"--workdir={tmp_path}"]) == 0
    err = capsys.readouterr().err
    assert "going back to step 32 and passing over batches 37 to 40 (rollback 1 of at most 10)" in err
    assert decisions(tmp_path) == [("skip", BAD + 1), ("rollback", BAD + 1)]
    assert PassedOver.read(tmp_path) == PassedOver((37, 38, 39, 40), 1)
    assert told(tmp_path) == told(never_saw)
    assert_same(saved(flags, tmp_path), saved(flags, never_saw))
    assert [line["step"] for line in told(tmp_path, "metrics.rolled_back.jsonl")][0] == 33
