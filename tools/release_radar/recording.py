"""Compile cases, each in a process with limits, and append what became of each to a file of lines.

A file has a line for each environment (versions, flags and the values of all options of XLA) and one for each case.
Of several lines for a case the last one counts.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtrain.base.annotations import JsonObject
from jaxtrain.errors import UserError
from jaxtrain.observe.versions import git_commit, version_of
from jaxtrain.plan.targets import parse
from jaxtrain.precompiled import requirements
from tools.benchmarks.bench_hlo import ROOT
from tools.release_radar import limits, option_defaults
from tools.release_radar.cases import Case
from tools.release_radar.compiling import MARK

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "libtpu")
NO_TIMING = "--xla_gpu_autotune_level=0"  # without the GPU no kernels can be timed against each other
PLACES = ("xla_gpu_cuda_data_dir",)  # options that say where something lies on this machine, and change no program
WROTE = "name a file that `radar record` wrote"
Tell = Callable[[Case, JsonObject], None]
DEVICES = "--xla_force_host_platform_device_count="


@dataclass(frozen=True)
class Limits:
    """The time and memory that one case may take."""

    seconds: float = 900.0
    gigabytes: float = 12.0


@dataclass
class Lines:
    """The lines of one file."""

    name: str
    environment: JsonObject = field(default_factory=dict)
    cases: dict[str, JsonObject] = field(default_factory=dict)

    @property
    def versions(self) -> JsonObject:
        """The versions of JAX and its compilers."""
        return self.environment.get("versions", {})


def read(path: Path) -> Lines:
    """Read a file of lines."""
    found = Lines(path.stem)
    for line in objects(path):
        if "case" in line:
            found.cases[line["case"]] = line
        else:
            found.environment = line
    if not found.environment:
        raise UserError(f"{path}", "it says nothing of its environment", WROTE)
    return found


def objects(path: Path) -> list[JsonObject]:
    """Return the objects of a file of lines; raise a `UserError` if it cannot be read."""
    try:
        found = [json.loads(text) for text in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}", f"it cannot be read ({error})", WROTE) from None
    if not all(isinstance(one, dict) for one in found):
        raise UserError(f"{path}", "it has lines that are no objects", WROTE)
    return found


def append(path: Path, line: JsonObject) -> None:
    """Append a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def versions() -> dict[str, str]:
    """Return the installed versions of JAX and its compilers."""
    return {name: found for name in PACKAGES if (found := version_of(name))}


def environment() -> JsonObject:
    """Return what programs depend on here beside a case: versions, flags, and the values of XLA's options."""
    options = {name: value for name, value in option_defaults.here().items() if name not in PLACES}
    return {"versions": versions(), "python": ".".join(map(str, sys.version_info[:3])),
            "xla_flags": option_defaults.flags_here(), "options": options}


def flags_for(case: Case, flags: Iterable[str]) -> str:
    """Return XLA_FLAGS for a case: these, no timing of kernels, and for CPUs as many devices as it has."""
    target, devices = parse(case.target)
    own = [NO_TIMING] if target.platform == "cuda" else [f"{DEVICES}{devices}"] if target.platform == "cpu" else []
    return " ".join([*own, *flags])


def compiled(case: Case, flags: Iterable[str], limit: Limits) -> JsonObject:
    """Compile a case in a process of its own; return its figures, why it was refused, or why it was stopped."""
    there = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags_for(case, flags),
             "PYTHONPATH": os.pathsep.join(filter(None, (f"{ROOT}", os.environ.get("PYTHONPATH"))))}
    done = limits.run([sys.executable, "-m", "tools.radar", "alone"], there, ROOT, case.as_json(), limit.seconds,
                      limit.gigabytes)
    took = {"wall_s": done.seconds, "host_gb": done.peak_gb}
    line = next((text for text in done.out.splitlines() if text.startswith(MARK)), "")
    if line:
        return json.loads(line.removeprefix(MARK)) | took
    if done.stopped:
        return {"stopped": done.stopped} | took
    if done.status < 0:  # a check in the compiler failed
        return {"refused": f"{signal.Signals(-done.status).name}: {_last_words(done.error)}"} | took
    return {"stopped": _last_words(done.error)} | took  # no compiler for it is installed, or its program is not read


def record(cases: list[Case], path: Path, options: JsonObject, limit: Limits, jobs: int, tell: Tell) -> None:
    """Compile cases with these options, so many side by side, and append a line for each as soon as it is there."""
    here, flags = environment(), option_defaults.flags_here()
    if not path.exists():
        append(path, here)
    elif not same(read(path).environment, here):
        raise UserError("--to", f"{path} is of another environment, or of other flags", "write to another file")
    about = {"commit": git_commit(), "jaxtrain": requirements.code_here()[:16], "given": options}
    with ThreadPoolExecutor(jobs) as pool:
        begun = {pool.submit(compiled, case.with_options(options), flags, limit): case for case in cases}
        for done in as_completed(begun):
            case, made = begun[done], _rounded(done.result())
            append(path, {"case": case.name, "target": case.target, **about, **made})
            tell(case, made)


def same(one: JsonObject, other: JsonObject) -> bool:
    """Return whether two environments compile alike: versions, flags and options; Python's version does not matter."""
    return {**one, "python": ""} == {**json.loads(json.dumps(other)), "python": ""}


def _last_words(error: str) -> str:
    """Return the line of a process's messages that says why it ended, in at most 300 characters."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("F") and "Check failed" in line]
    return (fatal or lines or ["it said nothing"])[-1][:300]


def _rounded(value: Any) -> Any:
    """Return a value with numbers of four decimals."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value
