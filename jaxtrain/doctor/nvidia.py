"""Check NVIDIA's driver and GPUs, as reported by nvidia-smi."""

import csv
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.doctor.finding import Finding, fail, note, ok, size, warn

# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1
LEAST_DRIVER = {12: 525, 13: 580}
# The least compute capability of JAX's wheels (docs.jax.dev, Installation): CUDA 13 supports Turing and later.
LEAST_CAPABILITY = {12: 5.2, 13: 7.5}
SHARE = 0.75  # of a GPU's memory, which JAX reserves at its start by default
_FIELDS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.free", "compute_cap", "mig.mode.current",
           "ecc.errors.uncorrected.volatile.total", "persistence_mode", "compute_mode")
_PLAIN = _FIELDS[:6]  # fields that every driver knows
_MB, _PATIENCE = 2**20, 15


@dataclass(frozen=True)
class Gpu:
    """One GPU; unknown values are None."""

    index: int
    uuid: str
    name: str
    driver: str
    total: int  # bytes; 0 if it shares the host's memory
    free: int
    capability: float | None = None
    mig: bool = False
    ecc_errors: int | None = None
    persistent: bool | None = None
    mode: str = "Default"  # which processes may compute
    users: tuple[str, ...] = ()  # processes that compute on it


def present() -> bool:
    """Return whether there is an NVIDIA GPU, or its driver."""
    return any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/nvidia0", "/dev/dxg"))


def here() -> tuple[list[Gpu], list[Finding]]:
    """Return the GPUs, or a finding if nvidia-smi cannot be asked."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [], [note("driver", "there is a driver but no nvidia-smi, so GPUs could not be looked at",
                         "install NVIDIA's utilities, or start the container with NVIDIA_DRIVER_CAPABILITIES=all")
                    ] if present() else []
    for fields in (_FIELDS, _PLAIN):
        code, text = _ask(tool, f"--query-gpu={','.join(fields)}")
        if "it hung" in text:
            break
        if code == 0:
            users = _ask(tool, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
            return parse(text, users[1] if users[0] == 0 else "", fields), []
    return [], refused(text)


def refused(text: str) -> list[Finding]:
    """Return the finding for an error of nvidia-smi."""
    words = " ".join(text.split())[:200]
    fixes = {"version mismatch": "the driver was updated under a running kernel: reboot, or reload its modules",
             "couldn't communicate": "install the driver or load it (modprobe nvidia); a new kernel needs a new module",
             "No devices": "start the job or container with GPUs (docker run --gpus all, sbatch --gres=gpu:8)",
             "Unable to determine the device handle": "a GPU fell off its bus: see dmesg for Xid, reboot this host"}
    fix = next((fix for part, fix in fixes.items() if part in text), "see dmesg for NVRM and Xid, then reboot")
    return [fail("driver", f"nvidia-smi does not answer ({words})", fix)]


def parse(gpus: str, users: str = "", fields: Sequence[str] = _FIELDS) -> list[Gpu]:
    """Parse nvidia-smi's two CSV tables, without units."""
    by_uuid: dict[str, list[str]] = {}
    for row in csv.reader(users.splitlines(), skipinitialspace=True):
        if len(row) >= 4:
            memory = f", {row[3]} MiB" if row[3].isdecimal() else ""
            by_uuid.setdefault(row[0], []).append(f"{Path(row[2]).name} (pid {row[1]}{memory})")
    found = []
    for row in csv.reader(gpus.splitlines(), skipinitialspace=True):
        if len(row) != len(fields):
            continue
        said = {field: value.strip() for field, value in zip(fields, row, strict=True)
                if not re.match(r"\[?(N/A|Not Supported|Unknown)", value.strip())}
        found.append(Gpu(
            int(said["index"]), said.get("uuid", ""), said.get("name", "GPU"), said.get("driver_version", ""),
            int(said.get("memory.total", 0)) * _MB, int(said.get("memory.free", 0)) * _MB,
            float(said["compute_cap"]) if "compute_cap" in said else None, said.get("mig.mode.current") == "Enabled",
            _number(said.get("ecc.errors.uncorrected.volatile.total")),
            said["persistence_mode"] == "Enabled" if "persistence_mode" in said else None,
            said.get("compute_mode", "Default"),
            tuple(by_uuid.get(said.get("uuid", ""), ()))))
    return found


def gpus(found: Sequence[Gpu], cuda: Sequence[int], environ: Mapping[str, str]) -> list[Finding]:
    """Return all findings about the GPUs themselves."""
    if not found:
        return []
    used = visible(found, environ)
    return [*driver(found, cuda), *health(found), *sharing(used), *memory(used, environ)]


def visible(found: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES; CUDA hides all after the first name that matches none."""
    names = environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return list(found)
    left = []
    for name in names.split(","):
        name = name.strip()
        fits = [gpu for gpu in found if name and (str(gpu.index) == name or gpu.uuid.startswith(name))]
        if not fits:
            break
        left += fits[:1]
    return left


def driver(found: Sequence[Gpu], cuda: Sequence[int]) -> list[Finding]:
    """Check whether the driver and the GPUs are new enough for the plugin's CUDA."""
    version = found[0].driver
    findings = []
    for major in cuda:
        least = LEAST_DRIVER.get(major)
        if least and version and int(version.split(".")[0]) < least:
            older = [other for other in LEAST_DRIVER if LEAST_DRIVER[other] <= int(version.split(".")[0])]
            instead = f", or pip install 'jax[cuda{max(older)}]'" if older else ""
            findings.append(fail("driver", f"{version} is too old for CUDA {major}, which needs {least} or later",
                                 f"update the driver{instead}"))
        least_capability = LEAST_CAPABILITY.get(major, 0.0)
        for gpu in found:
            if gpu.capability and gpu.capability < least_capability:
                findings.append(fail("driver", f"GPU {gpu.index} ({gpu.name}) has compute capability {gpu.capability}, "
                                     f"and CUDA {major} begins at {least_capability}",
                                     "use another GPU, or pip install 'jax[cuda12]' if it supports this one"))
    kinds = sorted({gpu.name for gpu in found})
    if len(kinds) > 1:
        findings.append(warn("driver", f"GPUs of different kinds: {', '.join(kinds)}; the slowest sets the pace",
                             "choose those of one kind by CUDA_VISIBLE_DEVICES"))
    each = f", {size(found[0].total)} each" if found[0].total else ""
    return findings or [ok("driver", f"{version}, {len(found)} x {kinds[0]}{each}")]


def health(found: Sequence[Gpu]) -> list[Finding]:
    """Check compute mode, MIG, memory errors and persistence."""
    findings = []
    if closed := [gpu.index for gpu in found if gpu.mode == "Prohibited"]:
        findings.append(fail("compute mode", f"no process may compute on GPU {_list(closed)}",
                             f"nvidia-smi -i {_list(closed)} -c DEFAULT"))
    if sliced := [gpu.index for gpu in found if gpu.mig]:
        findings.append(warn("MIG", f"on for GPU {_list(sliced)}: a process sees one slice; NCCL cannot connect slices",
                             f"nvidia-smi -i {_list(sliced)} -mig 0, or train on one slice alone"))
    for gpu in found:
        if gpu.ecc_errors:
            findings.append(fail("memory errors", f"GPU {gpu.index} ({gpu.name}) has {gpu.ecc_errors} that ECC could "
                                 "not correct", f"leave it out, or reset it (nvidia-smi -i {gpu.index} -r) and have it "
                                 "replaced if they come back"))
    if lazy := [gpu.index for gpu in found if gpu.persistent is False]:
        findings.append(note("persistence", f"off for GPU {_list(lazy)}: the driver is loaded again at each start",
                             "nvidia-smi -pm 1, or start nvidia-persistenced"))
    return findings


def sharing(found: Sequence[Gpu]) -> list[Finding]:
    """Check for other processes on the GPUs."""
    findings = []
    for gpu in found:
        if gpu.users:
            findings.append(warn("other processes", f"GPU {gpu.index} is used by {', '.join(gpu.users)}",
                                 "stop them, or choose other GPUs by CUDA_VISIBLE_DEVICES"))
        elif gpu.total and gpu.free < 0.9 * gpu.total:
            findings.append(warn("other processes", f"{size(gpu.total - gpu.free)} of GPU {gpu.index} are used by "
                                 "a process that nvidia-smi does not show (another container?)",
                                 "find out on the host, or choose other GPUs by CUDA_VISIBLE_DEVICES"))
    return findings


def memory(found: Sequence[Gpu], environ: Mapping[str, str]) -> list[Finding]:
    """Check whether the memory that JAX reserves at its start is free."""
    try:
        share = float(environ.get("XLA_CLIENT_MEM_FRACTION") or environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or SHARE)
    except ValueError:
        return []  # the check of the environment reports this
    found = [gpu for gpu in found if gpu.total]
    short = [gpu for gpu in found if gpu.free < share * gpu.total]
    if short:
        few = min(short, key=lambda gpu: gpu.free)
        return [warn("GPU memory", f"JAX takes {share:.0%} of {size(few.total)}, and GPU {few.index} has "
                     f"{size(few.free)} free" + (f" ({len(short)} GPUs are short)" if len(short) > 1 else ""),
                     f"free it, or set XLA_CLIENT_MEM_FRACTION={max(few.free / few.total - 0.02, 0.01):.2f}")]
    if not found:
        return []
    free = min(gpu.free for gpu in found)
    return [ok("GPU memory", f"{size(free)} free on each; JAX takes {size(share * found[0].total)} ({share:.0%})")]


def _ask(tool: str, query: str) -> tuple[int, str]:
    try:
        command = [tool, query, "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return 1, f"it hung for {_PATIENCE} s"
    return done.returncode, done.stdout + done.stderr if done.returncode else done.stdout


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _list(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
