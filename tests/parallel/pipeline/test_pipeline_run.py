"""A pipeline from the command line: it trains, evaluates, samples and saves, and another mesh goes on from there."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.checkpoint import CheckpointManager
from jaxtrain.main import main
from tests.numerics import reference
from tests.tiny import devices

TINY = f"--config={Path(__file__).parents[3]}/configs/gpt.py:tiny"
# Each stage has two chunks of the five layers, which are not of one size.
PIPELINE = ["--config.mesh.stage=2", "--config.mesh.tensor=2", "--config.pipeline.schedule=zb_v"]


@pytest.fixture
def flags(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n} of a text that is long enough\n" for n in range(500)))
    keys = ["model.num_layers=5", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32",
            "data.global_batch_size=8", "train.steps=4", "train.eval_every=2", "train.eval_batches=1",
            "checkpoint.every=2", "resilience.check_every=0", f"data.source={text}"]
    return [TINY, *(f"--config.{key}" for key in keys)]


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(row["step"], key): row[key] for row in rows for key in ("loss", "eval_loss") if key in row}


@pytest.mark.slow
@devices(4)
def test_the_command_line_trains_a_pipeline_and_one_stage_goes_on(flags, tmp_path, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    assert main([*flags, f"--workdir={one}"]) == 0
    assert main([*flags, *PIPELINE, f"--workdir={two}"]) == 0
    want = losses(one)
    assert {key for _, key in want} == {"loss", "eval_loss"}
    assert losses(two) == pytest.approx(want, rel=1e-5)
    shutil.rmtree(two / "checkpoints" / "4")
    assert main([*flags, f"--workdir={two}"]) == 0
    assert losses(two) == pytest.approx(want, rel=1e-5), "one stage goes on with other numbers"


@pytest.mark.exhaustive  # the test above goes on from a checkpoint of stages
@pytest.mark.parametrize("schedule", ["zb_v", "1f1b"])
def test_a_checkpoint_fits_any_number_of_stages(tmp_path, schedule):
    """The bits are equal from stages to one device and back, layers evenly spread or not, moments too."""
    keys = dict(model__num_layers=4, pipeline__schedule=schedule)
    staged, single = reference.build("gpt2", (1, 1, 2), mesh__stage=2, **keys), reference.build("gpt2", **keys)
    state, random = reference.start(staged), np.random.default_rng(0)
    state = jax.tree.map(lambda x: jax.device_put(random.random(x.shape).astype(x.dtype), x.sharding), state)
    before = jax.device_get(state)
    for name, run in (("staged", single), ("single", staged)):
        store = CheckpointManager(tmp_path / name)
        store.save(0, state)
        store.wait()
        state = store.restore(0, run.abstract)
        store.close()
        for got, want, where in zip(jax.tree.leaves(state), jax.tree.leaves(before),
                                    jax.tree.leaves(run.layout.state), strict=True):
            assert np.array_equal(got, want) and got.sharding.is_equivalent_to(where, got.ndim)
