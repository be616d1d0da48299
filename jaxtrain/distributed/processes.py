"""Start and end several processes as one run, set up by flags, by the environment or by the detected cluster.

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
from pathlib import Path
from typing import TypeVar

import jax
from jax.experimental import multihost_utils

from jaxtrain.config.schema import Config
from jaxtrain.distributed import exit_codes
from jaxtrain.distributed.authentication import opened, sealed
from jaxtrain.distributed.peers import Peers, interface
from jaxtrain.errors import UserError, say
from jaxtrain.observe.versions import version_of
from jaxtrain.redaction import redacted

Item = TypeVar("Item")
_CLUSTERS = ("SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri", "PMIX_NAMESPACE")
_OWN = {("data", "cache_dir"), ("data", "source"), ("train", "progress")}  # settings that may differ between hosts
# How communication libraries report that the other end of a connection is gone.
_BROKEN = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "socket closed", "broken pipe",
           "coordination service", "heartbeat", "unavailable:", "timed out waiting", "deadline_exceeded", "barrier")
_peers: Peers | None = None
_meetings = itertools.count()  # all processes call `meet` equally often, and each barrier is used once


def initialize(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Connect to the other processes, if there are any; call it before anything touches a device.

    Flags override JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. With none of them, under a launcher
    that JAX supports (Slurm, Open MPI), JAX reads them from it; otherwise the run is this process alone.

    JAXTRAIN_JOIN_TIMEOUT (300) is how many seconds to wait for the others before this process exits, to be restarted;
    JAXTRAIN_PEER_TIMEOUT (60) is how many seconds without a sign of life mean that another process is dead. They are
    not config keys, because a config may ask for devices, which exist only after this call.
    """
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    num_processes = _number("num_processes", num_processes, "JAX_NUM_PROCESSES")
    process_id = _number("process_id", process_id, "JAX_PROCESS_ID")
    if coordinator is None and num_processes is None and process_id is None:
        if any(name in os.environ for name in _CLUSTERS) and int(os.environ.get("SLURM_NTASKS", "2")) > 1:
            _join(None)
        return
    if coordinator is None or num_processes is None or process_id is None:
        raise UserError("--coordinator", "several processes need --coordinator, --num_processes and --process_id",
                        "give all three (or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID)")
    if not 0 <= process_id < num_processes:
        raise UserError("--process_id", f"{process_id} is not below --num_processes={num_processes}",
                        "number them from 0")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError("--coordinator", f"{coordinator!r} is not host:port", "write it like node1:1234")
    if num_processes > 1:
        _join((coordinator, num_processes, process_id))


def process() -> int:
    """Return the rank of this process, without initializing a backend."""
    return jax._src.distributed.global_state.process_id or 0


def processes() -> int:
    """Return the number of processes, without initializing a backend."""
    return jax._src.distributed.global_state.num_processes or 1


def agree(config: Config) -> None:
    """Raise a `UserError` in all processes if the config or versions of one differ from those of the first."""
    store = jax._src.distributed.global_state.client
    if store is None:
        return
    ours = {f"{section}.{key}": value for section, keys in config.to_dict().items() for key, value in keys.items()
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


def see_off(seconds: float) -> None:
    """In process 0, wait for the others to end."""
    if _peers:
        _peers.see_off(seconds)


def leave(status: int) -> int:
    """End the run in all processes, as agreed, and return `status`; at exit JAX makes them wait for each other."""
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
    elif status not in exit_codes.FINAL:
        say("".join(traceback.format_exception(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    if _peers:
        _peers.fail(status, _first_line(error))
        _peers.see_off()
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
def _join(where: tuple[str, int, int] | None) -> None:
    global _peers
    start_timeout, peer_timeout = _seconds("JAXTRAIN_JOIN_TIMEOUT", 300), _seconds("JAXTRAIN_PEER_TIMEOUT", 60)
    if where and where[2] == 0:
        _wait_for_port(where[0], min(start_timeout, 60))
    with _at_most(start_timeout, where):
        # JAX aborts at its own timeout, so it gets a later one. It retries by itself until the coordinator listens.
        coordinator, count, me = where or (None, None, None)
        jax.distributed.initialize(coordinator, count, me, initialization_timeout=start_timeout + 60,
                                   heartbeat_timeout_seconds=2 * peer_timeout,
                                   coordinator_bind_address=coordinator if interface(coordinator or "") else None)
        state = jax._src.distributed.global_state
        if processes() == 1:
            return
        host = (state.coordinator_address or "").rpartition(":")[0].strip("[]")
        try:
            _peers = Peers(process(), processes(), host, state.client, peer_timeout)
        except (OSError, IndexError, jax.errors.JaxRuntimeError) as error:
            print(f"warning: the processes cannot watch each other ({_first_line(error)}); a lost one is "
                  f"detected after {2 * peer_timeout} seconds by JAX's heartbeat", file=sys.stderr)


@contextlib.contextmanager
def _at_most(seconds: int, where: tuple[str, int, int] | None) -> Iterator[None]:
    """End the process if this takes longer: it waits in native code, which would abort with an unhelpful message."""
    def end() -> None:
        address, count, me = where or ("the coordinator", "all", "?")
        if me == 0:
            reason = f"not all of the {count} processes came to {address}"
        elif where and not _listens(address):
            reason = f"process {me} cannot reach process 0 at {address}"
        else:
            reason = f"process {me} is at {address}, but not all of the {count} processes came"
        os.write(2, f"--coordinator: {reason} within {seconds} seconds; check that all of them started\n".encode())
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
                                "end what listens there, or choose another port in all processes") from None
        time.sleep(0.5)


def _seconds(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal() or int(text) < 6:
        raise UserError(variable, f"{text!r} is not a number of seconds from 6 on", f"leave it out for {default}")
    return int(text)


def _number(flag: str, value: int | None, variable: str) -> int | None:
    text = os.environ.get(variable)
    if value is None and text is not None:
        if not text.isdecimal():
            raise UserError(variable, f"{text!r} is not a whole number", f"set it as you would --{flag}")
        return int(text)
    return value
