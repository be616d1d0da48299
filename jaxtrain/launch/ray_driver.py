"""Start the processes of a job on a Ray cluster, all or none, and again when a machine was lost: what a Ray job runs.

    python -m jaxtrain.launch.ray_driver FOLDER

Each machine has one bundle of a placement group, and in it an actor for each process, which runs the job's script. Exit
statuses mean what they mean in Slurm (slurm_script.py): 75 and 76 start the job again, unless it is to pause or to end;
a crash does so `retries` times; 0, 2, 77 and 130 end it. A lost machine counts as no crash. Of several processes the
one that failed first counts (restarts/first_failure.py).
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtrain.base.annotations import JsonObject
from jaxtrain.distributed import exit_codes
from jaxtrain.files import bounded_files
from jaxtrain.launch.job_record import RESTARTS
from jaxtrain.launch.restarts import first_failure, idle_starts

PLAN, STATE, ENDED = "plan.json", "state.json", "ended.json"
_LOST = -1000  # in place of an exit status
_ANSWER_S, _POLL_S = 60, 0.5
_ALONE_S = 30  # for those whose peer crashed or was lost, which they notice within seconds


class Process:
    """An actor that runs one process. It is sent to the machines as it is, so it may use the standard library only."""

    def __init__(self):
        self.process: Any = None

    def where(self) -> tuple[str, str, int]:
        """Return the node, its address, and a port that is free."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.get_runtime_context().get_node_id(), address, probe.getsockname()[1]

    def start(self, script: str, output: str, variables: dict[str, str]) -> None:
        """Start the script; it ends with this actor."""
        with open(output, "ab") as log:
            self.process = subprocess.Popen(
                ["bash", script], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **variables},
                start_new_session=True, preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))

    def poll(self) -> int | None:
        """Return its exit status; None: it runs."""
        return self.process.poll()

    def send(self, number: int) -> None:
        """Send a signal: SIGKILL to all that it has started, others to itself."""
        if self.process.poll() is None:
            (os.killpg if number == signal.SIGKILL else os.kill)(self.process.pid, number)


@dataclass
class Driver:
    """The driver of a Ray job: starts the gang and watches it."""

    folder: Path
    ray: Any
    plan: dict[str, Any] = field(default_factory=dict)
    terminated: bool = False  # Ray has sent SIGTERM, and will kill this process within seconds
    process: int | None = None  # that failed first in the newest attempt
    clock: Callable[[], float] = time.monotonic

    def run(self) -> int:
        """Start the gang as often as it takes; return the status of the job."""
        crashes = brief = 0
        while True:
            began = self.clock()
            status = self.attempt()
            if self.stop() or self.terminated or status in exit_codes.FINAL:
                return status
            brief = brief + 1 if self.clock() - began < idle_starts.BRIEF_S and not self.plan["counted"] else 0
            if status not in (exit_codes.SAVED, exit_codes.RESTART, _LOST):
                crashes += 1
                if crashes > self.plan["retries"]:
                    return status
            elif brief > idle_starts.MOST:
                print(f"{brief - 1} restarts in a row of less than {idle_starts.BRIEF_S} seconds each: the job ends",
                      flush=True)
                return exit_codes.STOPPED
            self.record(status)
            ending = "has lost a machine" if status == _LOST else exit_codes.words(status)
            print(f"the job {ending}: it starts again", flush=True)

    def record(self, status: int) -> None:
        """Append to the job's list of restarts, which `jaxtrain jobs` shows."""
        line = {"time": time.time(), "status": None if status == _LOST else status, "process": self.process}
        with contextlib.suppress(OSError), bounded_files.appended(self.folder / RESTARTS) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def attempt(self) -> int:
        """Start the gang once everything that it needs is free; return how it ended."""
        self.process = None
        groups = importlib.import_module("ray.util.placement_group")
        group = groups.placement_group([self.plan["node"]] * self.plan["nodes"], strategy="STRICT_SPREAD")
        try:
            while not group.wait(1):
                self.say("waiting", self.lacking())
                if self.stop() or self.terminated:
                    return exit_codes.SAVED
            return self.watch(self.started(group))
        except self.ray.exceptions.RayTaskError as error:  # a script or the output cannot be opened there
            print(error, flush=True)
            return 1
        except self.ray.exceptions.RayError as error:  # a machine was lost before the processes ran
            print(" ".join(f"{error}".split())[:300], flush=True)
            return _LOST
        finally:
            groups.remove_placement_group(group)  # which ends the actors too

    def started(self, group: Any) -> dict[str, Any]:
        """Start all processes; return their actors, each with the node that it is on."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        own, each = self.plan["node"], self.plan["processes"]
        needs: dict[str, Any] = {"num_cpus": own["CPU"] / each, "num_gpus": own.get("GPU", 0) / each, "max_restarts": 0}
        if "TPU" in own:
            needs["resources"] = {"TPU": own["TPU"] / each}
        actors = [self.ray.remote(Process).options(**needs, scheduling_strategy=(
            strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node))).remote()
            for node in range(self.plan["nodes"]) for _ in range(each)]
        places = self.ray.get([actor.where.remote() for actor in actors], timeout=_ANSWER_S)
        _, address, port = places[0]
        host = f"[{address}]" if ":" in address else address
        began = []
        for rank, actor in enumerate(actors):
            variables = {"JAX_COORDINATOR_ADDRESS": f"{host}:{port}", "JAX_NUM_PROCESSES": f"{len(actors)}",
                         "JAX_PROCESS_ID": f"{rank}", idle_starts.VARIABLE: f"{self.folder / idle_starts.FILE}"}
            began.append(actor.start.remote(f"{self.folder / 'job.sh'}", f"{self.folder / 'output.log'}", variables))
        self.ray.get(began, timeout=_ANSWER_S)
        self.say("running", "", ",".join(dict.fromkeys(address for _, address, _ in places)))
        return {f"{rank} {places[rank][0]}": actor for rank, actor in enumerate(actors)}

    def watch(self, actors: dict[str, Any]) -> int:
        """Return how the gang ended, once all of it did."""
        ended: dict[str, int] = {}
        cut_off: set[str] = set()
        told, deadline = False, float("inf")
        while len(ended) < len(actors):
            time.sleep(_POLL_S)
            if (self.stop() or self.terminated or self.requeued()) and not told:
                told, deadline = True, time.monotonic() + self.plan["grace_s"]
                self.send(actors, signal.SIGTERM)
            asked = {name: actor.poll.remote() for name, actor in actors.items() if name not in ended}
            for name, answer in asked.items():
                status = self.answered(name, answer)
                if status is not None:
                    ended[name] = 128 - status if -65 < status < 0 else status
            if any(status not in (exit_codes.DONE, exit_codes.SAVED) for status in ended.values()):
                deadline = min(deadline, time.monotonic() + min(_ALONE_S, self.plan["grace_s"]))
            if time.monotonic() > deadline:
                cut_off |= actors.keys() - ended.keys()
                self.send({name: actors[name] for name in cut_off if name not in ended}, signal.SIGKILL)
        if failed := {name: status for name, status in ended.items() if name not in cut_off and status}:
            ended = failed
        self.process, status = of_all([(int(name.partition(" ")[0]), status) for name, status in ended.items()])
        return status

    def answered(self, name: str, answer: Any) -> int | None:
        """Return the exit status that an actor has answered; None: its process runs."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(answer, timeout=_ANSWER_S)
        except errors.ActorUnavailableError:  # for a moment, perhaps
            return None
        except (errors.RayActorError, errors.GetTimeoutError):
            node = name.partition(" ")[2]
            alive = any(one["NodeID"] == node and one["Alive"] for one in self.ray.nodes())
            print(f"process {name.partition(' ')[0]} was lost with its {'worker' if alive else 'machine'}", flush=True)
            return 137 if alive else _LOST  # Ray kills workers when memory runs out

    def send(self, actors: dict[str, Any], number: int) -> None:
        """Send a signal to the processes of actors."""
        for actor in actors.values():
            actor.send.remote(int(number))

    def stop(self) -> str:
        """Return whether the job is to "pause" or "cancel"; "": neither."""
        said = self.said()
        return said if said in ("pause", "cancel") else ""

    def requeued(self) -> bool:
        """Return whether the job is to save and start again, once."""
        if self.said() != "requeue":
            return False
        (self.folder / "stop").unlink(missing_ok=True)
        return True

    def said(self) -> str:
        """Return what the file says that people write by `jaxtrain jobs`."""
        try:
            return (self.folder / "stop").read_text()
        except OSError:
            return ""

    def say(self, state: str, detail: str, nodes: str = "") -> None:
        """Write what `jaxtrain jobs` shows."""
        _write(self.folder / STATE, {"state": state, "detail": detail, "nodes": nodes})

    def lacking(self) -> str:
        """Return why the placement group is not there yet."""
        own = self.plan["node"]
        fitting = [node for node in self.ray.nodes() if node["Alive"] and all(
            node["Resources"].get(name, 0) >= count for name, count in own.items())]
        wanted = ", ".join(f"{count:g} {name}" for name, count in own.items())
        if len(fitting) < self.plan["nodes"]:
            return f"{self.plan['nodes']} machines with {wanted} are needed, and the cluster has {len(fitting)}"
        return f"it waits until {self.plan['nodes']} machines have {wanted} free"


def of_all(statuses: list[tuple[int, int]]) -> tuple[int | None, int]:
    """Return which process decides with which status what happens to the job, from all in the order of their ends."""
    lost = next((process for process, status in statuses if status == _LOST), None)
    first = first_failure.of_job([one for one in statuses if one[1] != _LOST])
    if lost is not None and (first is None or first[1] not in exit_codes.FINAL):  # the others ended because of that
        return lost, _LOST
    return first or (None, exit_codes.DONE)


def _write(path: Path, content: JsonObject) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content))
    partial.replace(path)


def main(folder: Path) -> int:
    """Run the job of a folder to its end, and write how it ended."""
    ray = importlib.import_module("ray")
    ray.init(log_to_driver=False, logging_level="error")
    driver = Driver(folder, ray, json.loads((folder / PLAN).read_text()))

    def terminated(*_: Any) -> None:
        driver.terminated = True

    signal.signal(signal.SIGTERM, terminated)
    status = driver.run()
    _write(folder / ENDED, {"status": status})
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
