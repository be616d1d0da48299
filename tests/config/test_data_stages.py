"""Runs over several sources whose weights, row length and batch size change: what is trained, resumed and recorded."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain import checkpoint
from jaxtrain.builder import build
from jaxtrain.config.load import load_config
from jaxtrain.errors import UserError
from jaxtrain.main import main
from jaxtrain.sharding import activations, mesh_context
from jaxtrain.trainer.loop import train
from tests.tiers import exhaustive, slow, slow_if

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name in ("web", "code"):
        (folder / f"{name}.txt").write_text("".join(f"{name} line {n} of a text\n" for n in range(400)))
    return {"model.num_layers": 1, "model.embed_dim": 32, "model.max_seq_len": 64, "data.seq_len": 16,
            "data.global_batch_size": 16, "train.steps": 8, "train.eval_batches": 1, "checkpoint.every": 2,
            "checkpoint.keep": 9, "train.progress": False, "mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2,
            "data.cache_dir": str(folder / "cache"),
            "data.mixture": {"web": {"source": str(folder / "web.txt"), "weight": 3},
                             "code": {"source": str(folder / "code.txt"), "weight": 1}},
            "data.stages": [{"from_step": 4, "seq_len": 64, "global_batch_size": 4, "weights": {"code": 3}}]}


def lines(workdir) -> list[dict]:
    return [line for text in (Path(workdir) / "metrics.jsonl").read_text().splitlines()
            if "loss" in (line := json.loads(text))]


def config(keys, **more):
    return load_config(ROOT / "configs/gpt.py:tiny", keys | more)


@pytest.fixture(scope="module")
def straight(keys, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("straight")
    return train(config(keys), workdir), workdir


@pytest.mark.slow
def test_a_stage_of_longer_rows_trains_as_a_plain_loop_would(keys, straight):
    """Every step's loss and the last parameters against gradients of the plain loss on one device, batch by batch."""
    run = build(config(keys, **{"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 1}), devices=jax.devices()[:1])
    state = run.init()
    params = state.params

    @jax.jit
    def plain(params, batch):
        def mean(params):
            model = run.model.merge(params)
            x = model.begin(batch["tokens"], batch["positions"])
            x, _ = model.through(x, batch["segments"], batch["positions"], None)
            logits = jnp.einsum("btd,dv->btv", model.finish(x), activations.gather(model.head(), "embed", "vocab"))
            entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return (entropy * batch["weights"]).sum() / batch["weights"].sum()
        return jax.value_and_grad(mean)(params)

    for line, step in zip(lines(straight[1]), range(8), strict=True):
        batch = run.batch(step)
        assert batch["tokens"].shape == ((16, 16) if step < 4 else (4, 64))
        with mesh_context.use(run.mesh, run.sharded.rules):
            value, grads = plain(params, batch)
        assert line["loss"] == pytest.approx(float(value), rel=1e-5) and line["tokens"] == 256 * (step + 1)
        norm = optax.tree.norm(grads)
        assert line["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        state, _ = run.step(state, batch)
        params = state.params
    for one, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(straight[0].params), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stop", [
    *exhaustive(2, 6), *slow(4)])
def test_resumed_before_at_or_behind_the_change_it_is_the_same_run(keys, straight, tmp_path, stop):
    workdir = tmp_path / "work"
    shutil.copytree(straight[1], workdir)
    for step in range(stop + 2, 9, 2):
        shutil.rmtree(workdir / "checkpoints" / str(step))
    assert checkpoint.CheckpointManager(workdir / "checkpoints").latest() == stop
    state = train(config(keys), workdir)
    for one, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(straight[0].params), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))
    assert [line["loss"] for line in lines(workdir)] == [line["loss"] for line in lines(straight[1])]


@pytest.mark.slow
def test_what_is_to_come_may_change_and_is_recorded_and_what_is_past_may_not(keys, tmp_path):
    constant = {"optimizer.schedule": "constant"}
    train(config(keys, **constant, **{"train.steps": 4, "data.stages": []}), tmp_path)
    before = [line["loss"] for line in lines(tmp_path)]
    later = {**constant, "train.steps": 6}
    with pytest.raises(UserError, match=r"4 steps had other data: data.mixture was .*data.stages with from_step=4"):
        train(config(keys, **later, **{"data.stages": [], "data.mixture.web.weight": "1"}), tmp_path)
    with pytest.raises(UserError, match=r"4 steps had other data: data.stages was"):
        train(config(keys, **later, **{"data.stages": [{"from_step": 3, "weights": {"code": 3}}]}), tmp_path)
    train(config(keys, **later, **{"data.stages": [{"from_step": 4, "weights": {"code": 9}}]}), tmp_path)
    assert [line["loss"] for line in lines(tmp_path)][:4] == before and len(lines(tmp_path)) == 6
    change, = json.loads((tmp_path / "run.json").read_text())["data_changes"]
    assert change == {"step": 4, "key": "data.stages", "before": [],
                      "after": [{"from_step": 4, "weights": {"code": 9}}]}


def documents(folder) -> str:
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"document {i} " * (1 + i % 5))
    return str(folder)


@pytest.mark.exhaustive
def test_a_document_a_row_in_buckets_is_trained_and_resumed(keys, tmp_path):
    source = documents(tmp_path / "texts")
    more = {"data.mixture": {}, "data.stages": [], "data.source": source, "data.packing": "bucket",
            "data.seq_len": 64, "data.global_batch_size": 8, "data.buckets": [24, 64]}
    train(config(keys, **more), tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    for step in (6, 8):
        shutil.rmtree(tmp_path / "resumed/checkpoints" / str(step))
    train(config(keys, **more), tmp_path / "resumed")
    one, two = lines(tmp_path / "straight"), lines(tmp_path / "resumed")
    assert [line["loss"] for line in one] == [line["loss"] for line in two] and len(one) == 8
    run = build(config(keys, **more))
    sizes = [run.batch(step)["tokens"].shape for step in range(8)]
    assert set(sizes) == {(8, 24), (8, 64)} and [line["tokens"] for line in one] == np.cumsum(
        [rows * length for rows, length in sizes]).tolist()
    alone = build(config(keys, **more, **{"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 1}), devices=jax.devices()[:1])
    _, metrics = alone.step(alone.init(), alone.batch(0))
    assert one[0]["loss"] == pytest.approx(float(metrics["loss"]), rel=1e-5)


def test_a_stage_that_does_not_fit_the_mesh_is_refused_at_the_start(keys):
    with pytest.raises(UserError, match=r"data.global_batch_size: from step 4 on, 4 does not divide over 8"):
        build(config(keys, **{"mesh.data": 8, "mesh.fsdp": 1, "mesh.tensor": 1}))


@pytest.mark.exhaustive
def test_sources_that_moved_are_the_same_run(keys, tmp_path):
    train(config(keys, **{"train.steps": 2, "data.stages": [], "optimizer.schedule": "constant"}), tmp_path / "work")
    moved = {}
    for name, entry in keys["data.mixture"].items():
        moved[name] = {**entry, "source": str(tmp_path / Path(entry["source"]).name)}
        shutil.copy(entry["source"], moved[name]["source"])
    train(config(keys, **{"train.steps": 4, "data.stages": [], "optimizer.schedule": "constant",
                          "data.mixture": dict(reversed(moved.items()))}), tmp_path / "work")
    assert len(lines(tmp_path / "work")) == 4
    assert "data_changes" not in json.loads((tmp_path / "work/run.json").read_text())


@pytest.mark.exhaustive
def test_longer_rows_from_here_on_need_a_new_epoch(keys, tmp_path):
    plain = {"train.steps": 2, "data.stages": [], "optimizer.schedule": "constant"}
    train(config(keys, **plain), tmp_path)
    stage = {"from_step": 2, "seq_len": 64, "global_batch_size": 4}
    with pytest.raises(UserError, match=r"give the stage that has longer rows new_epoch=true"):
        train(config(keys, **{**plain, "train.steps": 3, "data.stages": [stage]}), tmp_path)
    train(config(keys, **{**plain, "train.steps": 3, "data.stages": [{**stage, "new_epoch": True}]}), tmp_path)
    assert [line["tokens"] for line in lines(tmp_path)] == [256, 512, 768]


def test_buckets_that_do_not_fit_the_mesh_are_refused_by_their_key(keys, tmp_path, capsys):
    flags = [f"--config={ROOT}/configs/gpt.py:tiny", f"--workdir={tmp_path}"]
    more = {"data.packing": "bucket", "data.buckets": "[13,64]", "data.seq_len": 64, "data.global_batch_size": 8,
            "mesh.tensor": 1, "mesh.context": 2, "data.source": documents(tmp_path / "texts")}
    flags += [f"--config.{key}={value}" for key, value in {**keys, **more}.items()
              if key not in ("data.stages", "data.mixture")]
    assert main(flags) == 2
    said = capsys.readouterr().err
    assert said.startswith("data.buckets: with rows of 13 tokens") and said.count("\n") == 1
    assert not (tmp_path / "config.json").exists()


def test_a_run_longer_than_its_sources_is_refused(keys, tmp_path, capsys):
    flags = [f"--config={ROOT}/configs/gpt.py:tiny", f"--workdir={tmp_path}"]
    flags += [f"--config.{key}={value}" for key, value in keys.items() if key != "data.stages"]
    for name in ("web", "code"):
        flags.append(f"--config.data.mixture.{name}.epochs=0.02")
    assert main(flags) == 2
    assert "train.steps: data.mixture ends at step" in capsys.readouterr().err


@pytest.mark.slow
def test_a_corpus_without_evaluation_is_trained_without(keys, tmp_path, capsys):
    from jaxtrain.data.prepare.prepare import Options, prepare

    prepare(documents(tmp_path / "texts"), tmp_path / "corpus", Options(eval_fraction=0))
    train(config(keys, **{"data.mixture": {}, "data.stages": [{"from_step": 50, "seq_len": 64, "global_batch_size": 4}],
                          "data.source": str(tmp_path / "corpus"), "train.steps": 2}), tmp_path / "work")
    assert len(lines(tmp_path / "work")) == 2 and "eval_loss" not in (tmp_path / "work/metrics.jsonl").read_text()
    assert "the stage from step 50 on is behind the last step, 2" in capsys.readouterr().err


PRODUCTS = {
    "pipeline": {"mesh.stage": 2, "mesh.data": 2, "mesh.fsdp": 1, "mesh.tensor": 2, "train.accumulation": 2},
    "context": {"mesh.context": 2, "mesh.data": 1, "mesh.fsdp": 2, "mesh.tensor": 2, "train.remat": "full"},
    "pipeline and context": {"mesh.stage": 2, "mesh.context": 2, "mesh.data": 2, "mesh.fsdp": 1, "mesh.tensor": 1,
                             "optimizer.zero_stage": 1, "mesh.context_strategy": "gather"},
}


@pytest.mark.parametrize(("product", "rows"), [
    pytest.param(product, rows, marks=slow_if(one == other == 1))
    for one, product in enumerate(PRODUCTS) for other, rows in enumerate(("best_fit and a mask", "stages", "bucket"))])
def test_rows_that_change_have_the_gradients_of_one_device(keys, tmp_path, rows, product):
    """Gradient descent makes the parameters' change the sum of all gradients: every leaf is compared."""
    more = {"model.num_layers": 2, "optimizer.name": "sgd", "optimizer.schedule": "constant", "optimizer.clip_norm": 0,
            "optimizer.weight_decay": 0, "optimizer.warmup_steps": 0, "optimizer.learning_rate": 0.1,
            "train.precision": "float32", "data.stages": [{"from_step": 2, "seq_len": 64, "global_batch_size": 8,
                                                           "weights": {"code": 3}}], "data.global_batch_size": 16}
    if rows == "bucket":
        more |= {"data.mixture": {}, "data.stages": [], "data.source": documents(tmp_path / "texts"),
                 "data.seq_len": 64, "data.packing": "bucket", "data.buckets": [24, 64], "data.global_batch_size": 8}
    if rows == "best_fit and a mask":
        more |= {"data.mixture": {"talks": {"source": talks(tmp_path)}, "web": keys["data.mixture"]["web"]},
                 "data.packing": "best_fit", "data.seq_len": 64, "data.global_batch_size": 8,
                 "data.stages": [{"from_step": 2, "weights": {"web": 0.2}, "global_batch_size": 16}]}
    one = build(config(keys, **more, **{"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 1}), devices=jax.devices()[:1])
    many = build(config(keys, **more, **PRODUCTS[product]))
    states = [one.init(), many.init()]
    start, shapes = jax.device_get(states[0].params), set()
    for step in range(4):
        batches = [run.batch(step) for run in (one, many)]
        assert all(np.array_equal(batches[0][key], batches[1][key]) for key in batches[0])
        shapes.add(batches[0]["tokens"].shape)
        (states[0], want), (states[1], got) = (
            run.step(state, batch) for run, state, batch in zip((one, many), states, batches, strict=True))
        assert float(got["loss"]) == pytest.approx(float(want["loss"]), rel=1e-5)
        assert float(got["grad_norm"]) == pytest.approx(float(want["grad_norm"]), rel=1e-5)
    assert len(shapes) == 2
    for first, a, b in zip(*map(jax.tree.leaves, (start, *(jax.device_get(state.params) for state in states))),
                           strict=True):
        # Beside the error of gradients: parameters are rounded to float32, and some gradients are rounding only.
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a - first) + 2**-26 * np.linalg.norm(a) + 1e-9


def talks(folder) -> str:
    from jaxtrain.data.prepare.prepare import Options, prepare

    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": [
        {"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} " * (1 + i % 7)}]}) + "\n"
        for i in range(80)))
    return str(prepare(str(folder / "talks.jsonl"), folder / "talks", Options(eval_fraction=0.1)).path)
