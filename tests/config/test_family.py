"""The table of families: one of another package trains on a mesh, is saved and found again, with no edit here."""

import json
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.config import family
from jaxtrain.hf import hf_config

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The example package, as pip installs it."""
    site = tmp_path / "site"
    about = site / "jaxtrain_plugin-1.0.dist-info"
    about.mkdir(parents=True)
    shutil.copytree(PLUGIN / "jaxtrain_plugin", site / "jaxtrain_plugin")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxtrain-plugin\nVersion: 1.0\n")
    groups = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]["entry-points"]
    (about / "entry_points.txt").write_text("".join(
        f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in points.items())
        for group, points in groups.items()))
    monkeypatch.syspath_prepend(site)
    for cached in (family._from_outside, family.family):
        cached.cache_clear()
    yield
    for name in [name for name in sys.modules if name.startswith("jaxtrain_plugin")]:
        del sys.modules[name]
    monkeypatch.undo()
    for cached in (family._from_outside, family.family):
        cached.cache_clear()


def config(text, **mesh):
    return jt.make_config({
        "model": {"name": "parallel_llama", "branch_scale": 0.5, "num_layers": 2, "embed_dim": 32, "num_heads": 4,
                  "num_kv_heads": 2, "mlp_dim": 48, "vocab_size": 320, "max_seq_len": 16},
        "data": {"source": f"{text}", "seq_len": 16, "global_batch_size": 8}, "mesh": mesh,
        "optimizer": {"warmup_steps": 0}, "train": {"steps": 1, "precision": "float32", "eval_every": 0}})


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_a_family_of_another_package_trains_on_a_mesh_and_resumes(tmp_path):
    (text := tmp_path / "text").mkdir()
    (text / "a.txt").write_text("some words and others, again and again. " * 100)
    one = jt.build(config(text, data=1), devices=jax.devices()[:1])
    _, wanted = one.step(one.init(), one.batch(0))
    spread = config(text, fsdp=2, tensor=2, data=2)
    state = jt.train(spread, tmp_path / "run")
    found = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert found["loss"] == pytest.approx(float(wanted["loss"]), rel=1e-5)
    assert found["grad_norm"] == pytest.approx(float(wanted["grad_norm"]), rel=1e-5)
    again = jt.train(spread, tmp_path / "run")
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(state.params), jax.device_get(again.params)))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("keys", "message"), [
    ({"branch_scale": 0.0}, "model.branch_scale: 0.0 is not positive; "),
    ({"name": "gpt2", "branch_scale": 1.0}, "model.branch_scale: gpt2 has no such key; remove it, or use parallel_ll"),
    ({"name": "parallel_lama"}, "model.name: there is no model 'parallel_lama'; did you mean 'parallel_llama'?"),
])
def test_its_keys_are_checked_as_any(keys, message):
    with pytest.raises(jt.UserError) as refusal:
        jt.make_config({"model": {"name": "parallel_llama"} | keys})
    assert f"{refusal.value}".startswith(message)


def test_a_family_of_jaxtrain_counts_before_one_of_another_package(monkeypatch):
    class Point:
        def load(self):
            raise AssertionError("it is not loaded")

    monkeypatch.setattr(family, "_from_outside", lambda: {"gpt2": Point()})
    assert family.family.__wrapped__("gpt2").config.__name__ == "Gpt2Config" and family.names().count("gpt2") == 1


def test_configs_of_families_are_read_without_jax():
    code = ("import sys; from jaxtrain.config import family; found = dict(family.families());"
            "from jaxtrain.hf import hf_config; hf_config.types(); print(len(found), 'jax' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"{len(family.FAMILIES)}", "False"]


@pytest.mark.parametrize(("value", "message"), [
    ("no_such_module:FAMILY", "cannot be imported (ModuleNotFoundError"), ("json:loads", "is not a Family; correct")])
def test_a_broken_family_of_another_package_is_told_where_it_is_asked_for(monkeypatch, value, message):
    point = EntryPoint("broken", value, family.GROUP)
    monkeypatch.setattr(family, "_from_outside", lambda: {"broken": point})
    with pytest.raises(jt.UserError) as refusal:
        jt.make_config({"model": {"name": "broken"}})
    assert message in f"{refusal.value}"
    assert [name for name, _ in family.families()] == [*family.FAMILIES]


def test_quantized_weights_of_an_unknown_method_are_refused(tmp_path):
    for said in ({"load_in_4bit": True}, {"quant_method": None, "bits": 4}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": said}))
        with pytest.raises(jt.UserError, match=r"quantization_config=.* cannot be expressed: only plain weights can"):
            hf_config.model_section(tmp_path)
