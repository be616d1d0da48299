"""Which run a workdir holds: config.json and run.json, and the refusal to continue it as another one."""

import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config import Config
from jaxtrain.errors import UserError

# What a resumed run may change: where and how fast the same mathematics is done, and what is told about it.
_FREE: dict[str, Set[str] | None] = {
    "mesh": None, "checkpoint": None,  # all of their keys
    # The same text elsewhere is the same data: the manifest's hash tells. Rows that are not lost stay where they were.
    "data": {"cache_dir", "cache_bytes", "corrupt", "prefetch", "source"},
    "optimizer": {"zero_stage"},
    "train": {"accumulation", "precision", "attention", "remat", "unroll", "loss_chunks", "log_every", "eval_every",
              "eval_batches", "sample_tokens", "progress", "tensorboard"},
}
_PACKAGES = {"jax": "jax", "jaxlib": "jaxlib", "flax": "flax", "optax": "optax", "orbax": "orbax-checkpoint",
             "grain": "grain", "numpy": "numpy"}


def check_workdir(workdir: str | Path, config: Config, data_manifest_hash: str | None = None) -> None:
    """Make `workdir` if need be and raise a `UserError` if it cannot be written or holds a run of other mathematics."""
    workdir = Path(workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=workdir).close()
        started = _read(workdir / "config.json")
        recorded_data = _read(workdir / "run.json").get("data_manifest_hash")
    except OSError as error:
        raise _unwritable(workdir, error) from None
    for section, keys in config.to_dict().items():
        for key, value in keys.items():
            before = started.get(section, {}).get(key, value)
            if before != value and ("float16" in (before, value) or not _free(section, key, config)):
                raise UserError("--workdir", f"{workdir} holds a run with {section}.{key}={before}, this config has "
                                f"{value}", f"give another --workdir or --config.{section}.{key}={before}")
    if recorded_data and data_manifest_hash and recorded_data != data_manifest_hash:
        raise UserError("--workdir", f"{workdir} holds a run on other data: manifest {recorded_data}, now "
                        f"{data_manifest_hash}", "give another --workdir or bring the data back")


def write_run_files(workdir: str | Path, config: Config, *, mesh_sizes: Mapping[str, int], device_kind: str,
                    data_manifest_hash: str | None) -> None:
    """Check `workdir` as `check_workdir` does, then (in process 0) write `config.json` and `run.json` into it."""
    workdir = Path(workdir)
    check_workdir(workdir, config, data_manifest_hash)
    if jax.process_index() != 0:
        return
    run = {
        "config_hash": config.hash(),
        "git_commit": _git_commit(),
        "packages": {name: _version(package) for name, package in _PACKAGES.items()},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "mesh": dict(mesh_sizes),
        "device_kind": device_kind,
        "process_count": jax.process_count(),
        "data_manifest_hash": data_manifest_hash,
    }
    try:
        _write(workdir / "config.json", config.to_dict())
        _write(workdir / "run.json", run)
    except OSError as error:
        raise _unwritable(workdir, error) from None


def _free(section: str, key: str, config: Config) -> bool:
    if (section, key) == ("train", "steps"):  # every schedule but this one is a function of the last step
        return config.optimizer.schedule == "constant"
    free = _FREE.get(section, frozenset())
    return free is None or key in free


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise UserError("--workdir", f"{path} is not valid JSON", "give another --workdir") from None


def _write(path: Path, content: dict[str, Any]) -> None:
    """All of it or nothing: a reader, or a killed process, never leaves half a file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, path)


def _unwritable(workdir: Path, error: OSError) -> UserError:
    return UserError("--workdir", f"{workdir} cannot be written ({error.strerror})", "give a folder that can be")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the checkout that jaxtrain runs from, "-dirty" appended if it was edited; None when installed."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # site-packages may lie inside somebody else's repository
        return None
    command = ["git", "--no-optional-locks", "describe", "--always", "--match=", "--abbrev=40", "--dirty"]
    try:
        return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
