"""`jt.prove` and `jaxtrain prove`: correct runs are proven, and bugs are found and named."""

import functools
import importlib.util
import json
import re
import shlex
from pathlib import Path

import jax
import optax
import pytest

import jaxtrain as jt
from jaxtrain.commands import prove as command
from jaxtrain.proof import prove
from jaxtrain.proof.drawn_layouts import Layout
from tests.proof import own_module

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
    (finding,) = proof.findings
    assert f"{finding.layout}" == "tensor=2" and (finding.kind, finding.name) == ("gradient", "embed")
    assert "2 times what it should be, which is the size of `tensor`" in finding.hint
    assert not proof.proven and not proof.certificate["proven"] and "tensor=2" in f"{proof}"


@pytest.mark.slow
def test_a_correct_module_is_proven_and_its_certificate_is_found_again(monkeypatch, tmp_path):
    """The mesh does not matter to it; a build with another clipping has none."""
    from jaxtrain.run import certificate

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
    from jaxtrain.run import certificate

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
    found = [one for one in proof.findings if where in (*one.layout.sizes, *one.layout.options)]
    assert found, proof
    assert found[0].layout == Layout({where if "." in where else f"mesh.{where}": 2}), proof
    assert found[0].kind == kind and words in f"{found[0]}", proof


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=pytest.mark.slow if bug in QUICK_BUGS else
                                              pytest.mark.exhaustive) for bug in own_module.BUGS])
def test_every_bug_of_a_module_is_found_and_named(bug, monkeypatch):
    check_bug(bug, monkeypatch)


@pytest.mark.slow
def test_the_module_without_a_bug_is_proven():
    proof = jt.prove(jt.make_config({"optimizer": {"clip_norm": 0.0}}), meshes=6, steps=2, **own_module.parts())
    assert proof.proven, proof


def test_layouts_that_have_a_smaller_wrong_one_are_not_shrunk_again(monkeypatch):
    """Each finding is looked for once; what is tried is bounded."""
    tried = []

    class Trials:
        def run(self, layout, steps=0):
            tried.append(f"{layout}")
            return prove.Comparison(layout, 2.0 if "tensor" in layout.sizes else 0.1, "", finding(layout) if
                                    "tensor" in layout.sizes else None)

    def finding(layout):
        return prove.Finding(layout, 1, "loss", "", 2.0, "")

    found = prove._shrunk(Trials(), [finding(Layout({"mesh.data": 2, "mesh.tensor": 4, "train.remat": "full"})),
                                     finding(Layout({"mesh.fsdp": 2, "mesh.tensor": 2}))], lambda text: None)
    assert [f"{one.layout}" for one in found] == ["tensor=2"] and len(tried) <= prove._MOST_TRIES
