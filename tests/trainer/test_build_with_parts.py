"""The whole loop around parts of one's own: batches, optimizer, objective, and observers that watch it."""

import dataclasses
import itertools
import json
import shutil

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.objectives.next_token import NextToken
from jaxtrain.observe.own_parts import difference
from jaxtrain.run import identity, runinfo
from jaxtrain.run.made_of_sections import with_sections
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


def on_two(**parts):
    return jt.build(config(mesh__data=2), devices=jax.devices()[:2], **parts)


@pytest.fixture(scope="module")
def run():
    return on_two(data=Noise(), optimizer=optax.sgd(0.1), objective=Doubled.of)


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory):
    """The workdir of a whole run, what watched it, and its last state."""
    workdir, watching = tmp_path_factory.mktemp("trained") / "work", Watching()
    return workdir, watching, jt.train(run, workdir, observers=[watching])


@pytest.mark.slow
def test_own_parts_get_the_whole_loop_and_resume(run, trained):
    workdir, watching, state = trained
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
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

    manager = jt.CheckpointManager(workdir / "checkpoints")
    assert manager.latest() == STEPS
    restored = jt.train(run, workdir)  # nothing is left to do
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


# ------------------------------------------------------------------------------- a workdir keeps the parts of its run
def learning_rate_of(rate):
    return dict(optimizer=optax.sgd(rate))


@dataclasses.dataclass(frozen=True)
class Scaled(NextToken):
    by: float = 1.0

    def loss(self, params, batch):
        total, weight, sums = super().loss(params, batch)
        return self.by * total, weight, sums


def scaled(by):
    return dict(objective=lambda config, model: Scaled(**vars(with_sections(NextToken.of, config, model)), by=by))


def noise(identity):
    source = Noise()
    source.identity = identity
    return source


def other_penalties(config, model):
    return dataclasses.replace(with_sections(NextToken.of, config, model), z_loss=0.1)


@pytest.mark.parametrize(("first", "second", "message"), [
    (dict(), scaled(2.0), "without objective= of its own, this one has one"),
    (scaled(2.0), dict(), "with objective= of its own, this one has none"),
    (scaled(2.0), scaled(3.0), r"with objective\.by=2\.0, this one has 3\.0"),
    (scaled(2.0), dict(objective=Doubled.of), r"with objective\.class=Scaled, this one has Doubled"),
    (dict(), dict(objective=other_penalties), "without objective= of its own, this one has one"),
    (dict(), learning_rate_of(0.1), "without optimizer= of its own, this one has one"),
    (learning_rate_of(0.1), learning_rate_of(0.2), "with another optimizer=: its kind, its learning rate or its"),
    (learning_rate_of(0.1), learning_rate_of(optax.linear_schedule(0.1, 0, 5)), "with another optimizer=: its kind"),
    (learning_rate_of(optax.cosine_decay_schedule(0.1, 6)), learning_rate_of(optax.cosine_decay_schedule(0.1, 9)),
     "with another optimizer=: its kind"),
    (learning_rate_of(0.1), dict(optimizer=optax.adam(0.1)), "with another optimizer=: its kind"),
    (dict(data=noise("a")), dict(data=noise("b")), r"with data\.identity=a, this one has b"),
    (dict(data=noise("a")), dict(), "with data= of its own, this one has none"),
])
def test_a_workdir_is_not_resumed_with_other_parts(tmp_path, first, second, message):
    def write(parts):
        run = jt.build(config(), **parts)
        found = identity.own_parts(run, runinfo.recorded_parts(tmp_path) or {})
        runinfo.write_run_files(tmp_path, run.config, mesh_sizes={}, device_kind="cpu", data_manifest_hash=None,
                                parts=found)

    write(first)
    write(first)  # the same ones, made anew, are the same
    with pytest.raises(jt.UserError, match=f"holds a run {message}.*; give another --workdir, or go on with") as error:
        write(second)
    assert "\n" not in str(error.value)


def test_an_optimizer_under_other_versions_is_compared_by_its_arrays(tmp_path):
    run = jt.build(config(), **learning_rate_of(0.1))
    parts = identity.own_parts(run, {})
    (digest,) = parts["optimizer"]["update"].values()
    older = parts | {"optimizer": parts["optimizer"] | {"update": {"jax 0.1, optax 0.1": "another"}}}
    assert difference(older, parts) == "" and len(digest) == 16
    other = jt.build(config(), optimizer=optax.adam(0.1))
    assert difference(older, identity.own_parts(other, {})).startswith("with another opt")


def test_an_optimizer_with_a_region_of_its_own_is_traced_on_a_mesh_of_one_device():
    """Its description is the same whatever mesh the run has."""
    def halved(factor):
        region = jax.shard_map(lambda x: jax.lax.pmean(factor * x, "data"), in_specs=P(), out_specs=P())
        return optax.stateless(lambda updates, params: jax.tree.map(region, updates))

    one, other, third = (identity.own_parts(jt.build(config(mesh__data=n), optimizer=halved(f), devices=jax.devices()[
        :n]), {}) for n, f in ((8, 0.5), (2, 0.5), (2, 0.25)))
    assert difference(one, other) == "" and difference(one, third).startswith("with another optimizer")


def test_more_steps_of_an_optimizer_without_a_schedule(tmp_path):
    for steps in (6, 8):
        run = jt.build(config(train__steps=steps), **learning_rate_of(0.1))
        runinfo.write_run_files(tmp_path, run.config, mesh_sizes={}, device_kind="cpu", data_manifest_hash=None,
                                parts=identity.own_parts(run, {}))


@pytest.mark.slow
def test_what_run_json_said_is_known_to_the_checkpoints(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "work")
    (tmp_path / "work/run.json").unlink()
    other = on_two(data=Noise(), optimizer=optax.sgd(0.2), objective=Doubled.of)
    with pytest.raises(jt.UserError, match="with another optimizer="):
        jt.train(other, tmp_path / "work")


@pytest.mark.slow
def test_the_loop_refuses_other_parts_before_it_makes_a_step(trained):
    workdir = trained[0]
    before = (workdir / "run.json").read_text()
    other = on_two(data=Noise(), optimizer=optax.sgd(0.1))
    with pytest.raises(jt.UserError, match="with objective= of its own, this one has none"):
        jt.train(other, workdir)
    assert (workdir / "run.json").read_text() == before


# ------------------------------------------------------------------------------------------------- what a batch must be
@pytest.mark.parametrize(("change", "message"), [
    (lambda b: {k: v for k, v in b.items() if k != "segments"},
     "it has no array 'segments', which Doubled takes; give the arrays tokens, targets, segments, positions, weights$"),
    (lambda b: b | {"extra": b["tokens"]}, "it has an array 'extra', which Doubled does not take; give the arrays"),
    (lambda b: b | {"weights": b["tokens"]},
     r"its array 'weights' is int32, and Doubled takes float32; convert it by \.astype\(np\.float32\)"),
    (lambda b: b | {"tokens": b["tokens"].astype(float)}, "its array 'tokens' is float32, and Doubled takes int32"),
    (lambda b: b | {"targets": b["targets"][:, :-1]},
     "its array 'targets' has the shape 32 x 15 and 'tokens' has 32 x 16; give all arrays one shape of rows x tokens"),
    (lambda b: {k: v[..., None] for k, v in b.items()}, "its array 'tokens' has the shape 32 x 16 x 1; give all"),
    (lambda b: list(b.values()), "it is a list, and Doubled takes a dict of arrays"),
])
def test_a_wrong_batch_in_one_sentence(run, tmp_path, change, message):
    with pytest.raises(jt.UserError, match=f"^batch: {message}") as error:
        run.step(run.abstract, change(reference.batch(0)))
    assert "\n" not in str(error.value)

    class Wrong(Noise):
        def __getitem__(self, step):
            return change(super().__getitem__(step))

    wrong = jt.build(config(), data=Wrong(), objective=Doubled.of)
    with pytest.raises(jt.UserError, match=f"^batch: {message}"):
        wrong.batch(0)


@pytest.mark.slow
def test_wider_integers_are_the_same_batch(run):
    batch = reference.batch(0)
    wide = {key: x.astype({"i": np.int64, "f": np.float64}[x.dtype.kind]) for key, x in batch.items()}
    (_, metrics), (_, again) = run.step(run.init(), batch), run.step(run.init(), wide)
    assert float(metrics["loss"]) == float(again["loss"])


def test_the_length_in_epochs_follows_from_the_data():
    """The schedule is that of the steps; jt.build refuses a run without a length, as jt.train does."""
    def five(step):
        return reference.batch(step)

    epochs = dict(train__steps=0, train__epochs=0.8, mesh__data=2, optimizer__warmup_steps=0.5,
                  optimizer__schedule="linear", optimizer__learning_rate=0.1)
    built = jt.build(config(**epochs), devices=jax.devices()[:2], data=jt.BatchFunction(five, num_batches=5))
    assert (built.config.train.steps, built.config.train.epochs, built.config.optimizer.warmup_steps) == (4, 0, 2)
    assert [round(float(built.sharded.settings.schedule(n)), 3) for n in range(5)] == [0.05, 0.1, 0.1, 0.055, 0.01]
    with pytest.raises(jt.UserError, match=r"^train\.epochs: the batches given by data= have no known length"):
        jt.build(config(**epochs), devices=jax.devices()[:2], data=jt.BatchFunction(five))
    with pytest.raises(jt.UserError, match=r"^train\.steps: a run of 0 steps trains nothing"):
        jt.build(config(train__steps=0, optimizer__warmup_steps=0, mesh__data=2), devices=jax.devices()[:2])
