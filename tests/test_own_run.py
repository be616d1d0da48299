"""The whole loop around a model of one's own: NNX modules, pytrees, Linen parameters, with own losses and batches."""

import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxtrain as jt
from jaxtrain import observe
from jaxtrain.trainer.loop import Interrupted
from jaxtrain.trainer.reporting import constants, start_of_run
from tests.tiers import exhaustive, slow, slow_if
from tests.tiny import free_address

ROOT = Path(__file__).parents[1]
ROWS, WIDE, HIDDEN, CLASSES, STEPS = 16, 8, 16, 4, 6
pytestmark = pytest.mark.usefixtures("cache")


def make_batch(step):
    """Images of bytes, labels and a weight, under names and dtypes that no token batch has."""
    draw = np.random.default_rng(step)
    image = draw.integers(0, 255, (ROWS, 2, WIDE // 2), np.uint8)
    return {"image": image, "label": image.reshape(ROWS, WIDE)[:, :CLASSES].argmax(1).astype(np.int32),
            "weight": draw.random(ROWS, np.float32)}


def features(batch):
    return batch["image"].reshape(-1, WIDE) / 127.0 - 1


def weighted(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return jt.Weighted((losses * batch["weight"]).sum(), batch["weight"].sum(),
                       {"accuracy": (batch["weight"] * (logits.argmax(-1) == batch["label"])).sum()})


def make_tree():
    one, two = jax.random.split(jax.random.key(0))
    return {"layers": [{"kernel": 0.3 * jax.random.normal(one, (WIDE, HIDDEN)), "bias": jnp.zeros(HIDDEN)},
                       {"kernel": 0.3 * jax.random.normal(two, (HIDDEN, CLASSES)), "bias": jnp.zeros(CLASSES)}]}


def logits(layers, x):
    first, second = layers
    return jax.nn.relu(x @ first["kernel"] + first["bias"]) @ second["kernel"] + second["bias"]


def tree_loss(params, batch):
    return weighted(logits(params["layers"], features(batch)), batch)


class Module(nnx.Module):
    def __init__(self):
        (a, b) = make_tree()["layers"]
        self.up, self.up_bias = nnx.Param(a["kernel"], axes=("embed", "mlp")), nnx.Param(a["bias"], axes=("mlp",))
        self.down, self.down_bias = nnx.Param(b["kernel"], axes=("mlp", None)), nnx.Param(b["bias"])

    def __call__(self, x):
        return jax.nn.relu(x @ self.up[...] + self.up_bias[...]) @ self.down[...] + self.down_bias[...]


def module_loss(module, batch):
    return weighted(module(features(batch)), batch)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        named = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        return nn.Dense(CLASSES)(nn.relu(nn.Dense(HIDDEN, kernel_init=named)(x)))


def linen_parameters():
    return Linen().init(jax.random.key(0), jnp.ones((1, WIDE)))


def linen_loss(variables, batch):
    return weighted(Linen().apply(variables, features(batch)), batch)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Callable:
    """A pytree that is a model too, as Equinox has them."""

    layers: list

    def __call__(self, x):
        return logits(self.layers, x)


def callable_loss(model, batch):
    return weighted(model(features(batch)), batch)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Layered:
    """A pytree like an Equinox module: fields are children, arrays or not, except those declared static."""

    layers: list
    activation: Any  # a leaf that is a function
    rate: float  # a leaf that is a number, as a dropout layer has
    scaled: bool

    def tree_flatten(self):
        return (self.layers, self.activation, self.rate), self.scaled

    @classmethod
    def tree_unflatten(cls, scaled, children):
        return cls(*children, scaled)

    def __call__(self, x):
        assert callable(self.activation) and isinstance(self.rate, float)
        first, second = self.layers
        x = self.activation(x @ first["kernel"] + first["bias"])
        return (self.rate if self.scaled else 1.0) * (x @ second["kernel"] + second["bias"])


def keyed_loss(params, batch, key):
    x = features(batch)
    return weighted(logits(params["layers"], x * jax.random.bernoulli(key, 0.8, x.shape)), batch)


KINDS = {
    "module": dict(model=Module, loss_fn=module_loss),
    "pytree": dict(model=make_tree(), loss_fn=tree_loss),
    "linen": dict(model=linen_parameters, loss_fn=linen_loss),
    "callable": dict(model=lambda: Callable(make_tree()["layers"]), loss_fn=callable_loss),
    "equinox": dict(model=lambda: Layered(make_tree()["layers"], jax.nn.relu, 0.5, True), loss_fn=callable_loss),
    "key": dict(model=make_tree, loss_fn=keyed_loss, with_key=True),
}
MESHES = {"one": dict(data=1), "eight": dict(data=2, fsdp=2, tensor=2)}


def config(mesh="one", **keys):
    return jt.make_config({"mesh": MESHES[mesh], "train": {"steps": STEPS, "progress": False},
                           "checkpoint": {"every": 2, "keep": 9}},
                          {key.replace("__", "."): value for key, value in keys.items()})


def build(kind="pytree", mesh="one", data=None, optimizer=None, **keys):
    devices = jax.devices()[:int(np.prod(list(MESHES[mesh].values())))]
    parts = dict(optimizer=optimizer or optax.adam(1e-2), data=data or jt.BatchFunction(make_batch)) | KINDS[kind]
    return jt.build(config(mesh, **keys), devices=devices, **parts)


@functools.cache
def shared(kind, mesh="one"):
    """Compiled once for all tests that train it."""
    return build(kind, mesh)


def lines(workdir):
    """Return the values in metrics.jsonl that do not depend on time."""
    read = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    keys = "step", "loss", "grad_norm", "accuracy", "examples", "skipped"
    return [{key: line[key] for key in keys} for line in read]


class StopAt(jt.Observer):
    def __init__(self, step):
        self.step = step

    def on_dispatch(self, step, metrics):
        if step == self.step:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("kind", [kind if kind == "module" else pytest.param(
    kind, marks=slow_if(kind == "equinox")) for kind in KINDS])
def test_a_run_that_was_stopped_is_to_the_bit_the_one_that_was_not(kind, tmp_path):
    run = shared(kind)
    straight = jt.train(run, tmp_path / "straight")
    assert int(straight.step) == STEPS and type(straight.params) is type(run.abstract.params)
    with pytest.raises(Interrupted) as stopped:
        jt.train(run, tmp_path / "stopped", observers=[StopAt(3)])
    assert (stopped.value.step, stopped.value.signal) == (3, signal.SIGTERM)
    again = build(kind)  # as another process would
    chex.assert_trees_all_equal(jt.train(again, tmp_path / "stopped"), straight)
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight") and len(lines(tmp_path / "straight")) == STEPS
    module = run.module(straight)
    assert type(module) is {"module": Module, "callable": Callable, "equinox": Layered}.get(kind, dict)
    halves = jax.tree.leaves(nnx.state(run.module(straight, jnp.bfloat16)) if kind == "module" else
                             run.module(straight, jnp.bfloat16))
    floating = [leaf for leaf in halves if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert floating and all(leaf.dtype == jnp.bfloat16 for leaf in floating)


@pytest.mark.parametrize("kind", [*slow("pytree", "linen"), *exhaustive("module", "equinox")])
def test_any_mesh_gives_the_numbers_of_one_device(kind, tmp_path):
    jt.train(shared(kind), tmp_path / "one")
    jt.train(build(kind, "eight", train__accumulation=2, optimizer__zero_stage=1), tmp_path / "eight")
    for one, eight in zip(lines(tmp_path / "one"), lines(tmp_path / "eight"), strict=True):
        assert eight == pytest.approx(one, rel=1e-5)


def test_the_loop_makes_the_steps_of_a_plain_one(tmp_path):
    clip, optimizer = 0.1, optax.sgd(0.5)  # which shows what was clipped
    params, state, losses = make_tree(), optimizer.init(make_tree()), []

    def mean(params, batch):
        found = tree_loss(params, batch)
        return found.total / found.weight

    for step in range(STEPS):
        loss, grads = jax.value_and_grad(mean)(params, make_batch(step))
        factor = jnp.minimum(1, clip / optax.tree.norm(grads))
        updates, state = optimizer.update(jax.tree.map(lambda g, f=factor: g * f, grads), state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    jt.train(build(optimizer=optimizer, optimizer__clip_norm=clip), tmp_path)
    assert [line["loss"] for line in lines(tmp_path)] == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
def test_its_steps_are_to_the_bit_those_of_make_train_step():
    run = build("module", "eight", train__accumulation=2)
    step = jt.make_train_step(module_loss, optax.adam(1e-2), mesh=jt.make_mesh(**MESHES["eight"]), accumulation=2,
                              clip_norm=run.config.optimizer.clip_norm)
    ours, theirs = run.init(), step.init(Module)
    for n in range(2):
        ours, metrics = run.step(ours, run.batch(n))
        theirs, fewer = step(theirs, make_batch(n))
        chex.assert_trees_all_equal({key: metrics[key] for key in fewer}, fewer)
    chex.assert_trees_all_equal(ours.params, theirs.params)


def test_a_spike_is_gone_back_from(tmp_path):
    """Batch 3 is not finite: the run goes back to the checkpoint before it and passes over the batch."""
    def bad(step):
        batch = make_batch(step)
        return batch | {"weight": np.full_like(batch["weight"], np.inf if step == 3 else 1)}

    keys = dict(resilience__spikes="rollback", resilience__max_skips=1, resilience__skip_batches=1,
                resilience__replay_every=2, resilience__check_every=1)
    state = jt.train(build(data=jt.BatchFunction(bad), **keys), tmp_path)
    assert json.loads((tmp_path / "skipped_batches.json").read_text())["batches"] == [3]
    assert int(state.step) == STEPS and int(state.skipped) == 0
    assert all(line["loss"] is not None for line in lines(tmp_path)) and len(lines(tmp_path)) == STEPS


@pytest.mark.parametrize("mesh", MESHES)
def test_a_moving_average_is_kept(mesh):
    run = build("pytree", mesh, train__ema_decay=0.75)
    state = run.init()
    want = jax.tree.map(np.float64, jax.device_get(state.params))
    for step in range(3):
        state, _ = run.step(state, run.batch(step))
        want = jax.tree.map(lambda a, p: 0.75 * a + 0.25 * np.float64(p), want, jax.device_get(state.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), jax.device_get(state.averaged.params), want)


def test_what_is_written_does_not_mislead(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(observe, "device_peak", lambda kind: 1e12)
    jt.train(shared("module"), tmp_path)
    said = capsys.readouterr().err
    assert "Module, 212 parameters" in said and f"{STEPS} steps of {ROWS} examples" in said and "gpt2" not in said
    written = json.loads((tmp_path / "config.json").read_text())
    assert "model" not in written and "pipeline" not in written and set(written["data"]) == {"prefetch", "workers"}
    assert set(written["optimizer"]) == {"clip_norm", "zero_stage"}
    assert "mfu" not in (tmp_path / "metrics.jsonl").read_text()
    parts = json.loads((tmp_path / "run.json").read_text())["own_parts"]
    assert parts["loss_fn"] == {"function": "module_loss"} and parts["model"] == {"class": "Module"}


@pytest.mark.parametrize(("key", "value", "message"), [
    ("model.num_layers", 3, "nothing reads it in this run, since the model is one of your own; leave it out"),
    ("data.seq_len", 128, "nothing reads it"), ("optimizer.learning_rate", 0.5, "nothing reads it"),
    ("train.sample_tokens", 5, "nothing reads it"), ("train.eval_every", 5, "nothing reads it"),
    ("train.precision", "fp8", "fp8 is the precision of products in jaxtrain's own layers; use bfloat16"),
    ("train.remat", "full", "nothing reads it"), ("train.freeze", ["*"], "nothing reads it"),
    ("train.seed", 3, "nothing reads it in this run, since loss_fn takes no key"),
    ("mesh.auto", True, "the planner knows only"),
    ("pipeline.schedule", "gpipe", "nothing reads it"), ("checkpoint.best", "eval_loss", "no evaluation split"),
    ("data.global_batch_size", 32, f"it is 32, and the batches given by data= have {ROWS} rows"),
])
def test_keys_that_nothing_would_read_are_refused(key, value, message):
    section, name = key.split(".")
    made = dataclasses.replace(jt.Config(), **{section: dataclasses.replace(
        getattr(jt.Config(), section), **{name: value})})
    with pytest.raises(jt.UserError, match=f"^{key}: .*{message}") as error:
        jt.build(made, optimizer=optax.adam(1e-2), data=jt.BatchFunction(make_batch), **KINDS["pytree"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("change", "message"), [
    (dict(model=None), "^model: it is missing; give an NNX module"),
    (dict(loss_fn=None), "^loss_fn: it is missing; with model= you must pass one too; give a function"),
    (dict(optimizer=None), "^optimizer: it is missing; .*; pass an optax"),
    (dict(data=None), "^data: it is missing; .*; give a jt.BatchSource"),
    (dict(objective=lambda config, model: None), "^objective: a model of your own is trained by its loss_fn"),
    (dict(data=jt.BatchFunction(lambda step: {"x": 1.0})), "^data: its function returned no dict of arrays"),
    (dict(model=None, loss_fn=None, axes={}), "^axes: it is about a model of your own"),
])
def test_what_a_run_of_ones_own_needs(change, message):
    parts = dict(optimizer=optax.adam(1e-2), data=jt.BatchFunction(make_batch)) | KINDS["pytree"] | change
    with pytest.raises(jt.UserError, match=message):
        jt.build(jt.Config(), **parts)


@pytest.mark.parametrize(("change", "message"), [
    (lambda b: b | {"label": b["label"].astype(np.float32)},
     r"its array 'label' is float32, and this run takes int32; convert it by \.astype\(np\.int32\)"),
    (lambda b: {"image": b["image"], "label": b["label"]}, "it has no array 'weight', which this run takes"),
    (lambda b: b | {"name": b["label"]}, "it has an array 'name', which this run does not take"),
    (lambda b: b | {"image": b["image"].reshape(ROWS, WIDE)},
     "its array 'image' has the shape 16 x 8, and the batches before had 3 dimensions"),
    (lambda b: b | {"weight": b["weight"][:8]}, "its array 'weight' has the shape 8 and 'image' has 16 x 2 x 4"),
])
def test_a_batch_that_changes_is_told_in_one_sentence(change, message, tmp_path):
    data = jt.BatchFunction(lambda step: change(make_batch(step)) if step == 2 else make_batch(step))
    with pytest.raises(jt.UserError, match=f"^batch: {message}") as error:
        jt.train(build(data=data), tmp_path)
    assert "\n" not in str(error.value)


def test_rows_that_do_not_divide_are_refused_at_build():
    with pytest.raises(jt.UserError, match="16 examples do not divide over 4 batch shards x accumulation=8"):
        build(mesh="eight", train__accumulation=8)


class TwoShapes:
    """Every third batch has half as many rows."""

    num_batches = None

    def __getitem__(self, step):
        return {key: x[: self.shape(step)[0]] for key, x in make_batch(step).items()}

    def rows(self, step, indices):
        return {key: x[list(indices)] for key, x in self[step].items()}

    def shape(self, step):
        return (ROWS // 2 if step % 3 == 2 else ROWS), 1

    def shapes_of(self, start, stop):
        return [(ROWS, 1), (ROWS // 2, 1)]

    def tokens(self, step):
        return sum(self.shape(before)[0] for before in range(step))

    def epochs(self, step):
        return {}


def test_batches_of_several_shapes_are_compiled_once_each_before_the_loop(tmp_path):
    traced = []

    def loss(params, batch):
        traced.append(batch["image"].shape[0])
        return tree_loss(params, batch)

    began = []

    class First(jt.Observer):
        def on_batch(self, step, batch):
            began.append(list(traced))

    data = TwoShapes()
    run = jt.build(config(), devices=jax.devices()[:1], model=make_tree, loss_fn=loss, optimizer=optax.adam(1e-2),
                   data=data)
    jt.train(run, tmp_path, observers=[First()])
    assert traced == [ROWS, ROWS // 2] == began[0]
    assert [line["examples"] for line in lines(tmp_path)] == [data.tokens(n) for n in range(1, STEPS + 1)]


def second_loss(params, batch):
    return tree_loss(params, batch)


@pytest.mark.parametrize(("change", "message"), [
    (dict(loss_fn=second_loss), "with loss_fn.function=tree_loss, this one has second_loss"),
    (dict(loss_fn=functools.partial(tree_loss), data=jt.BatchFunction(make_batch, identity="other files")),
     "with data.identity="),
    (dict(optimizer=optax.adam(2e-2)), "with another optimizer="),
    (KINDS["module"], "with model.class=dict, this one has Module"),
    (KINDS["key"], "with loss_fn.function=tree_loss, this one has keyed_loss"),
])
def test_a_workdir_is_not_resumed_with_other_parts(change, message, tmp_path):
    jt.train(build(train__steps=1), tmp_path)
    parts = dict(optimizer=optax.adam(1e-2), data=jt.BatchFunction(make_batch)) | KINDS["pytree"] | change
    with pytest.raises(jt.UserError, match=message):
        jt.train(jt.build(config(), devices=jax.devices()[:1], **parts), tmp_path)
    with pytest.raises(jt.UserError, match="with model= of its own, this one has none"):
        jt.train(jt.make_config({"train": {"steps": 1}, "data": {"global_batch_size": 8, "seq_len": 32},
                                 "model": {"num_layers": 1, "embed_dim": 32}}), tmp_path)


def test_more_steps_may_follow(tmp_path):
    jt.train(build(train__steps=2), tmp_path)
    state = jt.train(build(train__steps=STEPS), tmp_path)
    chex.assert_trees_all_equal(state, jt.train(shared("pytree"), tmp_path / "straight"))


def test_evaluate_and_report(capsys):
    run = shared("module")
    state = run.init()
    total, weight = run.sharded.evaluate(state, make_batch(0))[:2]
    assert float(weight) == pytest.approx(make_batch(0)["weight"].sum(), rel=1e-6)
    found = module_loss(Module(), make_batch(0))
    assert float(total) == pytest.approx(float(found.total), rel=1e-5)
    with pytest.raises(jt.UserError, match="data: batches given by data= have no evaluation split"):
        run.evaluate(state)
    with pytest.raises(jt.UserError, match="seed: the initial values are those"):
        run.init(seed=1)
    run.report()
    assert "up" in capsys.readouterr().out
    assert "num_partitions = 8" in build("module", "eight").lower().as_text()


PROCESS = """
import sys
from jaxtrain.distributed import processes
number = int(sys.argv[1])
processes.initialize(sys.argv[2], 2, number)
from tests.test_own_run import build
import jaxtrain as jt
jt.train(build("module", "eight", mesh__data=2), sys.argv[3])
processes.leave(0)
"""


@pytest.mark.slow
def test_two_processes_read_their_own_rows_and_give_the_same_numbers(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu",
                   "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    address = free_address()
    started = [subprocess.Popen([sys.executable, "-c", PROCESS, str(i), address, str(tmp_path / "two")], cwd=ROOT,
                                env=environment, stderr=subprocess.PIPE, text=True) for i in range(2)]
    try:
        told = [process.communicate(timeout=200)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], told
    jt.train(build("module", "eight"), tmp_path / "one")
    for one, two in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(("arrays", "given", "shape"), [
    ({"image": np.zeros((4, 8), np.uint8)}, None, (4, 1)),  # no name of tokens
    ({"inputs": np.zeros((4, 8), np.float32)}, None, (4, 1)),
    ({"inputs": np.zeros((4,), np.int32)}, None, (4, 1)),
    ({"input_ids": np.zeros((4, 8), np.int32), "label": np.zeros(4, np.int32)}, None, (4, 8)),
    ({"label": np.zeros(4, np.int32), "tokens": jnp.zeros((4, 9), jnp.uint16)}, None, (4, 9)),
    ({"x": np.zeros((4, 8), np.int32)}, 8, (4, 8)),
])
def test_tokens_are_counted_where_a_batch_has_them_and_examples_elsewhere(arrays, given, shape):
    data = jt.BatchFunction(lambda step: arrays, tokens_per_row=given)
    assert data.shape(3) == shape and data.tokens(3) == 3 * shape[0] * shape[1]
    run = build(data=data)
    unit = "examples" if shape[1] == 1 else "tokens"
    counted = constants(run, run.train_batches)(2)
    assert (counted.unit, counted.tokens_per_step, counted.tokens_before) == (unit, math.prod(shape), data.tokens(2))
    described = start_of_run(run, Path("here"))
    assert f"{STEPS} steps of {'4' if unit == 'examples' else f'4 x {shape[1]}'} {unit};" in described


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "8"])
def test_a_wrong_number_of_tokens_is_refused(wrong):
    with pytest.raises(jt.UserError, match=r"^tokens_per_row: .* is not a number of tokens"):
        jt.BatchFunction(make_batch, tokens_per_row=wrong)


# ----------------------------------------------------------------------------------------- on the text of the config
def text_model():
    one, two = jax.random.split(jax.random.key(0))
    return {"table": 0.1 * jax.random.normal(one, (257, HIDDEN)), "out": 0.1 * jax.random.normal(two, (HIDDEN, 257))}


def text_loss(params, batch):
    assert {key: x.dtype.name for key, x in batch.items()} == {
        **dict.fromkeys(("tokens", "targets", "segments", "positions"), "int32"), "weights": "float32"}
    logits = params["table"][batch["tokens"]] @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    hits = logits.argmax(-1) == batch["targets"]
    return jt.Weighted((losses * batch["weights"]).sum(), batch["weights"].sum(),
                       {"accuracy": (hits * batch["weights"]).sum()})


def on_text(folder, mesh="one", **data):
    for name in ("a", "b"):
        (folder / name).mkdir(exist_ok=True)
        for number in range(12):
            (folder / name / f"{number}.txt").write_text(f"text {name} {number} of these words\n" * 40)
    made = jt.make_config({
        "mesh": MESHES[mesh], "train": {"steps": STEPS, "progress": False, "eval_every": 3, "eval_batches": 99},
        "checkpoint": {"every": 3, "best": "eval_loss"},
        "data": {"seq_len": 32, "global_batch_size": 8, "cache_dir": f"{folder / 'cache'}"} | data})
    devices = jax.devices()[:int(np.prod(list(MESHES[mesh].values())))]
    return jt.build(made, devices=devices, model=text_model, loss_fn=text_loss, optimizer=optax.adam(1e-2))


def test_the_text_of_the_config_is_trained_and_evaluated_on(tmp_path):
    """A mixture; resumed, it is to the bit the run that was not stopped."""
    mixture = {"a": {"source": f"{tmp_path / 'a'}", "weight": 2}, "b": {"source": f"{tmp_path / 'b'}", "weight": 1}}
    run = on_text(tmp_path, mixture=mixture)
    state = jt.train(run, tmp_path / "straight")
    with pytest.raises(Interrupted):
        jt.train(run, tmp_path / "work", observers=[StopAt(4)])
    chex.assert_trees_all_equal(jt.train(on_text(tmp_path, mixture=mixture), tmp_path / "work"), state)
    total, weight, hits = 0.0, 0.0, 0.0
    for step in range(run.eval_batches.num_batches):
        batch = run.eval_batches[step]
        logits = np.asarray(state.params["table"])[batch["tokens"]] @ np.asarray(state.params["out"])
        logits -= logits.max(-1, keepdims=True)
        losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        total, weight = total + (losses * batch["weights"]).sum(), weight + batch["weights"].sum()
        hits += ((logits.argmax(-1) == batch["targets"]) * batch["weights"]).sum()
    read = [json.loads(line) for line in (tmp_path / "work" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in read if "eval_loss" in line] == [3, 6]
    np.testing.assert_allclose([read[-1]["eval_loss"], read[-1]["eval_accuracy"]], [total / weight, hits / weight],
                               rtol=1e-5)
    assert read[0]["tokens"] == 8 * 32
    recorded = json.loads((tmp_path / "work" / "run.json").read_text())
    assert recorded["data_manifest_hash"] == run.corpus.manifest_hash and "data" not in recorded["own_parts"]
    assert json.loads((tmp_path / "work" / "config.json").read_text())["data"]["mixture"] == mixture
    assert "data" not in json.loads((tmp_path / "work" / "config.json").read_text())["train"]


@pytest.mark.parametrize("packing", exhaustive("concat", "best_fit", "bucket"))
def test_every_packing_and_mesh_gives_the_numbers_of_one_device(tmp_path, packing):
    losses = []
    for mesh in MESHES:
        run = on_text(tmp_path, mesh, source=f"{tmp_path / 'a'}", packing=packing)
        state = jt.train(run, tmp_path / mesh)
        losses.append([run.evaluate(state)["eval_loss"], *(json.loads(line)["loss"] for line in (
            tmp_path / mesh / "metrics.jsonl").read_text().splitlines() if '"loss"' in line)])
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_keys_that_do_not_fit_text_are_refused(tmp_path):
    with pytest.raises(jt.UserError, match=r"^data\.cross_document_attention: nothing reads it"):
        on_text(tmp_path, source=f"{tmp_path / 'a'}", cross_document_attention=True)
    with pytest.raises(jt.UserError, match=r"^batch: 6 examples do not divide over 4"):
        on_text(tmp_path, "eight", source=f"{tmp_path / 'a'}", global_batch_size=6)
