"""Run tasks as remote functions on a Ray cluster; they write to a folder that all machines share.

A task is a pure function that writes its ledger last, so Ray may run it again after a worker or a machine died.
"""

import contextlib
import importlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxtrain.data.prepare.engines import Calls
from jaxtrain.errors import UserError, install_extra

RETRIES = 3  # for a task whose worker died


@dataclass(frozen=True)
class Ray:
    """An engine that runs tasks on Ray: `prepare(..., workers=Ray())`."""

    address: str = ""  # of a cluster; "auto": that of this machine; "local": a new one; "": Ray's default
    at_once: int = 0  # tasks that are handed to Ray at a time; 0: as many as Ray takes

    def __call__(self, do: Callable[..., int], calls: Calls) -> Iterator[int]:
        """Make the calls on Ray, and yield their results in any order."""
        if not calls:
            return
        ray = self._connected()
        remote = ray.remote(num_cpus=1, max_retries=RETRIES)(_in_folder)
        waiting, running, number = deque(calls), {}, None
        try:
            while waiting or running:
                while waiting and len(running) < (self.at_once or 1000):  # Ray scans all of them each time
                    call = waiting.popleft()
                    running[remote.remote(os.getcwd(), do, call)] = call[0]
                (done,), _ = ray.wait(list(running))
                number = running.pop(done)
                yield ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, UserError) else error from None
        except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError, ray.exceptions.NodeDiedError
                ) as error:
            raise UserError("--engine", f"the worker of task {number} died {RETRIES + 1} times, most likely "
                            "because memory ran out", "run again with smaller --task_bytes") from error
        finally:
            for reference in running:
                ray.cancel(reference)

    def _connected(self) -> Any:
        try:
            ray = importlib.import_module("ray")
        except ImportError as error:
            raise UserError("--engine", "ray is not installed", install_extra("ray")) from error
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            own = {"num_cpus": self.at_once or None, "include_dashboard": False} if self.address == "local" else {}
            try:
                _reach(self.address)
                ray.init(self.address or None, log_to_driver=False, logging_level="error", **own)
            except (ImportError, OSError, RuntimeError, ValueError) as error:
                raise UserError("--ray_address", f"no cluster was found ({error})",
                                "give the host:port of its head, or 'local'") from error
        return ray


def _reach(address: str) -> None:
    """Check that the head can be reached: Ray itself would try for minutes, and then exit the process."""
    host, colon, port = address.rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _in_folder(folder: str, do: Callable[..., int], call: tuple[Any, ...]) -> int:
    """Run a call in the folder where the command was given, so that relative paths mean the same."""
    with contextlib.suppress(OSError):  # then paths are absolute, or reported as missing
        os.chdir(folder)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return do(*call)
