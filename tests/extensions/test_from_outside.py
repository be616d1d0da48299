"""Extensions from outside of the package: one file in a folder, given as an object or through an entry point."""

import importlib
from importlib import metadata

import chex
import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.run import identity
from tests.plug_in_package import importable, install_documented

EVERY, RATE, STEPS = 2, 0.5, 4
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def module(tmp_path):
    """The module of docs/extend.md, in a folder that jaxtrain does not know; its package registers it."""
    with importable(install_documented(tmp_path / "site")):
        yield importlib.import_module("lookahead")


def config(tmp_path, **keys):
    (tmp_path / "text.txt").write_text("some words and others, again and again. " * 100)
    return jt.load_config("configs/gpt.py:tiny", {
        "data.source": f"{tmp_path}/text.txt", "data.global_batch_size": 8, "data.seq_len": 16, "model.num_layers": 1,
        "model.embed_dim": 32, "model.max_seq_len": 16, "model.vocab_size": 384, "train.steps": STEPS,
        "train.eval_every": 0, "optimizer.warmup_steps": 0, "optimizer.schedule": "constant",
        "checkpoint.every": 2, "mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, **keys})


@pytest.mark.slow
def test_one_that_is_given_trains_on_a_mesh_and_resumes(tmp_path, module, capsys):
    def run(steps=STEPS, **more):
        return jt.build(config(tmp_path, **{"train.steps": steps}), extensions=[module.Lookahead(EVERY, RATE)], **more)

    built = run()
    assert built.layout.state.extras["slow"] == built.layout.state.params
    plain, begun = jt.build(config(tmp_path)), built.init()
    fast, slow = plain.init(), jax.device_get(begun.params)
    for step in range(EVERY):
        fast, _ = plain.step(fast, plain.batch(step))
        begun, _ = built.step(begun, built.batch(step))
    want = jax.tree.map(lambda a, b: a + RATE * (b - a), slow, jax.device_get(fast.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), jax.device_get(begun.params), want)
    chex.assert_trees_all_equal(begun.params, begun.extras["slow"])

    whole = jt.train(built, tmp_path / "whole")
    jt.train(run(3), tmp_path / "parts")
    resumed = jt.train(run(), tmp_path / "parts", may_change=["train.steps"])
    assert "resumed from step 3" in capsys.readouterr().err
    chex.assert_trees_all_equal((whole.params, whole.extras["slow"]), (resumed.params, resumed.extras["slow"]))
    assert identity.own_parts(built, {})["extensions"] == [{"class": "Lookahead", "every": EVERY, "rate": RATE}]
    with pytest.raises(jt.UserError, match=r"without extensions= |with extensions= of its own, this one has none"):
        jt.train(plain, tmp_path / "whole")


def test_one_of_another_package_is_asked_for_by_its_section(tmp_path, module):
    keys = {"lookahead.every": "2", "lookahead.rate": RATE}
    asked = config(tmp_path, **keys)
    assert asked.to_dict()["lookahead"] == {"every": 2, "rate": RATE} and "extensions" not in asked.to_dict()
    run = jt.build(asked)
    assert run.extensions[-1] == module.Lookahead(EVERY, RATE) and not identity.has_own_parts(run)
    state = jt.train(run, tmp_path / "work")
    chex.assert_trees_all_equal(state.params, state.extras["slow"])
    again = jt.load_config(tmp_path / "work/config.json")
    assert again == asked and int(jt.train(again, tmp_path / "work").step) == STEPS
    for key, value, words in (("lookahead.rates", 1, "no such key.*rate"), ("lookahead.every", "often", "whole number"),
                              ("lookahead.rate", 2.0, r"2\.0 is not in"), ("lookahed.rate", 1, "lookahead")):
        with pytest.raises(jt.UserError, match=words):
            config(tmp_path, **{key: value})


def test_what_no_config_asks_for_is_not_looked_for(tmp_path, module, monkeypatch):
    monkeypatch.setattr(metadata, "entry_points", lambda **_: pytest.fail("it takes a while"))
    assert jt.build(config(tmp_path)).extensions
    with pytest.raises(jt.UserError, match="extensions: not all of them are extensions"):
        jt.build(config(tmp_path), extensions=[print])
