"""Measurements as lines of JSON: what was measured, and on which machine, versions and commit."""

import datetime
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.versions import git_commit, version_of

# Settings outside the config that change how fast a step is. (None of them names a path.)
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_OPTIMIZATION_LEVEL", "JAX_COMPILER_ENABLE_REMAT_PASS",
                "JAX_DEFAULT_MATMUL_PRECISION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "CUDA_DEVICE_MAX_CONNECTIONS",
                "NCCL_NVLS_ENABLE")
_PACKAGES = ("jax", "jaxlib", "flax", "jax-cuda13-plugin", "libtpu", "torch")

MEMORY_FRACTION = "0.92"  # of a GPU, as jaxtrain.main sets it

Record = dict[str, Any]


def about(command: str) -> Record:
    """What a figure is worth nothing without: when, from which commit, by which command, on which machine."""
    import jax

    devices = jax.devices()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    packages = {package: found for package in _PACKAGES if (found := version_of(package))}
    return {"time": now, "commit": git_commit(), "command": command, "device": devices[0].device_kind,
            "devices": len(devices), "processor": processor(), "cores": len(os.sched_getaffinity(0)),
            "load": round(os.getloadavg()[0], 1), "versions": {"python": platform.python_version(), **packages},
            "environment": {name: value for name in _ENVIRONMENT if (value := os.environ.get(name))
                            and (name, value) != ("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_FRACTION)}}


def processor() -> str:
    """The model of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(": ")[2] for line in lines if "model name" in line), platform.processor())


def command_line(module: str, argv: Iterable[str]) -> str:
    """The command as a reader would repeat it: without where its lines went."""
    return " ".join(["python", *module.split(), *(word for word in argv if not word.startswith("--json"))])


def append(file: str | Path, record: Mapping[str, Any]) -> None:
    """Add a line to a file, whole or not at all."""
    line = json.dumps(record) + "\n"
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        with open(file, "ab", buffering=0) as lines:
            lines.write(line.encode())
    except OSError as error:
        raise UserError("--json", f"{file} cannot be written ({error.strerror})", "give a file that can be") from None


def read(file: str | Path) -> list[Record]:
    """The lines of a file, oldest first; a last line that was cut off is left out."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError as error:
        raise UserError("--render", f"{file} cannot be read ({error.strerror})", "give files of --json") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError:
            if number == len(lines):
                print(f"warning: line {number} of {file} was cut off and is left out", file=sys.stderr)
                continue
            raise UserError("--render", f"line {number} of {file} is not JSON", "give files of --json") from None
        if not isinstance(found[-1], dict) or "what" not in found[-1]:
            raise UserError("--render", f"line {number} of {file} is no measurement", "give files of --json")
    return found
