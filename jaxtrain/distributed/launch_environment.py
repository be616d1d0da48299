"""The processes of a run and this one's place among them, read from the environment of whatever launcher started them.

The sources in order of precedence, of which an inner launcher comes before the one that started it: flags, variables of
JAX, of torchrun, of Open MPI, of Slurm, of PMIx, of Kubernetes. The first that is complete is used. What flags and
variables of JAX leave open is taken from it. TPUs are left to JAX.
"""

import re
import shutil
import socket
import subprocess
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jaxtrain.errors import UserError

Environ = Mapping[str, str]
Flags = tuple[str | None, int | None, int | None]
NOTHING: Flags = (None, None, None)
_OWN, _TORCHRUN = ("flags", "variables of JAX"), "variables of torchrun"
_OUTSIDE_STEPS = 0xFFFFFFF0  # from here on Slurm numbers what is not a step: a batch script, an interactive shell
_FIRST_PORT, _PORTS = 61440, 4096  # above those that Linux gives to outgoing connections


@dataclass(frozen=True)
class Place:
    """The place of this process, according to one source; None: the source does not say."""

    source: str
    coordinator: str | None = None  # host:port of process 0
    processes: int | None = None
    rank: int | None = None
    why: str = ""  # it is incomplete, or does not count
    fix: str = ""
    key: str = ""  # of the error, if nothing else is complete; "": harmless

    @property
    def complete(self) -> bool:
        """Whether it can be used: alone, a process needs no others."""
        return not self.why and (self.processes == 1 or None not in (self.coordinator, self.processes, self.rank))

    def __str__(self) -> str:
        said = {"processes": self.processes, "this one is": self.rank, "coordinator": self.coordinator}
        shown = ", ".join(f"{name} {value}" for name, value in said.items() if value is not None)
        return f"{self.source}: {self.why or shown}"


def table(environ: Environ, flags: Flags = NOTHING) -> list[Place]:
    """Return what each source says that says anything, in order of precedence."""
    found = [_given(environ, flags), *(look(environ) for look in (_torchrun, _open_mpi, _slurm, _pmix, _kubernetes))]
    return [place for place in found if place]


def used(environ: Environ, flags: Flags = NOTHING) -> Place | None:
    """Return the place of this process; None: nothing says that there are others."""
    found = table(environ, flags)
    own, rest = (found[0], found[1:]) if found and found[0].source in _OWN else (None, found)
    if own is None:
        _refuse_contradiction(found, environ)
    elif own.complete:
        return _sound(own)
    for place in rest:
        if own:
            place = _completed(own, place)
        if place.complete:
            return _sound(place)
    if wrong := next((place for place in found if place.key), None):
        raise UserError(wrong.key, wrong.why, wrong.fix)
    return None


def local_devices(environ: Environ, gpus: int) -> list[int] | None:
    """Return which of the GPUs that this process sees are its own; None: all.

    Processes of one host that see the same GPUs share them evenly. Where a launcher shows to each its own, or starts
    one process a host, all are used; JAX would take one.

    Args:
        environ: the variables.
        gpus: those of this host; 0: not known.
    """
    me, here = _on_this_host(environ)
    if here < 2:
        return None
    if (names := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        gpus = len([name for name in names.split(",") if name.strip()])
    bound = any(environ.get(name) for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"))
    if gpus and (bound or gpus < max(here, _number(environ, "SLURM_GPUS_ON_NODE") or 0)):
        return None
    share = max(gpus // here, 1)
    return list(range(me * share, (me + 1) * share))


def gpus_here() -> int:
    """Return the number of NVIDIA GPUs of this host, without initializing them."""
    return sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia[0-9]*"))


def tasks_here(environ: Environ) -> int:
    """Return how many tasks of Slurm's step run on this host, from its format such as 4(x2),3."""
    counts: list[int] = []
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    for many, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(many)] * int(times or 1)
    if counts:
        return counts[min(_number(environ, "SLURM_NODEID") or 0, len(counts) - 1)]
    return _number(environ, "SLURM_NTASKS_PER_NODE") or 1


def known_to_the_network(coordinator: str, address_of: Callable[[str], str] | None = None) -> str:
    """Return the coordinator, with the address of a node of Slurm in place of a name that the network does not know."""
    host, _, port = coordinator.rpartition(":")
    try:
        socket.getaddrinfo(host.strip("[]"), None)
        return coordinator
    except OSError:
        found = (address_of or _address_of)(host)
    if not found:
        raise UserError("SLURM_STEP_NODELIST", f"the network does not know the name {host}, and scontrol does not say "
                        "its address", "set JAX_COORDINATOR_ADDRESS=HOST:PORT in all processes")
    return f"{found}:{port}"


# --------------------------------------------------------------------------------------------------------- the sources
def _given(environ: Environ, flags: Flags) -> Place | None:
    """Return the place from flags, and from JAX_COORDINATOR_ADDRESS and its like where a flag is missing."""
    coordinator, processes, rank = flags
    coordinator = coordinator or environ.get("JAX_COORDINATOR_ADDRESS") or None
    processes = _whole(environ, "JAX_NUM_PROCESSES", "num_processes") if processes is None else processes
    rank = _whole(environ, "JAX_PROCESS_ID", "process_id") if rank is None else rank
    place = Place(_OWN[flags == NOTHING], coordinator, processes, rank)
    if coordinator is processes is rank is None:
        return None
    if None in (coordinator, processes, rank):
        place = replace(place, why="several processes need --coordinator, --num_processes and --process_id",
                        key="--coordinator", fix="give all three (or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and "
                        "JAX_PROCESS_ID)")
    return place


def _torchrun(environ: Environ) -> Place | None:
    """Return the place that torchrun and its likes set. A shell with only some of it was not started by a launcher."""
    source, names = _TORCHRUN, ("WORLD_SIZE", "RANK")
    if not any(name in environ for name in names):
        return None
    count, rank = (_number(environ, name) for name in names)
    if count is None or rank is None:
        missing = next(name for name in names if _number(environ, name) is None)
        return Place(source, why=f"they do not count, because {missing} is not set or not a number")
    host, port = environ.get("MASTER_ADDR"), _number(environ, "MASTER_PORT")
    if count > 1 and (not host or not port):
        return Place(source, None, count, rank, f"RANK={rank} and WORLD_SIZE={count}, without MASTER_ADDR or "
                     "MASTER_PORT, where process 0 is", "set both, or unset RANK and WORLD_SIZE", "MASTER_ADDR")
    # torchrun itself listens at its port.
    port = (port or 0) + ("TORCHELASTIC_RUN_ID" in environ)
    return Place(source, f"[{host}]:{port}" if ":" in (host or "") else f"{host}:{port}", count, rank)


def _open_mpi(environ: Environ) -> Place | None:
    source = "Open MPI"
    count, rank = _number(environ, "OMPI_COMM_WORLD_SIZE"), _number(environ, "OMPI_COMM_WORLD_RANK")
    if count is None or rank is None:
        return None
    # Version 4 says where mpirun is, which starts process 0 beside it unless hosts are listed otherwise.
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    launcher = re.search(r"tcp://([^,:]+)|tcp6://\[([^],]+)", uri)
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or uri
    port = environ.get("JAX_COORDINATOR_PORT") or _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
    if _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") == count:
        return Place(source, f"127.0.0.1:{port}", count, rank)
    if launcher:
        return Place(source, f"{launcher[1] or f'[{launcher[2]}]'}:{port}", count, rank)
    if (slurm := _slurm(environ)) and slurm.coordinator:  # mpirun has started its daemons with Slurm
        return Place(source, f"{slurm.coordinator.rpartition(':')[0]}:{port}", count, rank)
    return Place(source, None, count, rank, "from version 5 on it does not say where process 0 is",
                 "mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT", source)


def _slurm(environ: Environ) -> Place | None:
    """Return the place that srun sets. A process of a job outside any step of srun, as in salloc's shell, is alone."""
    source = "Slurm"
    if "SLURM_JOB_ID" not in environ and "SLURM_STEP_NODELIST" not in environ:
        return None
    step = _number(environ, "SLURM_STEP_ID")
    if "SLURM_STEP_NODELIST" not in environ or (step or 0) >= _OUTSIDE_STEPS:
        return Place(source, why="this is inside a job but not a task of it, so a run here is a single process",
                     fix="start it with srun; also this command, to see what a task sees")
    count = _number(environ, "SLURM_STEP_NUM_TASKS")
    count = _number(environ, "SLURM_NTASKS") if count is None else count
    needed = ("SLURM_JOB_ID", "SLURM_PROCID")
    missing = [name for name in needed if _number(environ, name) is None] if count else ["SLURM_NTASKS"]
    if missing and count != 1:
        return Place(source, None, count, None, f"not set: {', '.join(missing)}", "pass all SLURM_* to the container, "
                     "or give --coordinator, --num_processes and --process_id", source)
    job = _number(environ, "SLURM_JOB_ID") or 0
    port = environ.get("JAX_COORDINATOR_PORT") or _FIRST_PORT + (job + 97 * (step or 0)) % _PORTS
    host = "127.0.0.1" if environ.get("SLURM_STEP_NUM_NODES") == "1" else first_host(environ["SLURM_STEP_NODELIST"])
    return Place(source, f"{host}:{port}", count, _number(environ, "SLURM_PROCID"))


def first_host(hosts: str) -> str:
    """Return the first of a list of hosts as Slurm writes it, such as rack[1-2]n[001-004,7],login."""
    whole = re.match(r"(?:[^,\[]|\[[^]]*\])+", hosts)
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", whole[0]) if whole else ""


def _pmix(environ: Environ) -> Place | None:
    """Return the place that PMIx sets, as under prterun: the rank, but not the number of processes."""
    rank = _number(environ, "PMIX_RANK")
    if rank is None or "OMPI_COMM_WORLD_SIZE" in environ or "SLURM_STEP_NODELIST" in environ:
        return None
    return Place("PMIx", None, None, rank, f"PMIX_RANK={rank} does not say how many processes there are, nor where",
                 "set JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES", "PMIX_RANK" if rank else "")


def _kubernetes(environ: Environ) -> Place | None:
    """Return the place that a Job with completionMode Indexed sets: the rank of a pod."""
    rank = _number(environ, "JOB_COMPLETION_INDEX")
    if rank is None:
        return None
    return Place("Kubernetes", None, None, rank, f"JOB_COMPLETION_INDEX={rank} does not say how many pods there are, "
                 "nor where", "set JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES, if they are one run")


# ----------------------------------------------------------------------------------------------------------------- all
def _completed(own: Place, place: Place) -> Place:
    """Return what is given, with what another source says of the rest."""
    values = [getattr(own, name) if getattr(own, name) is not None else getattr(place, name)
              for name in ("coordinator", "processes", "rank")]
    return Place(f"{own.source} and {place.source}", *values)


def _sound(place: Place) -> Place:
    """Return a complete place, whose numbers and address can be used."""
    if not 0 <= (place.rank or 0) < (place.processes or 1):
        told = "" if place.source == "flags" else f" ({place.source})"
        raise UserError("--process_id", f"{place.rank} is not below --num_processes={place.processes}{told}",
                        "number them from 0")
    host, _, port = (place.coordinator or "").rpartition(":")
    if place.source.startswith(_OWN) and not (host and port.isdecimal()):
        raise UserError("--coordinator", f"{place.coordinator!r} is not host:port", "write it like node1:1234")
    return place


def _refuse_contradiction(found: list[Place], environ: Environ) -> None:
    """Refuse torchrun's variables that are left in a shell, which give all tasks of another launcher one number."""
    if "LOCAL_RANK" in environ or "TORCHELASTIC_RUN_ID" in environ:  # of a launcher, which the other one has started
        return
    torch = next((place for place in found if place.source == _TORCHRUN and place.complete), None)
    launcher = next((place for place in found if place.source in ("Open MPI", "Slurm")), None)
    if torch and launcher and (launcher.processes or 1) > 1:
        theirs, ours = (f"process {place.rank} of {place.processes}" for place in (launcher, torch))
        if theirs != ours:
            raise UserError("RANK", f"RANK and WORLD_SIZE say that this is {ours}, and {launcher.source} that it is "
                            f"{theirs}", "unset them; what starts processes itself sets LOCAL_RANK too")


def _on_this_host(environ: Environ) -> tuple[int, int]:
    """Return the number of this process among those that a launcher started on this host, and how many they are."""
    for me, here in (("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")):
        if (rank := _number(environ, me)) is not None and (count := _number(environ, here)) is not None:
            return rank, count
    rank = _number(environ, "SLURM_LOCALID")
    return (0, 1) if rank is None or "SLURM_STEP_NODELIST" not in environ else (rank, tasks_here(environ))


def _address_of(node: str) -> str:
    """Return the address by which Slurm reaches a node; "": it does not say."""
    if shutil.which("scontrol") is None:
        return ""
    try:
        said = subprocess.run(["scontrol", "show", "node", node], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(r"NodeAddr=(\S+)", said)
    return found[1] if found else ""


def _number(environ: Environ, name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None


def _whole(environ: Environ, name: str, flag: str) -> int | None:
    if name in environ and not environ[name].isdecimal():
        raise UserError(name, f"{environ[name]!r} is not a whole number", f"set it as you would --{flag}")
    return _number(environ, name)
