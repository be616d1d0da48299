"""Reproduce a run: what was recorded of code, packages, machine, config and data, and how it differs from what is here.

On the same code, packages, devices and mesh a run gives the same bits. What is not recorded cannot be compared:
environment variables such as XLA_FLAGS, drivers, and the edits of a checkout that was not submitted by jaxtrain launch.
"""

import json
import math
import platform
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain import storage
from jaxtrain.base.annotations import JsonObject
from jaxtrain.config.load import load_config
from jaxtrain.config.schema import Config, hash_of
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import misfit
from jaxtrain.observe.versions import git_commit, version_of
from jaxtrain.runs.recorded_run import RecordedRun
from jaxtrain.runs.run_index import TAIL

Row = tuple[str, str, str, str]  # what, then, here, what to do
_DIRTY = "-dirty"
_FORM = {"config_hash": str, "git_commit?": str | None, "jaxtrain?": str | None,
         "packages": {str: str | None}, "python": str, "platform": str,
         "mesh": {str: int}, "device_kind": str, "process_count": int, "data_manifests?": {str: str},
         "own_parts?": dict, "config_changes?": [{"step": int, "key": str}], "data_changes?": [
             {"step": int, "key": str}], "adopted?": [(str, int)], "init_from?": dict}
# Keys that may name a file relative to the current folder.
_PATHS = ("data.source", "data.tokenizer", "pipeline.table", "train.init_from", "train.init_encoder_from",
          "rl.prompts", "rl.reward", "rl.environment")


@dataclass(frozen=True)
class Found:
    """A run as it was recorded, and in what it differs from what is here."""

    run: RecordedRun
    config: Config
    differences: list[Row]

    @property
    def commit(self) -> str:
        """The commit that it was trained with; "": it is not known."""
        return (self.run.run.get("git_commit") or "").removesuffix(_DIRTY)

    @property
    def patch(self) -> Path | None:
        """The patch of edits to that commit, where the run was submitted as a job."""
        edited = (self.run.run.get("git_commit") or "").endswith(_DIRTY)
        found = sorted(self.run.workdir.glob("jobs/*/checkout.patch"), key=lambda path: path.stat().st_mtime)
        return found[-1].absolute() if edited and found else None


def compared(workdir: str | Path, with_data: bool = True) -> Found:
    """Compare a run to what is here; `with_data`: the data too, which may have to be tokenized."""
    run = RecordedRun(workdir, TAIL)
    if wrong := misfit(run.run, _FORM):
        raise UserError("WORKDIR", f"run.json of {workdir} does not tell what the run was trained with ({wrong})",
                        "give the workdir of a run that has begun")
    found = Found(run, load_config(run.workdir / "config.json"), [])
    found.differences.extend([*_code(found), *_packages(run.run), *_machine(run.run), *_config(run),
                              *(_data(found) if with_data else ())])
    return found


# -------------------------------------------------------------------------------------------------- what is different
def _code(found: Found) -> Iterator[Row]:
    then, here = found.run.run.get("git_commit") or "", git_commit() or ""
    release = found.run.run.get("jaxtrain") or "dev"
    if not then and "dev" not in release:  # installed from a wheel, whose version says what it is
        if release != version_of("jaxtrain"):
            yield "jaxtrain", release, version_of("jaxtrain") or "none", f"pip install jaxtrain=={release}"
    elif not then:
        yield "commit", "not recorded", here, "it ran from a copy: set JAXTRAIN_COMMIT in its image the next time"
    elif then.endswith(_DIRTY):
        yield "commit", then, here, f"check it out and apply {found.patch}" if found.patch else (
            "its edits were not kept: jaxtrain launch keeps them in WORKDIR/jobs")
    elif then != here:
        yield "commit", then, here or "none", "check it out (--checkout=DIR makes a worktree)" if then != (
            here.removesuffix(_DIRTY)) else "the checkout here was edited: git stash, or --checkout=DIR"


def _packages(said: JsonObject) -> Iterator[Row]:
    from jaxtrain.run.runinfo import PACKAGES

    for name, then in said["packages"].items():
        here = version_of(PACKAGES.get(name, name))
        if then != here:
            yield name, then or "none", here or "none", "install that version" if then else "uninstall it"
    if said["python"] != platform.python_version():
        yield "python", said["python"], platform.python_version(), "use that Python"
    if said["platform"] != platform.platform():
        yield "platform", said["platform"], platform.platform(), "use the same image: libraries may round otherwise"


def _machine(said: JsonObject) -> Iterator[Row]:
    import jax

    devices, kind = math.prod(said["mesh"].values()), jax.devices()[0].device_kind
    if kind != said["device_kind"]:
        yield "device", said["device_kind"], kind, "train on such devices: others give other last bits"
    if devices != jax.device_count() and said["device_kind"] != "cpu":  # of those the command makes as many
        yield "devices", f"{devices}", f"{jax.device_count()}", "train on as many: another mesh sums in another order"
    if said["process_count"] > 1:
        yield "processes", f"{said['process_count']}", "1", "start as many (jaxtrain supervise, or jaxtrain launch)"


def _config(run: RecordedRun) -> Iterator[Row]:
    said = run.run
    if (here := hash_of(run.config)) != said["config_hash"]:
        yield "config", said["config_hash"], here, "config.json was edited since: bring it back"
    for change in [*said.get("config_changes", []), *said.get("data_changes", [])]:
        yield (change["key"], f"{change.get('before')} until step {change['step']}", f"{change.get('after')}",
               "begin with the former, stop at that step, and go on with the latter (--may_change)")
    for parent, step in said.get("adopted", []):
        yield "checkpoint", f"step {step} of run {parent}", "", "begin with a copy of that, and --adopt"
    if said.get("own_parts"):
        yield "own parts", ", ".join(said["own_parts"]), "", "run the script that trained it, not the command below"
    if not said["device_kind"].lower().startswith(("cpu", "tpu")) and not run.config.get("train", {}).get(
            "deterministic"):
        yield "train.deterministic", "False", "", "GPUs may have summed in any order: compare losses, not bits"


def _data(found: Found) -> Iterator[Row]:
    then = found.run.run.get("data_manifests") or {}
    if not then or found.run.run.get("own_parts"):
        return
    from jaxtrain.data import load_corpus

    try:
        here = load_corpus(found.config.data).manifests
    except (UserError, OSError) as error:
        yield "data", ", ".join(then.values()), f"{error}", "bring it back, or say where it is now"
        return
    for name in sorted({*then, *here}):
        if then.get(name) != here.get(name):
            yield (f"data {name}".strip(), then.get(name, "none"), here.get(name, "none"),
                   "bring back the text that it was trained on")


# ------------------------------------------------------------------------------------------------- what to do about it
def commands(found: Found, into: str | None = None, checkout: str | None = None) -> list[str]:
    """Return the commands that train the run again, and make the worktree for them where `checkout` names one.

    Args:
        found: the run.
        into: the new workdir.
        checkout: the folder of a git worktree to make of its commit.
    """
    root, lines = Path(__file__).parents[2], []
    if not (root / ".git").exists():  # installed, so that the user's checkout is somewhere else
        root = Path("CHECKOUT")
    needed = found.commit and found.run.run.get("git_commit") != git_commit()
    beside = root.with_name(f"{root.name}-{found.commit[:8]}")
    where = Path(checkout or beside).absolute() if checkout or needed else None
    if where:
        steps = [["git", "-C", f"{root}", "worktree", "add", "--detach", f"{where}", found.commit],
                 *([["git", "-C", f"{where}", "apply", f"{found.patch}"]] if found.patch else [])]
        if checkout:
            for words in steps:
                _do(words, found.commit)
        else:
            lines += map(shlex.join, steps)
    from jaxtrain.run.runinfo import PACKAGES

    said = found.run.run["packages"]
    if wrong := [f"{PACKAGES.get(what, what)}=={then}" for what, then, _, _ in found.differences
                 if what in said and then != "none"]:
        lines.append(shlex.join(["python", "-m", "pip", "install", *wrong]))
    return [*lines, _training(found, into, where)]


def _training(found: Found, into: str | None, where: Path | None) -> str:
    """Return the command that trains the run again, on its mesh, in a new workdir."""
    workdir, said = found.run.workdir, found.run.run
    again = Path(into or f"{workdir}-again")
    mesh = {f"mesh.{axis}": size for axis, size in said["mesh"].items()
            if found.run.config.get("mesh", {}).get(axis) != size}
    overrides: dict[str, Any] = {**({"mesh.auto": False} if found.config.mesh.auto else {}), **mesh}
    if found.config.checkpoint.mirror:
        overrides["checkpoint.mirror"] = ""  # which has the copies of this run
    if where:  # the command runs elsewhere
        overrides |= _absolute(found.run.config)
        workdir, again = workdir.absolute(), again.absolute()
    devices = math.prod(said["mesh"].values()) // said["process_count"]
    flags = f"XLA_FLAGS=--xla_force_host_platform_device_count={devices} " if (
        said["device_kind"] == "cpu" and devices > 1) else ""
    words = ["python", "-m", "jaxtrain.main", f"--config={workdir / 'config.json'}", f"--workdir={again}",
             *(f"--config.{key}={value if isinstance(value, str) else json.dumps(value).replace('false', 'False')}"
               for key, value in overrides.items())]
    return f"{f'cd {shlex.quote(str(where))} && ' if where else ''}{flags}{shlex.join(words)}"


def _absolute(config: dict[str, JsonObject]) -> dict[str, str]:
    """Return the keys with paths that are relative to the current folder, and where these are."""
    values = {key: config.get(key.partition(".")[0], {}).get(key.partition(".")[2]) for key in _PATHS}
    mixture = config.get("data", {}).get("mixture", {})
    values |= {f"data.mixture.{name}.source": one["source"] for name, one in mixture.items()
               if isinstance(one, dict) and "source" in one}
    return {key: f"{Path(value).absolute()}" for key, value in values.items()
            if isinstance(value, str) and value not in ("", "stdlib", "bytes") and not storage.is_url(value)
            and not Path(value).is_absolute() and Path(value.partition("@")[0].partition(":")[0]).exists()}


def _do(words: list[str], commit: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise UserError("--checkout", f"git cannot make a worktree of {commit[:12] or 'an unknown commit'} "
                        f"({(done.stderr.strip().splitlines() or ['no reason given'])[-1][:200]})",
                        "fetch the commit, or name a folder that is not there")
