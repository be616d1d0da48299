"""Two runs that part, or do not, for each cause that there is."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.bisection import bisect as bisecting
from jaxtrain.commands.bisect import main
from tests.tiny import ROOT, devices

pytestmark = pytest.mark.usefixtures("cache")
WIDE, ROWS = 4, 8


def config(**keys):
    values = {"train.steps": 4, "train.progress": False, "train.log_every": 1} | keys
    sections = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return jt.make_config(sections)


def parameters():
    draw = np.random.default_rng(0)
    return {"kernel": draw.normal(size=(3, WIDE, WIDE)).astype(np.float32), "bias": np.zeros(WIDE, np.float32)}


def batch(step, changed=-1):
    draw = np.random.default_rng(step)
    x = draw.normal(size=(ROWS, WIDE)).astype(np.float32)
    return {"x": x, "y": draw.normal(size=(ROWS, WIDE)).astype(np.float32) + (step == changed)}


def loss_fn(model, batch, slope=0.1):
    x = batch["x"]
    for kernel in model["kernel"]:
        x = x + jax.nn.leaky_relu(x @ kernel + model["bias"], slope)
    return jnp.square(x - batch["y"]).mean()


def parts(**other):
    return dict(model=parameters, loss_fn=loss_fn, optimizer=optax.adam(1e-2), data=jt.BatchFunction(batch)) | other


def found(of_a=None, of_b=None, a=None, b=None, **keys):
    with devices(8):
        return jt.bisect(a or config(**keys), b or config(**keys), steps=4, parts=(of_a or parts(), of_b or parts()))


def test_runs_of_ones_own_model(capsys):
    assert found().cause == bisecting.SAME
    one = found(of_b=parts(loss_fn=lambda model, batch: loss_fn(model, batch, 0.11)))
    assert one.cause == bisecting.OPERATION and one.step == 1 and one.results[0] == "the loss"
    assert all("loss_fn" in operation["source"] for operation in one.operations), one.text
    one = found(of_b=parts(data=jt.BatchFunction(lambda step: batch(step, changed=2))))
    assert one.cause == bisecting.BATCH and one.step == 3 and "y differ in 8 of 8 rows" in one.text
    one = found(of_b=parts(model=lambda: {**parameters(), "bias": np.full(WIDE, 1e-7, np.float32)}))
    assert one.cause == bisecting.INITIAL and one.results == ["bias"]
    one = found(of_b=parts(optimizer=optax.adam(1e-2, b2=0.99)))
    assert one.cause == bisecting.OPERATION and one.step == 1 and "_tree_math.py" in one.text
    one = found(of_b=parts(optimizer=optax.sgd(1e-2)))
    assert one.cause == bisecting.STATE and "other arrays" in one.text
    one = found(of_b=parts(loss_fn=lambda model, batch: loss_fn(model, jax.tree.map(lambda x: x[::-1], batch))))
    assert one.cause == bisecting.ROUNDING and "by rounding only" in f"{one}"


def test_a_batch_and_a_mesh_behind_rounding():
    """A batch that differs behind rounding, and a collective that only one of two runs on the same mesh lacks."""
    changed = parts(data=jt.BatchFunction(lambda step: batch(step, changed=2)),
                    loss_fn=lambda model, batch: loss_fn(model, jax.tree.map(lambda x: x[::-1], batch)))
    one = found(of_b=changed)
    assert one.cause == bisecting.BATCH and one.step == 3
    nan = parts(loss_fn=lambda model, batch: loss_fn(model, batch) * jnp.nan)
    assert found(nan, nan).cause == bisecting.SAME

    def lacking(model, batch):
        size = jax.sharding.get_abstract_mesh().shape.get("data", 1)
        return loss_fn(model, batch) / size

    mesh = config(**{"mesh.data": 2})
    one = found(parts(), parts(loss_fn=lacking), mesh, mesh)
    assert one.cause == bisecting.MESH and one.text.startswith("B does not")


def test_a_mesh_that_sums_once_too_often():
    def summed(times):
        def loss(model, batch):
            size = jax.sharding.get_abstract_mesh().shape.get("data", 1)
            return loss_fn(model, batch) * (size if times else 1)
        return loss

    meshes = config(**{"mesh.data": 2}), config()
    one = found(parts(loss_fn=summed(False)), parts(loss_fn=summed(False)), *meshes)
    assert one.cause == bisecting.ROUNDING
    one = found(parts(loss_fn=summed(True)), parts(loss_fn=summed(True)), *meshes)
    assert one.cause == bisecting.MESH and "2 times what it should be" in one.text and one.text.startswith("A does not")


class Faulty(jt.Extension):
    """Changes a parameter after a step."""

    def after_step(self, step, state, loop):
        if step != 5:
            return state
        with jax.transfer_guard("allow"):
            return replace(state, params={**state.params, "bias": state.params["bias"] + 0.5})


@pytest.mark.slow
def test_a_record_that_no_step_gives(tmp_path, monkeypatch):
    """A run whose memory was faulty after step 5, which nothing but what it recorded shows."""
    with devices(1):
        for name, more in (("right", []), ("faulty", [Faulty()])):
            run = jt.build(config(**{"train.steps": 8, "checkpoint.every": 3}), **parts(extensions=more))
            jt.train(run, tmp_path / name)
        monkeypatch.chdir(tmp_path)
        one = jt.bisect("right", "faulty", parts=(parts(), parts()))
        assert jt.bisect(tmp_path / "right", tmp_path / "right", parts=(parts(), parts())).cause == bisecting.SAME
        unknown = jt.bisect(tmp_path / "right", tmp_path / "faulty", parts=(parts(), parts(extensions=[Faulty()])))
        assert unknown.cause == bisecting.UNKNOWN and "Faulty changes the state between steps" in unknown.text
    assert one.cause == bisecting.RECORD and one.step == 6 and "faulty does not compute what it recorded" in one.text
    with pytest.raises(jt.UserError, match=r"trained with parts of your own"):
        jt.bisect(tmp_path / "right", tmp_path / "faulty")


@pytest.mark.slow
def test_the_command_with_other_code(tmp_path, capsys):
    """A copy of the code with a change, in a process of its own; the same code; and what is refused."""
    shutil.copytree(ROOT / "jaxtrain", tmp_path / "jaxtrain", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "jaxtrain/kernels/attention/xla_attention.py"
    file.write_text(file.read_text().replace("q_BTHK * K**-0.5", "q_BTHK * K**-0.51"))
    small = tmp_path / "small.py"
    small.write_text("import runpy\n\ndef get_config(variant=None):\n    config = runpy.run_path("
                     f"{str(ROOT / 'configs/gpt.py')!r})['get_config']('tiny')\n    config.data.seq_len = 16\n"
                     "    config.data.global_batch_size = 2\n    config.train.steps = 2\n    return config\n")
    command = [sys.executable, "-m", "jaxtrain", "bisect", f"{small}", f"{small}", "--steps=1", "--json"]
    done = subprocess.run([*command, f"--code_b={tmp_path}"], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 1, done.stderr
    one = json.loads(done.stdout)
    assert one["cause"] == "operation" and [op["name"] for op in one["operations"]] == ["mul", "mul"]
    assert all(op["where"] == "layer 1 of 2" and "xla_attention.py" in op["source"] for op in one["operations"])


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path):
    block, = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs/bisect.md").read_text(), re.M | re.S)
    commands = block.replace(".venv/bin/python", sys.executable).replace(
        ".venv/bin/jaxtrain", f"{sys.executable} -m jaxtrain").replace("configs/", f"{ROOT}/configs/").splitlines()
    done = [subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True, timeout=900,
                           env=os.environ | {"PYTHONPATH": f"{ROOT}"}) for command in commands]
    assert [one.returncode for one in done] == [0, 0, 1], done[-1].stderr
    assert "layer 1 of 2: add with 9.999999747e-05, jaxtrain/models/layers.py" in done[-1].stdout


def test_what_is_refused(tmp_path, capsys):
    for words, said in ((["a", "b"], "a"), ([f"{tmp_path}", f"{tmp_path}"], "no config.json"),
                        (["configs/gpt.py:tiny", "configs/gpt.py:tiny", "--steps=0"], "steps: 0 is too few"),
                        (["configs/gpt.py:tiny", "configs/gpt.py:tiny", f"--code_b={tmp_path}", "--steps=1"],
                         "is no checkout of jaxtrain that has this command")):
        assert main(words) == 2
        assert said in capsys.readouterr().err
