"""Check the cores, memory and open files that machine, container and shell allow this process."""

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.doctor.finding import Finding, note, ok, size, warn

CHECK = "host"
_ENOUGH_FILES = 4096  # open files: shards, checkpoints and connections of one process
_SMALL = 4 * 10**9  # bytes of memory that suffice for a small run with JAX


@dataclass(frozen=True)
class Machine:
    """The limits that the kernel reports; None where unknown."""

    cores: int  # of the machine
    usable: int  # by this process
    quota: float | None = None  # CPU time of the container, in cores
    memory: int | None = None
    free: int | None = None  # without swapping
    limit: int | None = None  # memory limit of the container
    used: int | None = None  # of that limit
    files: tuple[int, int] = (2**20, 2**20)  # soft and hard limit of open files
    shared: int | None = None  # bytes of /dev/shm


def machine(seen: Machine, gpus: int) -> list[Finding]:
    """Return all findings about the host."""
    return [*cores(seen, gpus), *memory(seen, gpus), *limits(seen, gpus)]


def cores(seen: Machine, gpus: int) -> list[Finding]:
    """Check how many cores this process may use."""
    usable = min(float(seen.usable), seen.quota or float(seen.cores))
    said = f"{usable:g} of {seen.cores} cores"
    if usable < seen.cores / 2 or usable < 2 * gpus:
        fix = "srun --cpus-per-task=N (Slurm's default is 1), or docker run --cpus and --cpuset-cpus"
        if usable < max(2 * gpus, 2):
            return [warn("cores", f"this process may use {said}" + (f", for {gpus} GPUs" if gpus else "")
                         + ": loading data and compiling would be slow", fix)]
        return [note("cores", f"this process may use {said}", f"if that is not intended: {fix}")]
    return [ok("cores", said)]


def memory(seen: Machine, gpus: int) -> list[Finding]:
    """Check the free memory of the host, or of the container."""
    free = seen.free
    if seen.limit is not None and seen.memory is not None and seen.limit < seen.memory:
        left = max(seen.limit - (seen.used or 0), 0)
        free = left if free is None else min(free, left)
    if free is None:
        return []
    limited = seen.limit is not None and seen.memory is not None and seen.limit < seen.memory
    what = f"{size(free)} free" + (f", of {size(seen.limit or 0)} that the container may use" if limited else "")
    if free < max(_SMALL, gpus * _SMALL):
        return [warn("memory", f"{what}: the kernel would kill a run that needs more" + (
            f" (saving keeps a copy of the state of {gpus} GPUs for a while)" if gpus else ""),
            "stop what uses it, request more (--mem=0 in Slurm, docker run --memory), or train something smaller")]
    return [ok("memory", what)]


def limits(seen: Machine, gpus: int) -> list[Finding]:
    """Check the limit of open files, and memory shared between processes."""
    found = []
    now, most = seen.files
    if now < _ENOUGH_FILES:
        fix = (f"ulimit -n {min(most, 65536)}" if most >= _ENOUGH_FILES else
               "raise it in /etc/security/limits.conf (nofile), or docker run --ulimit nofile=65536")
        level = warn if now < 1024 else note
        found.append(level("open files", f"at most {now}; many shards or processes need more", fix))
    if seen.shared is not None and seen.shared < 2**30 and gpus > 1:
        found.append(warn("/dev/shm", f"{size(seen.shared)}, and NCCL keeps buffers for {gpus} GPUs in it",
                          "docker run --shm-size=16g; in Kubernetes mount an emptyDir of medium Memory there"))
    return found


def here() -> Machine:
    """Return the limits of this machine."""
    numbers = {line.split(":")[0]: int(line.split()[1]) * 1024
               for line in _text(Path("/proc/meminfo")).splitlines() if len(line.split()) > 1}
    quota, limit, used = container(Path("/sys/fs/cgroup"), _text(Path("/proc/self/cgroup")))
    try:
        shared = os.statvfs("/dev/shm")
    except OSError:
        shared = None
    there = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else there
    return Machine(there, usable, quota, numbers.get("MemTotal"),
                   numbers.get("MemAvailable"), limit, used, resource.getrlimit(resource.RLIMIT_NOFILE),
                   shared.f_blocks * shared.f_frsize if shared else None)


def container(root: Path, groups: str) -> tuple[float | None, int | None, int | None]:
    """Return the tightest limits of a control group and its parents: CPU time in cores, memory, and the memory used.

    Args:
        root: /sys/fs/cgroup, of either version.
        groups: the content of /proc/self/cgroup.
    """
    quotas: list[float] = []
    limits: list[tuple[int, int]] = []
    for line in groups.splitlines():
        _, names, path = line.split(":", 2)
        base = root / names if names else root
        for folder in _upwards(base, path):
            if found := re.match(r"(\d+) (\d+)", _text(folder / "cpu.max")):
                quotas.append(int(found[1]) / int(found[2]))
            allowed, period = (_number(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
            if allowed and period:
                quotas.append(allowed / period)
            for most, now in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
                if (limit := _number(folder / most)) is not None:
                    limits.append((limit, (_number(folder / now) or 0) - _reclaimable(folder)))
    limit, used = min(limits, key=lambda pair: pair[0] - pair[1], default=(None, None))
    return min(quotas, default=None), limit, used


def _upwards(base: Path, path: str) -> list[Path]:
    """Return the group's folder and its parents; in a container only the end of the path may exist."""
    here = base / path.lstrip("/")
    folders = [here, *here.parents]
    return [folder for folder in folders[:folders.index(base) + 1] if folder.is_dir()]


def _reclaimable(folder: Path) -> int:
    """Return the bytes of cached files, which the kernel frees when memory is needed."""
    found = re.search(r"^(?:total_)?inactive_file (\d+)", _text(folder / "memory.stat"), re.M)
    return int(found[1]) if found else 0


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
