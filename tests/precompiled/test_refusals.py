"""Compiled programs that are not a run's own are refused in a sentence, and never loaded if they are not signed."""

import copy
import dataclasses
import hashlib
import json
import os
import pickle
import shutil

import jax
import pytest

from jaxtrain import api
from jaxtrain.builder import build
from jaxtrain.distributed import authentication
from jaxtrain.errors import UserError
from jaxtrain.main import main
from jaxtrain.precompiled import compiled_run, compiling, executables, programs, requirements, signed_folder
from jaxtrain.run.made_of_sections import configured
from tests.plug_in_package import importable, install
from tests.tiny import ROOT, devices


@pytest.fixture
def mine(made, tmp_path):
    """A copy of a folder of programs, to be changed."""
    found = made()
    return dataclasses.replace(found, folder=shutil.copytree(found.folder, tmp_path / "compiled"))


def load(mine, config=None):
    with devices(1):
        run = build(mine.config if config is None else config)
        return compiled_run.load(run, mine.folder)


def manifest_of(mine):
    return json.loads((mine.folder / "manifest").read_text().partition(" ")[2])


def sign(mine, manifest, name="compiled programs"):
    (mine.folder / "manifest").write_text(authentication.sealed(name, manifest))


# ------------------------------------------------------------------------------------------------------- what differs

@pytest.mark.parametrize(("keys", "sentence"), [
    ({"optimizer.b2": 0.9}, "optimizer.b2 is 0.95 there and 0.9 here"),
    ({"model.num_layers": 2}, "model.num_layers is 1 there and 2 here"),
    ({"data.global_batch_size": 16}, "data.global_batch_size is 8 there and 16 here"),
    ({"data.stages": [{"from_step": 2, "global_batch_size": 16}]}, "another config: data.stages is"),
])
def test_another_config_is_named(mine, keys, sentence):
    changed = mine.config
    for key, value in keys.items():
        section, name = key.split(".")
        changed = dataclasses.replace(changed, **{section: dataclasses.replace(getattr(changed, section),
                                                                               **{name: value})})
    with pytest.raises(UserError, match=f"was compiled for another config: .*{sentence.split(': ')[-1]}"):
        load(mine, changed)


def test_a_run_that_may_change_its_mesh_is_refused_before_it_does(mine):
    elastic = dataclasses.replace(mine.config.resilience, elastic=True)
    with pytest.raises(UserError, match=r"with resilience\.elastic the run may change its mesh"):
        load(mine, dataclasses.replace(mine.config, resilience=elastic))


def test_keys_that_no_program_depends_on_may_differ(mine):
    config = dataclasses.replace(
        mine.config, checkpoint=dataclasses.replace(mine.config.checkpoint, every=1),
        train=dataclasses.replace(mine.config.train, log_every=2), data=dataclasses.replace(mine.config.data, seed=5))
    assert "loaded 4 compiled programs" in load(mine, config)


def test_flags_that_do_not_count_are_named(mine, monkeypatch):
    assert "warning" not in load(mine)
    monkeypatch.setenv("XLA_FLAGS", "--xla_step_marker_location=1 --xla_force_host_platform_device_count=8")
    assert "and --xla_step_marker_location=1 count for other programs alone" in load(mine)


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda of: of.update(platform="gpu"), "for the platform gpu, and here it is cpu"),
    (lambda of: of.update(device_kind="NVIDIA H100"), "for devices of the kind NVIDIA H100, and here it is cpu"),
    (lambda of: of.update(processor="0123"), "for a CPU with the features 0123, and here it is"),
    (lambda of: of["mesh"].update(fsdp=8), "for the mesh fsdp=8, and here it is of one device"),
    (lambda of: of["packages"].update(jaxlib="0.0.1"), f"with jaxlib 0.0.1, and here is {jax.lib.__version__}"),
    (lambda of: of["packages"].update({"jax-cuda13-pjrt": "1"}), "with jax-cuda13-pjrt 1, and here is none"),
    (lambda of: of.update(python="3.9"), "with Python 3.9, and here is 3"),
    (lambda of: of.update(code="f" * 64), "by other code of jaxtrain \\(ffffffffffff, and here is"),
    (lambda of: of["settings of JAX"].update(jax_enable_x64="True"), "with jax_enable_x64=True, and here it is False"),
])
def test_what_else_differs_is_named(mine, change, sentence):
    manifest = manifest_of(mine)
    change(manifest["made_for"])
    sign(mine, manifest)
    with pytest.raises(UserError, match=f"{mine.folder} was compiled {sentence}.*; compile it again"):
        load(mine)


def test_devices_that_lie_otherwise_are_another_topology(made):
    from jaxtrain.precompiled import requirements

    there = {**manifest_of(made())["made_for"], "devices": [[0, [0, 0, 0]], [1, [1, 0, 0]]]}
    here = copy.deepcopy(there)
    assert requirements.difference(there, here) == ""
    here["devices"].reverse()
    assert requirements.difference(there, here) == (
        "for another topology: device 0 of the mesh is number 0 at [0, 0, 0] there, and number 1 at [1, 0, 0] here")


def test_code_that_was_edited_is_other_code(monkeypatch, tmp_path):
    from jaxtrain.precompiled import requirements

    before = requirements.code_here()
    shutil.copytree(ROOT / "jaxtrain", tmp_path / "jaxtrain")
    monkeypatch.setattr(requirements, "__file__", str(tmp_path / "jaxtrain" / "precompiled" / "requirements.py"))
    assert requirements.code_here() == before
    with open(tmp_path / "jaxtrain" / "train_step" / "step.py", "a") as file:
        file.write("# edited\n")
    assert requirements.code_here() != before


def test_a_program_that_is_missing_is_named(mine):
    manifest = manifest_of(mine)
    manifest["programs"] = [one for one in manifest["programs"] if one["name"] != "step"]
    sign(mine, manifest)
    with pytest.raises(UserError, match="has no step of 8 x 32"):
        load(mine)


def test_the_command_says_it_in_one_line(mine, tmp_path, capfd, monkeypatch):
    with devices(1):
        status = main([*mine.flags, f"--workdir={tmp_path / 'run'}", f"--compiled={mine.folder}",
                       "--config.optimizer.b2=0.9"])
    said = capfd.readouterr().err.strip().splitlines()
    assert status == 2 and len(said) == 1 and "optimizer.b2 is 0.95 there and 0.9 here; compile it again" in said[0]
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------- who made them

class Hostile:
    """An object that makes a file when it is unpickled."""

    def __init__(self, mark):
        self._mark = mark

    def __reduce__(self):
        return open, (str(self._mark), "w")


@pytest.fixture
def hostile(tmp_path):
    """The bytes of a program that does harm, and the mark that it leaves."""
    mark = tmp_path / "mark"
    content = pickle.dumps(Hostile(mark))
    with pytest.raises((TypeError, ValueError)):  # it would work
        executables.loaded(content, jax.devices()[:1])
    assert mark.exists()
    mark.unlink()
    return content, mark


def planted(mine, content):
    """Put a program in the place of the first; return the manifest that has its hash."""
    manifest = manifest_of(mine)
    entry = manifest["programs"][0]
    (mine.folder / entry["file"]).write_bytes(content)
    entry.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    return manifest


def test_a_program_that_was_replaced_is_not_loaded(mine, hostile):
    content, mark = hostile
    planted(mine, content)
    with pytest.raises(UserError, match=r"init\.program is not what was signed, and it is not loaded"):
        load(mine)
    assert not mark.exists()


@pytest.mark.parametrize("forged", ["another secret", "no code", "old code", "another purpose", "nothing", "not text"])
def test_a_manifest_that_was_not_signed_by_the_run_is_not_believed(mine, hostile, monkeypatch, secret, forged):
    content, mark = hostile
    code = (mine.folder / "manifest").read_text().partition(" ")[0]
    manifest = planted(mine, content)
    if forged == "another secret":
        monkeypatch.setattr(authentication, "secret", lambda: b"a secret of somebody else")
        sign(mine, manifest)
        monkeypatch.undo()
    elif forged == "another purpose":  # such as a value of the coordination service
        sign(mine, manifest, "exchange/1/0")
    else:
        text = json.dumps(manifest)
        (mine.folder / "manifest").write_bytes({
            "no code": f"- {text}".encode(), "old code": f"{code} {text}".encode(), "nothing": b"",
            "not text": b"\xff" + text.encode()}[forged])
    with pytest.raises(UserError, match="is not signed with the secret of this run, so nothing in it is loaded"):
        load(mine)
    assert not mark.exists()


def test_nothing_is_loaded_by_a_run_without_a_secret(mine, monkeypatch):
    monkeypatch.setattr(signed_folder, "secret", lambda: b"")
    with pytest.raises(UserError, match="JAXTRAIN_SECRET_FILE: compiled programs are signed, and this run has no sec"):
        load(mine)


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "larger"])
def test_what_is_no_file_is_refused_at_once(mine, kind):
    path = mine.folder / manifest_of(mine)["programs"][1]["file"]
    content = path.read_bytes()
    path.unlink()
    {"missing": lambda: None, "folder": path.mkdir, "pipe": lambda: os.mkfifo(path),
     "larger": lambda: path.write_bytes(content + b"x")}[kind]()
    with pytest.raises(UserError, match=f"--compiled: {path}"):
        load(mine)
    shutil.rmtree(mine.folder)
    with pytest.raises(UserError, match=f"{mine.folder} cannot be read"):
        load(mine)


# ------------------------------------------------------------------------------------------------- what is compiled

def test_a_folder_with_something_in_it_is_left_alone(mine, tmp_path):
    with devices(1):
        target, here = compiling.devices_of("")
    before = sorted(path.read_bytes() for path in mine.folder.iterdir())
    with pytest.raises(UserError, match="has compiled programs in it; give another folder, or --overwrite"):
        compiling.compile_into(mine.folder, mine.config, target, here)
    assert sorted(path.read_bytes() for path in mine.folder.iterdir()) == before
    (mine.folder / "manifest").unlink()  # as a command that was stopped leaves it
    signed_folder.check_free(mine.folder, overwrite=False)
    assert list(mine.folder.iterdir()) == []
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    with pytest.raises(UserError, match=r"has other files in it, such as thesis\.txt"):
        compiling.compile_into(tmp_path / "other", mine.config, target, here, overwrite=True)


@pytest.mark.parametrize("key", ["mesh.auto", "train.remat"])
def test_what_a_start_would_choose_is_not_compiled_for(mine, tmp_path, key):
    section, name = key.split(".")
    value = True if key == "mesh.auto" else "auto"
    config = dataclasses.replace(mine.config, **{
        section: dataclasses.replace(getattr(mine.config, section), **{name: value})})
    with devices(1), pytest.raises(UserError, match=f"{key}: what is chosen at the start of a run is not known"):
        compiling.compile_into(tmp_path / "new", config, *compiling.devices_of(""))


def test_a_job_starts_with_compiled_programs(tmp_path, capsys):
    from jaxtrain.commands import launch

    assert launch.main(["configs/gpt.py:tiny", "--on=slurm", "--dry_run", f"--workdir={tmp_path}", "--compiled=shipped",
                        "--config.train.steps=3"]) == 0
    out = capsys.readouterr().out
    assert f"--config.train.steps=3 --compiled={os.getcwd()}/shipped --workdir={tmp_path}" in out


def test_the_code_of_other_packages_counts(tmp_path):
    """Also of a package that the config does not name: it may register a part of the same name."""
    points = {"jaxtrain.schedules": {"steep": "steep_slopes:steep"}}
    source = "def steep(config): return lambda n: 1.0\n"
    site = install(tmp_path / "site", "steep-slopes", points, {"steep_slopes": source})
    with importable(site):
        before = requirements._plug_ins()
        assert "steep_slopes" in before
        (site / "steep_slopes.py").write_text(source.replace("1.0", "2.0"))
        assert requirements._plug_ins()["steep_slopes"] != before["steep_slopes"]


def test_an_objective_with_other_numbers_is_ones_own(made):
    config = made().config
    with devices(1):
        run = api.build(config, objective=lambda config, model: dataclasses.replace(
            configured(config, model), z_loss=1.0))
    with pytest.raises(UserError, match=r"--compiled: the model, the objective, .* is your own"):
        programs.wanted(run, run.mesh)
