"""`jt.prove` and `jaxtrain prove`: correct runs are proven, and bugs are found and named."""

import functools
import importlib.util
import json
import random
import re
import shlex
import types
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.commands import prove as command
from jaxtrain.commands.train import training_flags
from jaxtrain.proof import prove
from jaxtrain.proof.drawn_layouts import Layout
from jaxtrain.run import certificate, validation
from tests.proof import false_alarms, own_module

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/prove.md").read_text()
TINY = ["--config=configs/gpt.py:tiny", "--config.model.embed_dim=32", "--config.model.num_heads=2"]
pytestmark = pytest.mark.usefixtures("cache")


@functools.cache
def example():
    """The script of the documentation, as a module."""
    spec = importlib.util.spec_from_file_location("prove_module", ROOT / "examples/prove_module.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_example(bug, monkeypatch, **keys):
    monkeypatch.setattr(example(), "BUG", bug)
    parts = dict(model=example().parameters, loss_fn=example().loss_fn, axes=example().AXES,
                 optimizer=optax.adamw(1e-2), data=jt.BatchFunction(example().batch))
    return jt.prove(jt.Config(), **parts | {"meshes": 3, "steps": 2} | keys)


def test_a_gradient_that_is_summed_twice_is_named_on_the_smallest_mesh(monkeypatch):
    proof = of_example("gradient", monkeypatch, meshes=5, steps=1, seed=3)
    finding = proof.finding
    assert f"{finding.layout}" == "tensor=2" and (finding.kind, finding.name) == ("gradient", "embed")
    assert "2 times what it should be, which is the size of `tensor`" in finding.hint
    assert not proof.proven and not proof.certificate["proven"] and "tensor=2" in f"{proof}"


@pytest.mark.slow
def test_a_layout_that_was_refuted_runs_first_when_it_is_proven_again(monkeypatch, tmp_path):
    """Code and config have the same hashes here; draws of another seed would not have had that layout."""
    refuted = of_example("gradient", monkeypatch, meshes=5, steps=1, seed=3, output=tmp_path)
    assert refuted.certificate["refuted"] == {"layout": "tensor=2", "keys": {"mesh.tensor": 2}, "step": 1}
    again = of_example("gradient", monkeypatch, meshes=1, steps=1, output=tmp_path)
    assert [f"{one.layout}" for one in again.comparisons] == ["tensor=2"] and not again.proven
    coarse = of_example("", monkeypatch, meshes=1, steps=1, precision="bfloat16", output=tmp_path)
    assert coarse.path is None and "not a proof, and no certificate: rounding in bfloat16 hides errors" in f"{coarse}"
    assert not json.loads(again.path.read_text())["proven"]
    proof = of_example("", monkeypatch, meshes=2, steps=1, output=tmp_path)
    assert [f"{one.layout}" for one in proof.comparisons] == ["tensor=2", "data=2"] and proof.path == again.path
    assert json.loads(proof.path.read_text())["proven"]


def test_a_layout_that_is_refused_is_told_from_one_that_cannot_run():
    raised = [validation.Refused("mesh.data", "it is refused", "take another"), jt.UserError("a", "b", "c"),
              KeyError("lost")]

    class Trials:
        subject = types.SimpleNamespace(config=jt.Config(), own=True, parts={})

        def run(self, layout):
            if raised:
                raise raised.pop()
            return prove.Comparison(layout, 0.1, "")

    done, refused = prove._drawn(Trials(), 1, 0, 8, lambda text: None, [])
    proof = prove.Proof({"steps": 1, "compared": 1, "precision": "float32", "refused": refused}, done)
    assert len(refused) == 3 and f"{proof}".count("cannot run on") == 1 and "KeyError: 'lost'" in f"{proof}"


@pytest.mark.slow
def test_a_correct_module_is_proven_and_its_certificate_is_found_again(monkeypatch, tmp_path):
    """The mesh does not matter to it; a build with another clipping has none."""
    monkeypatch.setattr(certificate, "LAYOUTS", 3)
    proof = of_example("", monkeypatch, output=tmp_path)
    assert proof.proven and proof.worst < 1 and "all have the numbers of one device" in f"{proof}"
    assert json.loads(proof.path.read_text()) == proof.certificate and proof.certificate["float64"]

    def build(**keys):
        return jt.build(jt.make_config({}, keys), model=example().parameters, loss_fn=example().loss_fn,
                        axes=example().AXES, optimizer=optax.adamw(1e-2), data=jt.BatchFunction(example().batch))
    for keys in ({}, {"mesh.data": 2, "mesh.tensor": 4, "train.accumulation": 2, "train.steps": 7}):
        assert certificate.for_run(build(**keys), tmp_path)["proof"]["layouts"] == 3
    with pytest.raises(jt.UserError, match=r"^--require_proof: .* has no certificate of this code and config, only 1 "
                                           "of others; run jaxtrain prove"):
        certificate.for_run(build(**{"optimizer.clip_norm": 0.5}), tmp_path)


@pytest.mark.slow
def test_the_certificate_changes_with_the_users_code(tmp_path, monkeypatch):
    def hash_with(text):
        (tmp_path / "my_layers.py").write_text(text)
        (tmp_path / "my_loss.py").write_text("import my_layers\n\ndef loss(model, batch):\n    return my_layers.f()\n")
        for name in ("my_layers", "my_loss"):
            importlib.sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return certificate._code_hash([importlib.import_module("my_loss").loss])

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importlib.sys, "dont_write_bytecode", True)
    first = hash_with("def f():\n    return 1\n")
    assert hash_with("def f():\n    return 1\n") == first != hash_with("def f():\n    return 22\n")


@pytest.mark.slow
def test_a_config_is_proven_by_the_command_and_train_asks_for_that(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(certificate, "LAYOUTS", 3)
    for name in ("configs",):
        (tmp_path / name).symlink_to(ROOT / name)
    assert command.main([*TINY, "--meshes=3", "--steps=2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["proven"] and len(told["layouts"]) == 3 and told["layouts"][0]["layout"] == "data=2"
    assert told["worst"] < 1 and told["steps"] == 2 and told["changed"]["train.precision"] == "float32"
    config = jt.load_config("configs/gpt.py:tiny", {"model.embed_dim": 32, "model.num_heads": 2, "train.steps": 1,
                                                    "train.eval_every": 0})
    jt.train(config, tmp_path / "run", require_proof="proofs")
    proof = json.loads((tmp_path / "run/run.json").read_text())["proof"]
    assert proof["layouts"] == 3 and proof["code"] == told["code"] and proof["config"] == told["config"]
    other = jt.load_config("configs/gpt.py:tiny", {"train.steps": 1})
    with pytest.raises(jt.UserError, match=r"^--require_proof: proofs has no certificate of this code and config"):
        jt.train(other, tmp_path / "other", require_proof="proofs")
    assert not (tmp_path / "other/run.json").exists()
    (path,) = (tmp_path / "proofs").glob("*.json")
    path.write_text(json.dumps(told | {"proven": False, "failure": "on fsdp=2"}))
    with pytest.raises(jt.UserError, match=r"this code and config were refuted: on fsdp=2"):
        jt.train(config, tmp_path / "third", require_proof="proofs")


@pytest.mark.parametrize(("change", "message"), [
    (dict(meshes=0), "^meshes: 0 is not a number of meshes; give 1 or more"),
    (dict(steps=1.5), "^steps: 1.5 is not a number of steps"),
    (dict(mesh=None), "^mesh: a proof chooses its meshes itself; leave it out"),
    (dict(config=jt.make_config({"compression": {"method": "int8"}})),
     "^compression.method: it changes the numbers of a step on purpose"),
    (dict(config="configs/gpt.py"), "^config: it is 'configs/gpt.py', not a config"),
])
def test_what_cannot_be_proven_is_refused_in_one_sentence(change, message):
    with pytest.raises(jt.UserError, match=message):
        jt.prove(**{"config": jt.Config()} | change)


def test_flags_are_refused_in_one_line(capsys):
    assert training_flags(["configs/gpt.py", "--require_proof"])[0].require_proof == "proofs"
    for flags, said in ((["--meshes=0", *TINY], "--meshes: 0 is too few; give 1 or more"),
                        ([], "CONFIG: it is missing"), (["--precision=float31", *TINY], "--precision: float31 is not")):
        assert command.main(flags) == 2
        assert capsys.readouterr().err.startswith(said)


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in re.findall(r"^\$ (.*)$", PAGE, re.M) if "examples/" in line])
def test_the_page_shows_what_its_commands_print(line, monkeypatch, capsys):
    words = shlex.split(line)[2:]
    shown = PAGE.partition(f"$ {line}\n")[2].partition("```")[0].split("\n$ ")[0].strip()
    status = example().main(words)
    wanted, printed = (re.sub(r"the largest error is .*|\d+\.\d+", "N", " ".join(text.split()))
                       for text in (shown, capsys.readouterr().out))
    assert printed == wanted
    assert status == int("WRONG" in shown)


QUICK_BUGS = ("norm_gradient_of_one_sequence_shard", "clipped_by_local_norm", "decayed_twice_on_one_shard",
              "update_differs_between_copies")


def check_bug(bug, monkeypatch):
    """The bug is found, on the smallest layout, with the right quantity and hint; nothing else is wrong."""
    where, kind, words = own_module.BUGS[bug]
    parts = own_module.parts(bug)
    if where == "train.accumulation":  # with a key for dropout, micro-batches would change the numbers by design
        parts |= {"with_key": False, "loss_fn": lambda p, b: own_module.loss_fn(p, b, jax.random.key(0), bug)}
    proof = jt.prove(jt.make_config({"optimizer": {"clip_norm": 0.0}}), steps=2, **parts)
    assert not proof.proven
    assert proof.finding.layout in [Layout({f"mesh.{axis}" if "." not in axis else axis: 2})
                                    for axis in where.split("|")], proof
    assert proof.finding.kind == kind and words in f"{proof.finding}", proof


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=pytest.mark.slow if bug in QUICK_BUGS else
                                              pytest.mark.exhaustive) for bug in own_module.BUGS])
def test_every_bug_of_a_module_is_found_and_named(bug, monkeypatch):
    check_bug(bug, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(20))
def test_configs_drawn_at_random_are_proven(seed):
    found = false_alarms.check(*false_alarms.draw(random.Random(f"proof {seed}")), meshes=10, seed=seed)
    assert not found["finding"] and found["layouts"] == 10, found


@pytest.mark.slow
def test_the_module_without_a_bug_is_proven():
    proof = jt.prove(jt.make_config({"optimizer": {"clip_norm": 0.0}}), meshes=6, steps=2, **own_module.parts())
    assert proof.proven, proof


def test_the_smallest_layout_is_found_in_few_tries():
    tried = []

    class Trials:
        def run(self, layout, steps=0):
            tried.append(f"{layout}")
            wrong = layout.has(Layout({"mesh.tensor": 4, "train.remat": "full"}))
            return prove.Comparison(layout, 2.0 if wrong else 0.1, "", finding(layout) if wrong else None)

    def finding(layout):
        return prove.Finding(layout, 1, "loss", "", 2.0, "")

    drawn = Layout({"mesh.data": 2, "mesh.tensor": 4, "train.remat": "full", "train.unroll": 2})
    found = prove._smallest(Trials(), finding(drawn), lambda text: None)
    assert f"{found.layout}" == "tensor=4 train.remat=full" and len(tried) <= prove._MOST_TRIES


def test_both_parts_of_complex_parameters_are_compared():
    def loss(wrong):
        def of(params, batch):
            several, imaginary = jax.sharding.get_abstract_mesh().size > 1, params["w"].imag
            silent = (imaginary - jax.lax.stop_gradient(imaginary)).sum()  # zero, but for its gradient
            return jax.numpy.abs(batch["x"] @ params["w"]).mean() + 1e-3 * silent * several * wrong
        return of

    parts = dict(model=lambda: {"w": (1 + 2j) * jax.random.normal(jax.random.key(0), (8, 8))}, optimizer=optax.sgd(0.1),
                 data=jt.BatchFunction(lambda step: {"x": np.sin(np.arange(256, dtype=np.float32)).reshape(32, 8)}))
    config = jt.make_config({"optimizer": {"clip_norm": 0.0}})
    assert jt.prove(config, meshes=1, steps=1, loss_fn=loss(False), **parts).proven
    assert jt.prove(config, meshes=1, steps=1, loss_fn=loss(True), **parts).finding.kind == "gradient"


def test_a_run_that_learns_nothing_proves_nothing():
    parts = dict(model=lambda: {"w": jax.numpy.ones((8, 8))}, optimizer=optax.sgd(0.1),
                 data=jt.BatchFunction(lambda step: {"x": np.ones((32, 8), np.float32)}))
    for factor in (0.0, np.nan):
        with pytest.raises(jt.UserError, match=r"^gradient: its norm is (0\.0|nan) on one device"):
            jt.prove(jt.Config(), loss_fn=lambda p, b, f=factor: f * (b["x"] @ p["w"]).mean(), **parts)


@pytest.mark.slow
def test_a_module_that_cannot_run_on_some_meshes_is_proven_on_the_others(monkeypatch):
    def loss(params, batch):
        if dict(jax.sharding.get_abstract_mesh().shape)["tensor"] > 2:
            raise ValueError("too many shards")
        return ((batch["x"] @ params["w"]) ** 2).mean()

    proof = jt.prove(jt.make_config({"optimizer": {"clip_norm": 0.0}}), meshes=4, steps=1, seed=22, loss_fn=loss,
                     model=lambda: {"w": jax.numpy.ones((8, 8))}, optimizer=optax.sgd(0.1),
                     data=jt.BatchFunction(lambda step: {"x": np.arange(256, dtype=np.float32).reshape(32, 8) / 256}))
    assert proof.proven and len(proof.comparisons) == 4
    assert any("tensor=" in layout and why == "ValueError: too many shards" for layout, why in
               proof.certificate["refused"].items()), proof.certificate["refused"]
    assert "cannot run on" in f"{proof}"


@pytest.mark.slow
def test_where_there_is_no_float64_the_mean_of_several_runs_is_the_truth():
    def called(grads, state, params=None):
        rate = jax.pure_callback(lambda x: np.asarray(x) * np.float32(0.5), jax.ShapeDtypeStruct((), np.float32),
                                 np.float32(0.2))
        return jax.tree.map(lambda g: -rate * g, grads), state

    optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), called)
    parts = dict(model=lambda: {"w": jax.random.normal(jax.random.key(0), (8, 8))}, optimizer=optimizer,
                 data=jt.BatchFunction(lambda step: {"x": np.sin(np.arange(256, dtype=np.float32)).reshape(32, 8)}))
    config = jt.make_config({"optimizer": {"clip_norm": 0.0}})
    proof = jt.prove(config, meshes=2, steps=1, loss_fn=lambda p, b: jax.numpy.tanh(b["x"] @ p["w"]).mean(), **parts)
    assert proof.proven and not proof.certificate["float64"] and 0 < proof.worst < 1

    def wrong(params, batch):  # by a thousandth, on a mesh
        several = jax.sharding.get_abstract_mesh().size > 1
        return jax.numpy.tanh(batch["x"] @ params["w"]).mean() * (1 + 1e-3 * several)

    assert jt.prove(config, meshes=2, steps=1, loss_fn=wrong, **parts).finding.kind == "loss"
