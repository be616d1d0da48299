"""The optimizer's state in the hosts' memory: the same numbers, and the state is where it should be."""

import json
import shutil

import jax
import numpy as np
import pytest

from jaxtrain.builder import build
from jaxtrain.checkpoint import CheckpointManager
from jaxtrain.config.load import load_config
from jaxtrain.main import main
from jaxtrain.plan.estimate import change
from jaxtrain.sharding.host_memory import HOST
from tests.numerics import reference
from tests.tiers import slow_if
from tests.tiny import devices, tiny_flags

CASES = [
    ("gpt2", (2, 2, 1), {"optimizer__zero_stage": 1, "train__accumulation": 2}),
    ("llama", (2, 1, 2), {"optimizer__name": "muon", "optimizer__zero_stage": 3}),
    ("qwen3", (2, 2, 2), {"optimizer__name": "lion", "optimizer__zero_stage": 2, "train__precision": "float16"}),
    ("llama", (1, 2, 2), {"optimizer__name": "sgd", "train__precision": "bfloat16", "train__remat": "full"}),
    ("llama", (1, 2, 2), {"optimizer__name": "adafactor", "model__embed_dim": 128, "model__mlp_dim": 128}),
    ("qwen3_moe", (4, 1, 1), {"mesh__expert": 2, "optimizer__zero_stage": 2, "train__accumulation": 2}),
    ("deepseek_v3", (1, 2, 1), {"mesh__expert": 2}),  # whose routers' biases have an optimizer of their own
]


def places(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def same(ours, theirs, tolerance):
    """Relative to the largest element. A key's bias has rounding noise for a gradient, and Adam enlarges it."""
    for (path, one), other in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        noise = 1e-5 if name.endswith("k/bias") else 1e-9
        np.testing.assert_allclose(other, one, rtol=0, atol=tolerance * np.abs(one).max() + noise, err_msg=name)


@pytest.mark.parametrize(("family", "mesh", "keys"), [
    pytest.param(*case, marks=slow_if(i == 5))
    for i, case in enumerate(CASES)], ids=str)
def test_the_numbers_are_those_of_a_state_on_the_devices(family, mesh, keys):
    told, states = [], []
    for offload in (False, True):
        run = reference.build(family, mesh, optimizer__offload=offload, **keys)
        wide = "model__embed_dim" in keys
        step, state, lines = reference.compiled(run), run.init() if wide else reference.start(run, family), []
        for n in range(3):
            state, metrics = step(state, run.sharded.place(reference.batch(n)))
            lines.append({key: float(value) for key, value in metrics.items()})
        assert places([state.params, state.step]) == {"device"}
        arrays = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
        assert places(arrays) == {HOST if offload else "device"} or not arrays
        told.append(lines)
        states.append(jax.device_get(state))
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}.get(keys.get("train__precision"), 1e-5)
    for ours, theirs in zip(*told, strict=True):
        for key, value in ours.items():
            assert theirs[key] == pytest.approx(value, rel=tolerance, abs=tolerance), key
    same(*states, 20 * tolerance)


@pytest.mark.exhaustive
def test_a_step_that_is_not_finite_changes_nothing():
    run = reference.build("gpt2", (2, 2, 1), optimizer__offload=True)
    step, state = reference.compiled(run), reference.start(run)
    state, _ = step(state, run.sharded.place(reference.batch(0)))
    before = jax.device_get((state.params, state.opt_state))
    bad = reference.batch(1)
    bad["weights"][0, 0] = np.nan
    state, metrics = step(state, run.sharded.place(bad))
    assert int(metrics["skipped"]) == 1
    assert places([leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]) == {HOST}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((state.params, state.opt_state)), before)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("cache")
@devices(4)
def test_a_run_goes_on_with_its_state_elsewhere(tmp_path, tmp_path_factory):
    """The state goes from hosts to devices and back, through checkpoints; replicas and replays are checked, too."""
    flags = tiny_flags(tmp_path_factory, [
        "model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.eval_batches=1",
        "mesh.data=2", "mesh.fsdp=2", "data.global_batch_size=8", "checkpoint.every=3", "checkpoint.keep=9",
        "resilience.check_every=2", "resilience.replay_every=2", "train.steps=9"])
    plain, mixed = tmp_path / "plain", tmp_path / "mixed"
    assert main([*flags, f"--workdir={plain}"]) == 0
    for last, offload in ((9, True), (3, False), (6, True)):
        if last < 9:  # what came behind it is taken away
            for step in range(last + 1, 10):
                folder = mixed / "checkpoints" / str(step)
                if folder.exists():
                    shutil.rmtree(folder)
        assert main([*flags, f"--config.optimizer.offload={offload}", f"--workdir={mixed}"]) == 0
        lines = [[json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
                 for folder in (plain, mixed)]
        assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]]
        for ours, theirs in zip(*lines, strict=True):
            for key in ours.keys() & {"loss", "grad_norm", "eval_loss"}:
                assert theirs[key] == pytest.approx(ours[key], rel=1e-4)
        assert not [event for event in (mixed / "events.jsonl").read_text().splitlines() if '"damaged"' in event]
    config = load_config(flags[0].partition("=")[2], dict(f.removeprefix("--config.").split("=") for f in flags[1:]))
    restored = CheckpointManager(mixed / "checkpoints").restore(
        9, build(change(config, {"optimizer.offload": True, "mesh.data": 1, "mesh.fsdp": 4})).abstract)
    assert places([leaf for leaf in jax.tree.leaves(restored.opt_state) if leaf.ndim]) == {HOST}
    both = [jax.device_get(CheckpointManager(folder / "checkpoints").restore(9, build(config).abstract))
            for folder in (plain, mixed)]
    same(*both, 2e-4)
