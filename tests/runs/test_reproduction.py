"""The versions a run was trained with and those here; and a run that is trained again by the printed command."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

import jaxtrain
from jaxtrain.checkpoint import verify
from jaxtrain.commands.runs import main
from jaxtrain.config.load import load_config
from jaxtrain.data import load_corpus
from jaxtrain.run import runinfo
from jaxtrain.runs import reproduction
from tests.tiny import ROOT, tiny_flags, virtual_devices


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A workdir with what this machine would write of a run, beside the text of its data."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n} of a text that is long enough\n" for n in range(500)))
    config = load_config(f"{ROOT}/configs/gpt.py:tiny", {"data.source": f"{text}", "data.cache_dir": f"{tmp_path}/c"})
    for module in (reproduction, runinfo):
        monkeypatch.setattr(module, "git_commit", lambda: "a" * 40)
    manifests = load_corpus(config.data).manifests
    runinfo.write_run_files(tmp_path / "run", config, mesh_sizes={"data": 1}, device_kind="cpu",
                            data_manifest_hash=manifests[""], manifests=manifests)
    return tmp_path / "run"


def different(workdir, **changed):
    run = json.loads((workdir / "run.json").read_text())
    (workdir / "run.json").write_text(json.dumps(run | changed))
    return {row[0]: row[1:] for row in reproduction.compared(workdir).differences}


def test_nothing_is_different(recorded, capsys):
    assert main(["reproduce", f"{recorded}"]) == 0
    assert capsys.readouterr().out.startswith("nothing that the run recorded is different here\n")
    assert reproduction.commands(reproduction.compared(recorded)) == [
        f"python -m jaxtrain.main --config={recorded}/config.json --workdir={recorded}-again --config.mesh.data=1"]


@pytest.mark.parametrize(("changed", "row", "words"), [
    ({"git_commit": "b" * 40}, "commit", "check it out"),
    ({"git_commit": None, "jaxtrain": "0.1.0.dev3"}, "commit", "JAXTRAIN_COMMIT"),
    ({"git_commit": None, "jaxtrain": "0.0.9"}, "jaxtrain", "pip install jaxtrain==0.0.9"),
    ({"git_commit": "a" * 40 + "-dirty"}, "commit", "its edits were not kept"),
    ({"packages": {"jax": "0.0.1"}}, "jax", "install that version"),
    ({"python": "2.7"}, "python", "use that Python"),
    ({"platform": "Plan 9"}, "platform", "same image"),
    ({"device_kind": "TPU v5e"}, "device", "such devices"),
    ({"device_kind": "TPU v5e", "mesh": {"data": 4096}}, "devices", "as many"),
    ({"process_count": 2}, "processes", "start as many"),
    ({"config_hash": "0"}, "config", "was edited"),
    ({"config_changes": [{"step": 5, "key": "train.steps", "before": 5, "after": 9}]}, "train.steps", "stop at that"),
    ({"adopted": [["ab", 7]]}, "checkpoint", "--adopt"),
    ({"own_parts": {"optimizer": {}}}, "own parts", "run the script"),
    ({"device_kind": "NVIDIA H100 80GB HBM3"}, "train.deterministic", "not bits"),
    ({"data_manifests": {"": "e" * 64}}, "data", "bring back the text"),
])
def test_each_difference_is_named(recorded, changed, row, words):
    found = different(recorded, **changed)
    assert words in found[row][2] and not set(found) - {row, "device", "devices", "train.deterministic"}


def test_what_is_lost_is_said(recorded, capsys):
    (recorded.parent / "text.txt").unlink()
    assert "does not exist" in different(recorded)["data"][1]
    (recorded / "run.json").unlink()
    assert main(["reproduce", f"{recorded}"]) == 2 and "does not tell what" in capsys.readouterr().err


def test_commands_lead_to_the_commit_and_the_versions(recorded, monkeypatch):
    (recorded / "jobs" / "1").mkdir(parents=True)
    (recorded / "jobs" / "1" / "checkout.patch").write_text("")
    config = json.loads((recorded / "config.json").read_text())
    config["data"]["source"], config["checkpoint"]["mirror"] = "text.txt", "s3://bucket/run"
    (recorded / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(recorded.parent)
    different(recorded, git_commit="b" * 40 + "-dirty", packages={"jax": "0.0.1", "orbax": "0.1"}, mesh={"data": 8})
    root = Path(jaxtrain.__file__).parents[1]
    where = root.with_name(f"{root.name}-bbbbbbbb")
    assert reproduction.commands(reproduction.compared("run"), "new") == [
        f"git -C {root} worktree add --detach {where} {'b' * 40}",
        f"git -C {where} apply {recorded}/jobs/1/checkout.patch",
        "python -m pip install jax==0.0.1 orbax-checkpoint==0.1",
        f"cd {where} && XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m jaxtrain.main "
        f"--config={recorded}/config.json --workdir={recorded.parent}/new --config.mesh.data=8 "
        f"--config.checkpoint.mirror= --config.data.source={recorded.parent}/text.txt"]


@pytest.mark.slow
def test_a_worktree_is_made_of_the_commit(recorded, capsys):
    git = subprocess.run(["git", "-C", f"{ROOT}", "rev-parse", "HEAD"], capture_output=True, text=True)
    if git.returncode:
        pytest.skip("this is not a checkout")
    commit, into = git.stdout.strip(), recorded.parent / "checkout"
    different(recorded, git_commit=commit)
    try:
        with pytest.raises(SystemExit):
            main(["reproduce", f"{recorded}", f"--checkout={into}"])
        assert f"cd {into} && " in capsys.readouterr().out and (into / "jaxtrain" / "main.py").exists()
        assert main(["reproduce", f"{recorded}", f"--checkout={into}"]) == 2
        assert "git cannot make a worktree" in capsys.readouterr().err
    finally:
        subprocess.run(["git", "-C", f"{ROOT}", "worktree", "remove", "--force", f"{into}"])


@pytest.mark.slow
def test_a_run_is_reproduced_to_the_last_bit(tmp_path, tmp_path_factory, cache, forked):
    """The printed command reproduces it on a mesh of two devices; another seed does not."""
    keys = ["model.num_layers=1", "model.embed_dim=32", "train.steps=6", "train.eval_every=3", "mesh.fsdp=2",
            "train.sample_tokens=0", "checkpoint.every=3"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}", "XLA_FLAGS": virtual_devices(2)}

    def run(words):
        done = forked(words, tmp_path, environment, timeout=300)
        assert done.returncode in (0, 1), done.stderr
        return done.stdout

    def trained(workdir):
        lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        return ([(line["step"], line.get("loss"), line.get("grad_norm"), line.get("eval_loss")) for line in lines],
                verify.good(workdir / "checkpoints", 6)["fingerprint"])

    run(["-m", "jaxtrain.main", *tiny_flags(tmp_path_factory, keys), "--workdir=golden"])
    shown = run(["-m", "jaxtrain", "runs", "reproduce", "golden"])
    command = shlex.split(shown.splitlines()[-1].rpartition("device_count=2 ")[2])
    assert command[:3] == ["python", "-m", "jaxtrain.main"]
    run(command[1:])
    run([*command[1:4], "--workdir=other", *command[5:], "--config.train.seed=1"])
    golden, again, other = (trained(tmp_path / name) for name in ("golden", "golden-again", "other"))
    assert golden == again and len(golden[0]) == 8
    assert golden[0] != other[0] and golden[1] != other[1]
