"""Start and end several processes as one run, set up by flags, by the environment or by JAX.

When one process fails or is lost, the others end within seconds, and the message names it (distributed/peers.py).
"""

import contextlib
import itertools
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import jax
from jax.experimental import multihost_utils

from jaxtrain.distributed import exit_codes, launch_environment
from jaxtrain.distributed.authentication import opened, sealed
from jaxtrain.distributed.launch_environment import Place
from jaxtrain.errors import UserError, say
from jaxtrain.observe.versions import version_of
from jaxtrain.redaction import redacted

if TYPE_CHECKING:
    from jaxtrain.distributed.peers import Peers

Item = TypeVar("Item")
_OWN = {("data", "cache_dir"), ("data", "source"), ("train", "progress")}  # settings that may differ between hosts
# How communication libraries report that the other end of a connection is gone.
_BROKEN = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "socket closed", "broken pipe",
           "coordination service", "heartbeat", "unavailable:", "timed out waiting", "deadline_exceeded", "barrier")
_peers: "Peers | None" = None
_meetings = itertools.count()  # all processes call `meet` equally often, and each barrier is used once


def initialize(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Connect to the other processes, if there are any; call it before anything touches a device.

    Flags override JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. What they leave open is what the
    launcher says (distributed/launch_environment.py), or JAX of TPUs; otherwise the run is this process alone.

    JAXTRAIN_JOIN_TIMEOUT (300) is how many seconds to wait for the others before this process exits, to be restarted;
    JAXTRAIN_PEER_TIMEOUT (60) is how many seconds without a sign of life mean that another process is dead. They are
    not config keys, because a config may ask for devices, which exist only after this call.
    """
    place = launch_environment.used(os.environ, (coordinator, num_processes, process_id))
    if place is None and _tpu_processes() > 1:
        _join(None)
    elif place and place.processes != 1:
        address = place.coordinator or ""
        if place.source in ("Slurm", "Open MPI"):
            address = launch_environment.known_to_the_network(address)
        _join(replace(place, coordinator=address))


def _tpu_processes() -> int:
    """Return the number of hosts of a TPU, as JAX finds it out."""
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES", os.environ.get("TPU_WORKER_HOSTNAMES", ","))
    one = "," not in hosts and "MEGASCALE_NUM_SLICES" not in os.environ  # of notebooks, too, which have no metadata
    if one or not jax._src.cloud_tpu_init.running_in_cloud_tpu_vm:
        return 1
    kinds = [kind for kind in jax._src.clusters.ClusterEnv._cluster_types if kind.__name__.endswith("TpuCluster")]
    found = next((kind for kind in kinds if kind.is_env_present()), None)
    return found.get_process_count() if found else 1


def process() -> int:
    """Return the rank of this process, without initializing a backend."""
    return jax._src.distributed.global_state.process_id or 0


def processes() -> int:
    """Return the number of processes, without initializing a backend."""
    return jax._src.distributed.global_state.num_processes or 1


class Settings(Protocol):
    """The settings that all processes of a run must share."""

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return them in plain JSON, by section and key."""


def agree(settings: Settings) -> None:
    """Raise a `UserError` in all processes if the settings or versions of one differ from those of the first."""
    store = jax._src.distributed.global_state.client
    if store is None:
        return
    ours = {f"{section}.{key}": value for section, keys in settings.to_dict().items() for key, value in keys.items()
            if (section, key) not in _OWN}
    ours |= {f"version of {name}": version_of(name) for name in ("jaxtrain", "jax", "jaxlib")}
    ours = json.loads(json.dumps(ours))
    if process() == 0:
        store.key_value_set("jaxtrain/config", sealed("config", ours))
    theirs = opened("config", store.blocking_key_value_get("jaxtrain/config", 60_000))
    for key in [*theirs, *ours]:
        if ours.get(key) != theirs.get(key):
            us = f"process {process()} ({socket.gethostname()})"
            difference = f"process 0 has {theirs.get(key)}, {us} has {ours.get(key)}"
            store.key_value_set(f"jaxtrain/disagree/{process()}", sealed("disagree", [key, difference]))
            break
    store.wait_at_barrier("jaxtrain/agree", 60_000)
    for _, found in sorted(store.key_value_dir_get("jaxtrain/disagree")):
        key, difference = opened("disagree", found)
        raise UserError(key, difference, "start all processes with the same command and the same installation")


def meet(where: str, seconds: float) -> None:
    """Wait until all processes have made this call."""
    store = jax._src.distributed.global_state.client
    if store is not None:
        store.wait_at_barrier(f"jaxtrain/{where}/{next(_meetings)}", int(1000 * seconds))


def connect(seconds: float) -> None:
    """Connect the devices of all processes, once all processes are here.

    The first communication through Gloo waits only 30 seconds for the other processes; later ones wait longer. (A
    restore begins with such communication, after whatever each process has read or compiled.)
    """
    if processes() > 1:
        meet("connect", seconds)
        multihost_utils.sync_global_devices("jaxtrain")


def met(items: Iterable[Item], where: str, seconds: float) -> Iterator[Item]:
    """Yield the items, the first one when all processes have theirs."""
    for number, item in enumerate(items):
        if not number:
            meet(where, seconds)
        yield item


# ------------------------------------------------------------------------------------------------------------- the end
def on_hang(give_up: Callable[[str], bool] | None) -> None:
    """Set what to do when another process finds that the run hangs."""
    if _peers:
        _peers.on_hang = give_up


def record_in(workdir: str | Path) -> None:
    """Set the workdir in which events about lost processes are recorded."""
    if _peers:
        _peers.workdir = Path(workdir)


def hang(why: str) -> None:
    """Tell the other processes that this one saw no progress."""
    if _peers:
        _peers.hang(why)


def wait_for_others(seconds: float) -> None:
    """Wait, in process 0, for the others to end."""
    if _peers:
        _peers.wait_for_others(seconds)


def leave(status: int) -> int:
    """End the run in all processes, as agreed, and return `status`; at exit JAX makes them wait for each other.

    Each process that was initialized has to call it, or one that ends later would take it for lost: commands do so in
    flags.py.
    """
    if _peers:
        _peers.close()
    return status


def fail(status: int, error: BaseException) -> int:
    """End this process after an error that the others do not know of; returns `status` in a single-process run.

    With several processes it does not return: a regular exit would hang in JAX's barrier, and the others in a
    collective.
    """
    if processes() == 1:
        return status
    if broken(error):
        if _peers:
            _peers.wait_for_news(5)
        print(f"process {process()} lost the connection to another process ({_first_line(error)}): it ends, to be "
              "started again", file=sys.stderr)
        status = exit_codes.RESTART
    elif status not in exit_codes.FINAL and not isinstance(error, exit_codes.RunExit):
        say("".join(traceback.format_exception(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    if _peers:
        _peers.fail(status, _first_line(error))
        _peers.wait_for_others()
    os._exit(status)


_STATUSES = ("unknown: ", "internal: ", "unavailable: ", "aborted: ", "deadline_exceeded: ")


def broken(error: BaseException | None) -> bool:
    """Return whether an error is a consequence of another process's end."""
    while error is not None:
        text = f"{error}".lower()
        # A step that runs synchronously, as on CPU, may raise XLA's errors as plain ValueErrors.
        of_xla = isinstance(error, ValueError) and text.startswith(_STATUSES)
        known = of_xla or isinstance(error, (jax.errors.JaxRuntimeError, ConnectionError, TimeoutError))
        if known and any(word in text for word in _BROKEN):
            return True
        error = error.__cause__ or error.__context__
    return False


def _first_line(error: BaseException) -> str:
    return redacted(f"{type(error).__name__}: {error}".splitlines()[0])[:300]


# ----------------------------------------------------------------------------------------------------------- the start
def _join(place: Place | None) -> None:
    """Connect to the others; None: JAX finds out where they are."""
    global _peers
    start_timeout, peer_timeout = _seconds("JAXTRAIN_JOIN_TIMEOUT", 300), _seconds("JAXTRAIN_PEER_TIMEOUT", 60)
    # Without "deactivate" JAX looks at the launcher too, and takes one GPU where Slurm starts one process a host.
    where: dict[str, Any] = {}
    if place and place.coordinator:
        from jaxtrain.distributed.peers import interface

        where = {"coordinator_address": place.coordinator, "num_processes": place.processes, "process_id": place.rank,
                 "cluster_detection_method": "deactivate",
                 "coordinator_bind_address": place.coordinator if interface(place.coordinator) else None}
        if "JAX_LOCAL_DEVICE_IDS" not in os.environ:
            where["local_device_ids"] = launch_environment.local_devices(os.environ, launch_environment.gpus_here())
        if place.rank == 0:
            _wait_for_port(place.coordinator, min(start_timeout, 60))
    with _at_most(start_timeout, place):
        # JAX aborts at its own timeout, so it gets a later one. It retries by itself until the coordinator listens.
        jax.distributed.initialize(**where, initialization_timeout=start_timeout + 60,
                                   heartbeat_timeout_seconds=2 * peer_timeout)
        state = jax._src.distributed.global_state
        if processes() == 1:
            return
        from jaxtrain.distributed.peers import Peers

        host = (state.coordinator_address or "").rpartition(":")[0].strip("[]")
        try:
            _peers = Peers(process(), processes(), host, state.client, peer_timeout)
        except (OSError, IndexError, jax.errors.JaxRuntimeError) as error:
            print(f"warning: the processes cannot watch each other ({_first_line(error)}); a lost one is "
                  f"detected after {2 * peer_timeout} seconds by JAX's heartbeat", file=sys.stderr)


@contextlib.contextmanager
def _at_most(seconds: int, place: Place | None) -> Iterator[None]:
    """End the process if this takes longer: it waits in native code, which would abort with an unhelpful message."""
    def end() -> None:
        if place is None:
            reason = "not all processes of the TPU came"
        elif place.rank == 0:
            reason = f"not all of the {place.processes} processes came to {place.coordinator}"
        elif not _listens(place.coordinator or ""):
            reason = f"process {place.rank} cannot reach process 0 at {place.coordinator}"
        else:
            reason = f"process {place.rank} is at {place.coordinator}, but not all of the {place.processes} came"
        os.write(2, f"--coordinator: {reason} within {seconds} seconds; check that all of them started, and that there "
                    f"are as many ({place.source if place else 'JAX'} said so)\n".encode())
        os._exit(exit_codes.RESTART)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def _wait_for_port(coordinator: str, seconds: float) -> None:
    """Wait until no other process, such as a previous one, listens on the port (gRPC would share it, or crash)."""
    if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:
        return
    port, end = int(coordinator.rpartition(":")[2]), time.monotonic() + seconds
    while True:
        try:
            socket.create_server(("", port)).close()  # a closed connection's leftovers (TIME_WAIT) do not count
            return
        except OSError as error:
            if time.monotonic() > end:
                raise UserError("--coordinator", f"port {port} of this host cannot be used "
                                f"({os.strerror(error.errno or 0)})",
                                "stop the program that listens there, or choose another port in all "
                                "processes") from None
        time.sleep(0.5)


def _seconds(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal() or int(text) < 6:
        raise UserError(variable, f"{text!r} is not a number of seconds from 6 on", f"leave it out for {default}")
    return int(text)
