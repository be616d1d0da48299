"""Check for environment variables that hide devices, slow training down, or stop it."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from jaxtrain.distributed import launch_environment
from jaxtrain.doctor.finding import Finding, fail, note, ok, warn
from jaxtrain.errors import UserError

CHECK = "environment"
ALLOCATORS = "default", "platform", "bfc", "cuda_async", "vmm", "address"
_TRUE = {"1", "true", "on", "yes", "y", "t"}
_FALSE = {"0", "false", "off", "no", "n", "f"}

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Trap:
    """A variable that should not have certain values."""

    name: str
    values: Collection[str]  # in lower case; empty: any value
    finding: Callable[[str, str, str], Finding]
    what: str
    fix: str = ""

    def look(self, environ: Environ) -> list[Finding]:
        """Return the finding, if the variable has one of the values."""
        value = environ.get(self.name, "")
        if not value or (self.values and value.lower() not in self.values):
            return []
        return [self.finding(CHECK, f"{self.name}={value}: {self.what}", self.fix or f"unset {self.name}")]


# NVIDIA's page on NCCL_* says of variables under "Debugging" not to keep them: they may slow down, crash or hang.
TRAPS = (
    Trap("NCCL_P2P_DISABLE", _TRUE, warn, "GPUs of one host communicate through its memory instead of NVLink"),
    Trap("NCCL_P2P_LEVEL", {"loc", "0"}, warn, "GPUs of one host communicate through its memory instead of NVLink"),
    Trap("NCCL_SHM_DISABLE", _TRUE, warn, "GPUs without a direct link use the network, even within a host"),
    Trap("NCCL_IB_DISABLE", _TRUE, warn, "hosts use TCP instead of InfiniBand or RoCE, ten times slower or more",
         "unset it, unless this network has neither"),
    Trap("NCCL_DEBUG", {"trace"}, warn, "every call is logged"),
    Trap("NCCL_DEBUG", {"info"}, note, "each start logs hundreds of lines", "use NCCL_DEBUG=WARN"),
    Trap("NCCL_ALGO", (), note, "NCCL does not choose by itself any more"),
    Trap("NCCL_PROTO", (), note, "NCCL does not choose by itself any more; some protocols corrupt data where forced"),
    Trap("CUDA_LAUNCH_BLOCKING", _TRUE, warn, "the host waits for every kernel"),
    Trap("NVIDIA_TF32_OVERRIDE", {"0"}, warn, "float32 products leave the tensor cores"),
    Trap("JAX_DISABLE_JIT", _TRUE, fail, "nothing is compiled; jaxtrain's step cannot run so"),
    Trap("JAX_DEBUG_NANS", _TRUE, warn, "every step is checked on the host, and run again where a number is not finite",
         "unset it; jaxtrain reports such steps by itself"),
    Trap("JAX_DEBUG_INFS", _TRUE, warn, "every step is checked on the host",
         "unset it; jaxtrain reports such steps by itself"),
    Trap("JAX_ENABLE_X64", _TRUE, warn, "numbers become 64 bits wide, which accelerators compute slowly or not at all"),
    Trap("JAX_ENABLE_CHECKS", _TRUE, warn, "JAX checks itself: tracing is much slower"),
    Trap("JAX_CHECK_TRACER_LEAKS", _TRUE, warn, "tracing is much slower, and nothing traced is kept"),
    Trap("JAX_DEFAULT_MATMUL_PRECISION", {"highest", "float32", "high", "tensorfloat32", "bfloat16_3x", "bfloat16_6x"},
         warn, "products take several passes", "unset it; train.precision decides that"),
    Trap("JAX_ENABLE_COMPILATION_CACHE", _FALSE, warn, "every start compiles everything again"),
    Trap("JAX_TRANSFER_GUARD", {"disallow", "disallow_explicit"}, fail, "the start of a run must copy to devices",
         "unset it; jaxtrain sets it where it can"),
    Trap("JAX_LOG_COMPILES", _TRUE, note, "each compilation is logged"),
    Trap("JAX_ENABLE_RECOVERABILITY", _TRUE, warn, "processes may wait forever for one that died"),
    Trap("XLA_PYTHON_CLIENT_PREALLOCATE", _FALSE, warn, "memory becomes fragmented, and runs out earlier",
         "unset it for training"),
    Trap("XLA_PYTHON_CLIENT_ALLOCATOR", {"platform"}, warn, "the driver allocates every array, which is very slow"),
    Trap("TF_GPU_ALLOCATOR", (), warn, "JAX may use it as its own allocator, or ignore it",
         "unset it; the same in JAX is XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async"),
    Trap("OMP_NUM_THREADS", {"1"}, note, "NumPy computes on one core", "unset it, unless that is intended"),
    Trap("PYTHONDONTWRITEBYTECODE", (), note, "packages that pip did not compile are compiled at each start",
         "unset it, or python -m compileall once"),
)
# Flags in XLA_FLAGS: name, values, kind of finding, effect.
_HURTING = (
    ("xla_dump_to", r".+", warn, "every program is written to disk: starts are slow, and the disk fills up"),
    ("xla_gpu_autotune_level", r"0", warn, "the first kernel is used, not the fastest"),
    ("xla_gpu_enable_latency_hiding_scheduler", r"false|0", warn, "communication is not hidden behind computation"),
    ("xla_backend_optimization_level", r"[01]", warn, "programs are hardly optimised"),
    ("xla_disable_hlo_passes", r".+", warn, "parts of the compiler are skipped"),
    ("xla_disable_all_hlo_passes", r"|true|1", warn, "the compiler's passes are skipped"),
    ("xla_llvm_disable_expensive_passes", r"|true|1", warn, "programs are hardly optimised"),
    ("xla_cpu_multi_thread_eigen", r"false|0", warn, "the CPU computes on one core"),
    ("xla_gpu_deterministic_ops", r"|true|1", note, "some kernels are slower"),
    ("xla_gpu_exclude_nondeterministic_ops", r"|true|1", note, "some kernels are slower"),
)


def environment(environ: Environ, gpus: int, interfaces: Collection[str], infiniband: Collection[str]) -> list[Finding]:
    """Return all findings about environment variables.

    Args:
        environ: the variables.
        gpus: the number of NVIDIA GPUs for this process, ignoring CUDA_VISIBLE_DEVICES.
        interfaces: network interfaces, by name.
        infiniband: adapters, by name.
    """
    found = [finding for trap in TRAPS for finding in trap.look(environ)]
    found += [*xla_flags(environ), *memory(environ), *nccl(environ, interfaces, infiniband), *visible(environ, gpus),
              *slurm(environ, gpus)]
    return found or [ok(CHECK, "no harmful variable is set")]


def xla_flags(environ: Environ) -> list[Finding]:
    """Check XLA_FLAGS for harmful flags; the probe finds flags that jaxlib does not know."""
    found = []
    for word in environ.get("XLA_FLAGS", "").split():
        name, _, value = word.removeprefix("--").partition("=")
        for flag, values, finding, what in _HURTING:
            if name == flag and re.fullmatch(values, value.lower()):
                found.append(finding("XLA_FLAGS", f"{word}: {what}", "leave it out, unless you are debugging"))
    return found


def memory(environ: Environ) -> list[Finding]:
    """Check how much GPU memory JAX is told to reserve."""
    allocator = environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    found = []
    if allocator not in ALLOCATORS:
        found.append(fail(CHECK, f"XLA_PYTHON_CLIENT_ALLOCATOR={allocator}: JAX knows no such allocator",
                          f"unset it, or use one of {', '.join(ALLOCATORS)}"))
    new, old = (environ.get(f"XLA_{name}MEM_FRACTION", "") for name in ("CLIENT_", "PYTHON_CLIENT_"))
    if new and old:
        return [*found, fail(CHECK, "XLA_CLIENT_MEM_FRACTION and XLA_PYTHON_CLIENT_MEM_FRACTION are both set, and JAX "
                             "refuses to start on a GPU", "unset XLA_PYTHON_CLIENT_MEM_FRACTION, the old name")]
    if not (text := new or old):
        return found
    name = "XLA_CLIENT_MEM_FRACTION" if new else "XLA_PYTHON_CLIENT_MEM_FRACTION"
    try:
        share = float(text)
    except ValueError:
        return [*found, fail(CHECK, f"{name}={text} is not a number", f"unset it, or {name}=.9")]
    if not 0 < share <= 1:
        found.append(fail(CHECK, f"{name}={text} is not a share of the memory", f"unset it, or {name}=.9"))
    elif share > 0.95:
        found.append(warn(CHECK, f"{name}={text} leaves {1 - share:.0%} for CUDA, NCCL and its buffers", f"{name}=.92"))
    elif share < 0.5:
        found.append(warn(CHECK, f"{name}={text}: JAX leaves {1 - share:.0%} of each GPU unused",
                          f"unset it, or {name}=.9 if no other program uses the GPU"))
    return found


def nccl(environ: Environ, interfaces: Collection[str], infiniband: Collection[str]) -> list[Finding]:
    """Check for network interfaces and adapters that NCCL is told to use but that do not exist."""
    found = []
    wanted = environ.get("NCCL_SOCKET_IFNAME", "")
    if wanted and not _chosen(wanted, interfaces):
        found.append(fail(CHECK, f"NCCL_SOCKET_IFNAME={wanted} matches no network interface here",
                          f"unset it, or use one of {', '.join(sorted(interfaces))}"))
    elif wanted and _chosen(wanted, interfaces) == {"lo"}:
        found.append(warn(CHECK, f"NCCL_SOCKET_IFNAME={wanted} reaches this host only", "unset it for several hosts"))
    wanted = environ.get("NCCL_IB_HCA", "")
    if wanted and infiniband and not _chosen(re.sub(r":\d+", "", wanted), infiniband):
        found.append(fail(CHECK, f"NCCL_IB_HCA={wanted} matches no adapter here",
                          f"unset it, or use one of {', '.join(sorted(infiniband))}"))
    return found


def visible(environ: Environ, gpus: int) -> list[Finding]:
    """Check for GPUs that are hidden from JAX."""
    names = environ.get("CUDA_VISIBLE_DEVICES")
    if names is None or not gpus:
        return []
    if _count(names) == 0:
        return [fail(CHECK, f"CUDA_VISIBLE_DEVICES={names or repr('')} hides all {gpus} GPUs", "unset it")]
    if _count(names) < gpus and "SLURM_LOCALID" not in environ:
        return [note(CHECK, f"CUDA_VISIBLE_DEVICES={names}: {_count(names)} of {gpus} GPUs are used",
                     "unset it to use all")]
    return []


def slurm(environ: Environ, gpus: int) -> list[Finding]:
    """Check whether the tasks of a Slurm job have GPUs of their own, and all of them."""
    if not _number(environ.get("SLURM_JOB_ID")) or "SLURM_STEP_NODELIST" not in environ or (
            _number(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS"))) < 2):
        return []
    tasks = launch_environment.tasks_here(environ)
    names = environ.get("CUDA_VISIBLE_DEVICES")
    seen = gpus if names is None else min(gpus, _count(names)) if gpus else 0
    if seen == 1 and tasks > 1:
        return [warn("Slurm", f"each of {tasks} tasks sees one GPU, so NCCL may find no direct link between them",
                     _UNBOUND)]
    if not seen or "JAX_LOCAL_DEVICE_IDS" in environ:
        return []
    own = launch_environment.local_devices(environ, gpus)
    each = seen if own is None else len(own)
    if own is not None and own[-1] >= seen:
        return [fail("Slurm", f"{tasks} tasks a host and {seen} GPUs: task {environ['SLURM_LOCALID']} has none",
                     f"srun --ntasks-per-node={seen}")]
    if own is not None and seen % tasks:
        return [warn("Slurm", f"{tasks} tasks a host and {seen} GPUs: {seen % tasks} stay idle",
                     f"srun --ntasks-per-node={seen}, or a number that divides {seen}")]
    return [ok("Slurm", f"{tasks} task{'s' * (tasks > 1)} a host, {each} GPU{'s' * (each > 1)} each")]


_UNBOUND = "ask for --gres=gpu:N or --gpus-per-node=N instead of --gpus-per-task, and srun with --gpu-bind=none"


def processes(environ: Environ) -> list[Finding]:
    """Return what the environment says of other processes, and what a run would use."""
    check = "processes"
    found = launch_environment.table(environ)
    try:
        place = launch_environment.used(environ)
    except UserError as error:
        return [fail(check, f"{error.key}: {error.reason}", error.fix)]
    others = [note(check, f"{one} (not used)", one.fix or "nothing, if that is meant; else unset it") for one in found
              if not place or one.source not in place.source]
    if place is None or place.processes == 1:
        alone = "a run here is a single process" + (f" ({place.source})" if place else "")
        return [ok(check, alone), *others]
    return [ok(check, f"{place}"), *others]


def _chosen(wanted: str, there: Collection[str]) -> set[str]:
    """Select names like NCCL does: by prefixes, by whole names after =, or all except those after ^."""
    text = wanted.removeprefix("^")
    whole, parts = text.startswith("="), [part for part in text.removeprefix("=").split(",") if part]
    fits = {name for name in there if any(name == part if whole else name.startswith(part) for part in parts)}
    return set(there) - fits if wanted.startswith("^") else fits


def _count(names: str) -> int:
    """Count the devices in CUDA_VISIBLE_DEVICES; those after -1 are hidden too."""
    count = 0
    for name in names.split(","):
        if not re.match(r"\d|GPU-|MIG-", name.strip()):
            break
        count += 1
    return count


def _number(text: str | None, otherwise: int = 0) -> int:
    return int(text) if text and text.isdecimal() else otherwise


def for_probe(environ: Environ, unknown: Sequence[str] = ()) -> dict[str, str]:
    """Return the probe's environment: as in training, but without slow debugging and without reserving all memory."""
    debugging = {"JAX_DISABLE_JIT", "JAX_DEBUG_NANS", "JAX_DEBUG_INFS", "JAX_ENABLE_CHECKS", "JAX_CHECK_TRACER_LEAKS",
                 "JAX_TRANSFER_GUARD", "JAX_LOG_COMPILES"}
    kept = {name: value for name, value in environ.items() if name not in debugging}
    flags = [flag for flag in environ.get("XLA_FLAGS", "").split()
             if flag.partition("=")[0] not in (*unknown, "--xla_dump_to")]
    return {**kept, "XLA_FLAGS": " ".join(flags), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
