"""Arguments of a wrong type are one sentence that names the argument, in every public function."""

import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.base import arguments
from jaxtrain.run import identity

CONFIG = jt.make_config({"train": {"steps": 2}})
PARAMS = {"w": np.zeros((4, 2), np.float32)}


def loss(params, batch):
    return ((batch["x"] @ params["w"]) ** 2).mean()


def batch(step):
    return {"x": np.ones((8, 4), np.float32)}


def build(**changed):
    return jt.build(CONFIG, **dict(model=PARAMS, loss_fn=loss, optimizer=optax.adam(1e-3),
                                   data=jt.BatchFunction(batch)) | changed)


def step(**changed):
    return jt.make_train_step(**dict(loss_fn=loss, optimizer=optax.adam(1e-3), mesh=jt.make_mesh()) | changed)


CASES = {
    "config: it is a dict, not a config": lambda: jt.build({"train": {}}),
    "config: it is 'configs/gpt.py', not a config": lambda: jt.train("configs/gpt.py", "work"),
    "config: it is None, not a config": lambda: jt.plan(None, "h100"),
    "data: it is a list, not a jt.BatchSource or a Grain dataset; wrap a function that": lambda: build(data=[batch(0)]),
    "data: it is a function, not a jt.BatchSource or a Grain dataset; wrap it as jt.Batch": lambda: build(data=batch),
    "data: it is a generator, not a jt.BatchSource or a": lambda: jt.build(CONFIG, data=(batch(n) for n in range(3))),
    "data: it is a dict, not a function": lambda: jt.BatchFunction(batch(0)),
    "data: it cannot be called with 1 argument": lambda: jt.BatchFunction(lambda: batch(0)),
    "data: its function returned no dict of arrays": lambda: build(data=jt.BatchFunction(lambda _: {"x": [[1], []]})),
    "data: its identity is not plain JSON": lambda: identity.own_parts(
        build(data=jt.BatchFunction(batch, identity=loss)), {}),
    "optimizer: it is 'adam', not an optax transformation": lambda: build(optimizer="adam"),
    "optimizer: it is a function, not an optax": lambda: step(optimizer=optax.adam),
    "optimizer: it is 0.001, not an optax": lambda: jt.build(CONFIG, optimizer=1e-3),
    "loss_fn: it is 'mse', not a function": lambda: step(loss_fn="mse"),
    "model: it cannot be called with no arguments": lambda: build(model=lambda rngs: PARAMS),
    "objective: it is 'dpo', not a function": lambda: jt.build(CONFIG, objective="dpo"),
    "mesh: {'data': 1} lacks the axes": lambda: jt.build(CONFIG, mesh={"data": 1}),
    "mesh: None lacks the axes": lambda: step(mesh=None),
    "devices: it is 'cpu', not devices": lambda: build(devices="cpu"),
    "devices: it is an empty list, not devices": lambda: jt.make_mesh(devices=[]),
    "mesh.data: '2' is not a valid axis size": lambda: jt.make_mesh(data="2"),
    "platform: it is 3": lambda: jt.build(CONFIG, devices=8, platform=3),
    "gather: it is 'no'; give True or False": lambda: build(gather="no"),
    "accumulation: None is not a number": lambda: step(accumulation=None),
    "clip_norm: 1 is not a norm": lambda: step(clip_norm="1"),
    "seed: it is '0', not a whole number": lambda: step(seed="0"),
    "compiler_options: it is 'x', not a mapping": lambda: step(compiler_options="x"),
    "state: it is a dict, not a jt.TrainState": lambda: build().module(PARAMS),
    "step: it is '0', not a whole number": lambda: build().batch("0"),
    "step: -1 is negative": lambda: build().batch(-1),
    "workdir: it is None, not a path": lambda: jt.train(CONFIG, None),
    "may_change: 'train.steps' is one text": lambda: jt.train(CONFIG, "work", may_change="train.steps"),
    "observers: it is a Observer, not a list": lambda: jt.train(CONFIG, "work", observers=jt.Observer()),
    "observers: a builtin_function_or_method is not": lambda: jt.train(CONFIG, "work", observers=[print]),
    "observers: the class Observer is not": lambda: jt.train(CONFIG, "work", observers=[jt.Observer]),
    "--config: it is None, not a path": lambda: jt.load_config(None),
    "overrides: it is 'train.steps=5', not a mapping": lambda: jt.make_config({}, "train.steps=5"),
    "overrides: its key 3 is not text": lambda: jt.make_config({}, {3: 4}),
    "config: it is 'x', not a mapping": lambda: jt.make_config("x"),
    "train: its key 3 is not text": lambda: jt.make_config({"train": {3: 4}}),
    "mesh.rules: 3 is not a preset": lambda: jt.rules(3),
    "mesh.overrides.mlp: 3 is not a mesh axis": lambda: jt.rules("fsdp", mlp=3),
    "target: it is 8, not a target's name": lambda: jt.plan(CONFIG, 8),
    "precisions: 'bfloat16' is one text": lambda: jt.plan(CONFIG, "h100", precisions="bfloat16"),
    "WORKDIR: it is 3, not a path": lambda: jt.load_model(3),
    "run: it is 'x', not a run": lambda: jt.generate("x", None, ["a"]),
    "directory: it is 3, not a path": lambda: jt.CheckpointManager(3),
    "config: it is 'gpt2', not a model section": lambda: jt.make_model("gpt2", rngs=None),
    "workdir: it is 3, not a path": lambda: jt.plot(3),
}


@pytest.mark.parametrize("line", CASES)
def test_a_wrong_type_is_one_sentence(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(jt.UserError) as wrong:
        CASES[line]()
    assert f"{wrong.value}".startswith(line) and not list(tmp_path.iterdir())


def test_what_is_given_is_named_briefly():
    assert [*map(arguments.kind, (None, True, 1e-3, "a", "a" * 99, [1], dict, print))] == [
        "None", "True", "0.001", "'a'", "a str", "a list", "the class dict", "a builtin_function_or_method"]


def test_a_function_in_c_may_have_any_signature():
    arguments.is_function("data", np.dtype, "", 1)
    arguments.is_function("data", "".join, "", 1)
