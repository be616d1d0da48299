"""The moving average of the parameters: its recurrence on any mesh, and what becomes of it in a run."""

import contextlib
import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.checkpoint import CheckpointManager
from jaxtrain.commands import export as export_command
from jaxtrain.commands import generate
from jaxtrain.errors import UserError
from jaxtrain.extensions import ema
from jaxtrain.hub import export
from jaxtrain.main import main
from jaxtrain.plan import targets
from jaxtrain.plan.estimate import estimate
from jaxtrain.train_step.hooks import extras_of
from jaxtrain.train_step.report import total
from tests.numerics import reference
from tests.tiers import slow_if
from tests.tiny import devices, tiny_flags

DECAY = 0.8
TINY = ["model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.eval_batches=1",
        "data.global_batch_size=8", "train.steps=6", "train.eval_every=3", "checkpoint.every=3",
        "resilience.check_every=0"]


def test_a_step_that_is_not_taken_leaves_every_bit():
    rng = np.random.default_rng(0)
    average, params = ({"a": jnp.asarray(rng.standard_normal(1000), jnp.float32)} for _ in range(2))
    for taken in (True, False):
        want = DECAY * np.float64(average["a"]) + (1 - DECAY) * np.float64(params["a"]) if taken else average["a"]
        got = jax.jit(ema.updated, static_argnums=2)(average, params, DECAY, jnp.asarray(taken))
        np.testing.assert_allclose(got["a"], want, atol=1e-6 * taken, rtol=0)


def test_the_average_of_narrow_parameters_is_wide():
    assert {dtype: ema.begin(jnp.zeros(2, dtype)).dtype.name for dtype in ("bfloat16", "float32")} == {
        "bfloat16": "float32", "float32": "float32"}


def test_the_planner_counts_it():
    keys = {"mesh.fsdp": 8, "model.num_layers": 2}
    without, with_it = (estimate(jt.load_config("configs/llama3_1b.py", keys | {"train.ema_decay": decay}),
                                 targets.TARGETS["h100"], 8) for decay in (0, 0.999))
    size = total(jt.build(with_it.config, devices=8).abstract.params)
    assert with_it.memory["averaged parameters"] == size and with_it.bytes - without.bytes == size


def test_what_keeps_no_average_says_so():
    run = reference.build()
    assert run.abstract.extras.keys() == {"history"}
    with pytest.raises(UserError, match=r"train\.ema_decay: the state keeps no average of its parameters; set it"):
        run.abstract.averaged
    with pytest.raises(UserError, match=r"train\.ema_decay: 1\.0 is not in \[0, 1\); try 0\.999, or 0 for none"):
        reference.tiny(train__ema_decay=1.0)


CASES = {
    "one device": {},
    "fsdp, tensor": dict(mesh=(1, 2, 2), train__accumulation=2),
    "pipeline": dict(mesh=(2, 1, 1), mesh__stage=2),
    "zero 3, offloaded": dict(mesh=(4, 1, 1), optimizer__zero_stage=3, optimizer__offload=True),
    "adapters, float16": dict(mesh=(1, 2, 1), lora__rank=2, train__precision="float16"),
}


@functools.cache
def made(case):
    """A run that keeps an average, and its compiled step."""
    run = reference.build(train__ema_decay=DECAY, **CASES[case])
    return run, reference.compiled(run)


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=slow_if(case in ("zero 3, offloaded", "adapters, float16"))) for case in CASES])
def test_it_is_the_recurrence_on_any_mesh(case):
    """The average is laid out as the parameters are, and begins at them where a checkpoint has none."""
    run, step = made(case)
    assert run.layout.state.extras[ema.NAME] == run.layout.state.params
    state = run.init()
    before = jax.device_get(state.params)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.extras[ema.NAME]))
    want = jax.tree.map(np.float64, before)
    for n in range(4):
        batch = reference.batch(n)
        if n == 2:  # no token counts: the step is skipped
            batch["weights"][:] = 0
            left = jax.device_get(state.extras[ema.NAME])
        state, metrics = step(state, run.sharded.place(batch))
        if n == 2:
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.extras[ema.NAME]), left)
        else:
            want = jax.tree.map(lambda a, p: DECAY * a + (1 - DECAY) * np.float64(p), want,
                                jax.device_get(state.params))
    assert int(metrics["skipped"]) == 1
    now, average = jax.device_get((state.params, state.extras[ema.NAME]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), average, want)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), average, now)
    assert max(jax.tree.leaves(moved)) > 1e-4, "the average does not lag behind, so it proves little"


@pytest.mark.exhaustive
def test_a_checkpoint_without_one_begins_it_at_its_parameters(tmp_path):
    run, step = made("zero 3, offloaded")
    state = run.init(seed=5)
    with contextlib.closing(CheckpointManager(tmp_path, extras=extras_of(run.extensions))) as manager:
        manager.save(1, dataclasses.replace(state, extras={"history": state.extras["history"]}))
        manager.wait()
        restored = manager.restore(1, run.abstract)
    jax.tree.map(np.testing.assert_array_equal, restored.extras[ema.NAME], state.params)
    assert jax.tree.map(lambda x: x.sharding, restored) == run.layout.state
    step(restored, run.sharded.place(reference.batch(0)))  # its memory is its own, which the step reuses


# ---------------------------------------------------------------------------------------------------------- in a run

@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return tiny_flags(tmp_path_factory, TINY)


@pytest.fixture(scope="module")
def straight(flags, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("straight") / "work"
    with devices(2):
        assert main([*flags, f"--config.train.ema_decay={DECAY}", f"--workdir={workdir}"]) == 0
    return workdir


def saved(workdir, step=6):
    run = jt.build(jt.load_config(workdir / "config.json"), devices=jax.devices()[:2])
    return run, jt.CheckpointManager(workdir / "checkpoints").restore(step, run.abstract)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(flags, straight, tmp_path):
    shutil.copytree(straight, tmp_path / "work")
    shutil.rmtree(tmp_path / "work" / "checkpoints" / "6")
    with devices(2):
        assert main([*flags, f"--config.train.ema_decay={DECAY}", f"--workdir={tmp_path / 'work'}"]) == 0
    (run, ours), (_, theirs) = saved(tmp_path / "work"), saved(straight)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    lines = [line for line in map(json.loads, (straight / "metrics.jsonl").read_text().splitlines())
             if "eval_loss" in line]
    assert [line["step"] for line in lines] == [3, 6]
    by_hand = run.evaluate(dataclasses.replace(ours, params=ours.extras[ema.NAME], extras={}), 1)["eval_loss"]
    assert lines[-1]["eval_loss_ema"] == by_hand != lines[-1]["eval_loss"]


@pytest.mark.slow
def test_the_average_is_exported_and_generates(straight, tmp_path, capsys):
    assert export_command.main([str(straight), f"--output={tmp_path / 'out'}", "--ema", "--dtype=float32"]) == 0
    assert json.loads((tmp_path / "out" / export.RECORD).read_text())["averaged"] is True
    _, state = saved(straight)
    published = jt.build(jt.load_config(f"hf:{tmp_path / 'out'}", {"data.seq_len": 32, "data.global_batch_size": 8}))
    jax.tree.map(np.testing.assert_array_equal, published.init().params, state.extras[ema.NAME])
    capsys.readouterr()
    said = []
    for folder, *more in ((straight, "--ema"), (straight,), (tmp_path / "out",)):
        words = [str(folder), "--prompt=line ", "--max_new_tokens=3", "--temperature=0", "--json", "--logprobs", *more]
        assert generate.main(words) == 0
        said.append(json.loads(capsys.readouterr().out)["logprobs"])
    assert said[0] == said[2] != said[1]
    assert generate.main([str(tmp_path / "out"), "--prompt=a", "--ema"]) == 2
    assert "--ema: " in (told := capsys.readouterr().err) and "with one set of weights; leave it out" in told


@pytest.mark.exhaustive
def test_a_run_without_one_begins_one_on_purpose(flags, tmp_path, capsys):
    words = [*flags, f"--workdir={tmp_path / 'work'}"]
    assert main(words) == 0
    assert export_command.main([str(tmp_path / "work"), f"--output={tmp_path / 'out'}", "--ema"]) == 2
    assert "--ema: " in (told := capsys.readouterr().err) and "has no average of the weights; leave it out" in told
    _, before = saved(tmp_path / "work")
    words += ["--config.train.steps=7", f"--config.train.ema_decay={DECAY}", "--config.checkpoint.best=eval_loss_ema",
              "--may_change=train.steps,train.ema_decay,optimizer.warmup_steps"]
    assert main(words) == 0
    _, after = saved(tmp_path / "work", 7)
    jax.tree.map(lambda average, old, new: np.testing.assert_allclose(
        average, DECAY * old + (1 - DECAY) * new, atol=1e-6), after.extras[ema.NAME], before.params, after.params)
    capsys.readouterr()
    assert main([*words, "--config.train.ema_decay=0", "--config.checkpoint.best="]) == 2
    assert "train.ema_decay: " in (told := capsys.readouterr().err) and "set it to 0.8" in told
    assert json.loads((tmp_path / "work" / "config.json").read_text())["train"]["ema_decay"] == DECAY
