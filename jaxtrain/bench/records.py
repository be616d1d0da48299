"""Measurements as lines of JSON: the results, with machine, versions and commit."""

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.errors import UserError, say
from jaxtrain.files import bounded_files
from jaxtrain.observe.versions import git_commit, version_of
from jaxtrain.plan.targets import MEMORY_FRACTION
from jaxtrain.redaction import redacted

# Settings outside the config that affect how fast a step is. (None of them names a path.)
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_OPTIMIZATION_LEVEL", "JAX_COMPILER_ENABLE_REMAT_PASS",
                "JAX_DEFAULT_MATMUL_PRECISION", "OMP_NUM_THREADS", "XLA_PYTHON_CLIENT_MEM_FRACTION",
                "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NVLS_ENABLE")
_PACKAGES = ("jax", "jaxlib", "flax", "jax-cuda13-plugin", "libtpu", "torch")

Record = dict[str, Any]


def about(command: str) -> Record:
    """Return the time, commit, command, devices, processor, versions and settings of a measurement.

    Starts JAX's backend in this process, which on a GPU then holds most of the memory; `about_elsewhere` does not.
    """
    import jax

    devices = jax.devices()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    packages = {package: found for package in _PACKAGES if (found := version_of(package))}
    return {"time": now, "commit": git_commit(), "command": command, "device": devices[0].device_kind,
            "devices": len(devices), "processor": processor(), "cores": len(os.sched_getaffinity(0)),
            "load": round(os.getloadavg()[0], 1), "versions": {"python": platform.python_version(), **packages},
            "environment": {name: value for name in _ENVIRONMENT if (value := os.environ.get(name))
                            and (name, value) != ("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_FRACTION)}}


_ELSEWHERE = """
import json, sys
from jaxtrain.bench.records import about
print(json.dumps(about(sys.argv[1])))
"""


def about_elsewhere(command: str) -> Record:
    """Return `about(command)` from another process, so that this one does not hold the devices."""
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    try:
        asked = subprocess.run([sys.executable, "-c", _ELSEWHERE, command], capture_output=True, text=True, timeout=300,
                               env={**os.environ, "PYTHONPATH": paths})
    except subprocess.TimeoutExpired:
        raise UserError("device", "JAX does not start within five minutes", "see jaxtrain doctor") from None
    if asked.returncode:
        raise UserError("device", f"JAX cannot use it: {reason(asked.stderr)}", "see jaxtrain doctor")
    return json.loads(asked.stdout.splitlines()[-1])


def reason(text: str) -> str:
    """Return why a program failed, from its stderr: the line of its exception, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "Traceback (most recent call last)" in text:
        errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit|Interrupt)\b", line)]
        lines = errors or lines
    return lines[-1][:300] if lines else ""


def processor() -> str:
    """Return the model of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(": ")[2] for line in lines if "model name" in line), platform.processor())


def command_line(module: str, argv: Iterable[str]) -> str:
    """Return the command for readers to repeat, without the --output flag."""
    words, skip = [], False
    for word in argv:
        if not skip and word.partition("=")[0] != "--output":
            words.append(word)
        skip = word == "--output"
    return shlex.join(["python", *module.split(), *redacted(words)])


def writable(file: str | Path, flag: str = "--output") -> None:
    """Raise a UserError for a file that cannot be appended to, before anything is measured."""
    path = Path(file)
    try:
        path.parent.mkdir(exist_ok=True)
        with open(path, "ab"):
            pass
    except OSError as error:
        raise UserError(flag, f"{file} cannot be written ({error.strerror})", "choose another file") from None


def append(file: str | Path, record: JsonMapping) -> None:
    """Append a record as a line of its own, even if the previous line was cut off."""
    line = (json.dumps(redacted(dict(record))) + "\n").encode()
    try:
        with open(file, "a+b", buffering=0) as lines:
            if lines.seek(0, os.SEEK_END):
                lines.seek(-1, os.SEEK_END)
                line = line if lines.read(1) == b"\n" else b"\n" + line
            lines.write(line)
    except OSError as error:
        raise UserError("--output", f"{file} cannot be written ({error.strerror})", "choose another file") from None


def read(file: str | Path) -> list[Record]:
    """Return the measurements in a file, oldest first; a truncated line is left out with a warning."""
    try:
        lines = bounded_files.read(file, bounded_files.LARGE).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"{file}", f"it cannot be read ({why})", "give files that --output wrote") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            record = bounded_files.parsed(line, object)
        except ValueError:
            say(f"warning: line {number} of {file} is not JSON and is skipped")
            continue
        if not isinstance(record, dict) or "what" not in record:
            raise UserError(f"{file}", f"line {number} is not a measurement", "give files that --output wrote")
        found.append(record)
    if lines and not found:
        raise UserError(f"{file}", "it has no measurements", "give files that --output wrote")
    return found
