"""The whole loop around parts of one's own: batches, optimizer, objective, and observers that watch it."""

import itertools
import json

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.objectives import NextToken
from tests.numerics import reference

STEPS = 6


class Noise:
    """Batches by step, without a corpus."""

    num_batches = None

    def __getitem__(self, step):
        return reference.batch(step)

    def rows(self, step, indices):
        return {key: value[list(indices)] for key, value in self[step].items()}

    def shape(self, step):
        return reference.BATCH, reference.SEQ

    def shapes_of(self, start, stop):
        return [self.shape(start)]

    def tokens(self, step):
        return step * reference.BATCH * reference.SEQ

    def epochs(self, step):
        return {"noise": 0.0}


class Watching(jt.Observer):
    def __init__(self):
        self.events = []

    def on_batch(self, step, batch):
        assert isinstance(batch["tokens"], jax.Array)
        self.events.append(("batch", step))

    def on_dispatch(self, step, metrics):
        assert isinstance(metrics["loss"], jax.Array)
        self.events.append(("dispatch", step))

    def on_complete(self, record):
        self.events.append(("complete", record["step"], record["loss"]))


class Doubled(NextToken):
    """An objective of one's own."""

    def loss(self, params, batch):
        total, weight, sums = super().loss(params, batch)
        return 2 * total, weight, sums


def config(**keys):
    return reference.tiny("gpt2", **(dict(mesh__data=8, train__steps=STEPS, checkpoint__every=3) | keys))


@pytest.fixture(scope="module")
def run():
    return jt.build(config(), data=Noise(), optimizer=optax.sgd(0.1), objective=Doubled.of)


@pytest.mark.slow
def test_own_parts_get_the_whole_loop_and_resume(run, tmp_path):
    watching = Watching()
    state = jt.train(run, tmp_path, observers=[watching])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)] and "learning_rate" not in lines[0]
    on_loop = [event for event in watching.events if event[0] != "complete"]
    assert on_loop == [*itertools.chain.from_iterable((("batch", n), ("dispatch", n)) for n in range(1, STEPS + 1))]
    assert [event[1:] for event in watching.events if event[0] == "complete"] == [
        (line["step"], line["loss"]) for line in lines]

    params, again = reference.initial("gpt2"), optax.sgd(0.1)
    doubled = jax.jit(jax.value_and_grad(lambda p, batch: 2 * reference.loss(run.config.model, p, batch)))
    want, gradient = doubled(params, reference.batch(0))
    assert lines[0]["loss"] == pytest.approx(float(want), rel=1e-5)
    clip = min(1, run.config.optimizer.clip_norm / float(reference.norm_of(gradient)))
    updates, _ = again.update(jax.tree.map(lambda g: g * clip, gradient), again.init(params))
    second, _ = doubled(optax.apply_updates(params, updates), reference.batch(1))
    assert lines[1]["loss"] == pytest.approx(float(second), rel=1e-5)

    manager = jt.CheckpointManager(tmp_path / "checkpoints")
    assert manager.latest() == STEPS
    restored = jt.train(run, tmp_path)  # nothing is left to do
    assert jax.tree.all(jax.tree.map(np.array_equal, restored, state))


def test_a_run_has_its_parts_already(run, tmp_path):
    with pytest.raises(jt.UserError, match="data: the run has one already"):
        jt.train(run, tmp_path, data=Noise())


def test_a_batch_of_an_undeclared_shape_is_refused(run):
    with pytest.raises(jt.UserError, match=r"its shape is 8 x 16, and the config declares 32 x 16"):
        run.step(run.abstract, reference.batch(0, rows=8))


def test_an_optimizer_of_ones_own_is_not_offloaded():
    with pytest.raises(jt.UserError, match=r"optimizer\.offload"):
        jt.build(config(optimizer__offload=True), optimizer=optax.sgd(0.1))


def test_an_objective_that_cannot_be_cut_has_no_pipeline():
    class Whole(NextToken):
        pipeline_parts = None

    with pytest.raises(jt.UserError, match=r"mesh\.stage: Whole cannot be cut"):
        jt.build(config(mesh__data=4, mesh__stage=2), objective=Whole.of)


def test_stages_share_the_optimizer():
    run = jt.build(config(data__stages=[{"from_step": 3, "seq_len": reference.SEQ // 2}]), data=Noise())
    later = run.of_shape((reference.BATCH, reference.SEQ // 2))
    assert later.optimizer is run.optimizer and later.abstract is run.abstract


@pytest.mark.parametrize("keys", [dict(train__sample_tokens=5), dict(train__eval_every=2)])
def test_own_batches_have_nothing_to_evaluate(keys):
    with pytest.raises(jt.UserError, match=r"data= have no tokenizer and no evaluation split"):
        jt.build(config(**keys), data=Noise())


def test_a_run_for_other_devices_leaves_no_workdir(tmp_path):
    with pytest.raises(jt.UserError, match="not here"):
        jt.train(jt.build(config(mesh__data=4), devices=4), tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_an_own_objective_has_a_mesh_of_its_own():
    keys = dict(mesh__auto=True, mesh__data=-1)
    with pytest.raises(jt.UserError, match=r"mesh\.auto: the planner knows only"):
        jt.build(config(**keys), objective=Doubled.of)


def test_a_subclass_is_evaluated_on_what_it_learns_from(run):
    assert type(run.objective.evaluation) is Doubled
