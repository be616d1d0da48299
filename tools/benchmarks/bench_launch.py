"""Measure how long jobs take to begin, to pause and to go on: on this machine, in a real Slurm or on a real Ray on it.

    python tools/benchmarks/bench_launch.py --on=slurm

A run of two processes trains configs/gpt.py:tiny. Seconds are from a command to the event that follows. This Slurm
looks for jobs every second, starts a job again after five at the least, and finds a node lost after ten. Ray has two
nodes, of which one is killed, and then a third one.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxtrain.commands import jobs as jobs_command
from jaxtrain.commands import launch
from jaxtrain.launch import job_record
from jaxtrain.launch.job_engines import engine_of
from jaxtrain.launch.supervisor.progress_file import Steps
from tests.launch.process_trees import descendants
from tests.launch.ray.raylets import Raylets
from tests.launch.slurm.cluster import Cluster
from tests.tiny import virtual_devices

ROOT = Path(__file__).parents[2]
VARIABLES = {"PYTHONPATH": f"{ROOT}", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": virtual_devices(1)}
Step = tuple[str, Callable[[], Any], Callable[[], Callable[[], bool]]]  # what, what is done, and what comes of it


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=("local", "slurm", "ray"), default="slurm", help="the engine; default: slurm")
    on = parser.parse_args().on
    os.environ |= VARIABLES
    with tempfile.TemporaryDirectory(prefix="jobs") as folder:  # short, for Ray's sockets
        found = {}
        for what, act, then in {"local": here, "slurm": in_slurm, "ray": on_ray}[on](Path(folder)):
            came, began = then(), time.monotonic()
            act()
            while not came():
                time.sleep(0.05)
            found[what] = round(time.monotonic() - began, 1)
    print(json.dumps(found))


def here(place: Path) -> Iterator[Step]:
    """Yield what is done on this machine."""
    work = place / "work"
    yield from begun("local", work, "--processes_per_node=2")
    yield "a process killed, to the next step", lambda: os.kill(process_of(work), signal.SIGKILL), stepped(work)
    jobs_command.main(["cancel", f"{work}"])
    while state(work) == "running":
        time.sleep(0.05)


def in_slurm(place: Path) -> Iterator[Step]:
    """Yield what is done in Slurm."""
    low, high = place / "low", place / "high"
    with Cluster(place / "slurm") as cluster:
        os.environ |= {"SLURM_CONF": cluster.environment["SLURM_CONF"], "PATH": cluster.environment["PATH"]}
        shell = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu"}
        (place / "job.toml").write_text(
            f'setup = ["export {" ".join(f"{name}={value}" for name, value in shell.items())}"]\n')
        own = (f"--job={place}/job.toml", "--cpus_per_process=2")
        yield from begun("slurm", low, "--queue=low", "--nodes=2", *own)
        yield ("a job of a higher priority submitted, to its first step",
               lambda: submit("slurm", high, "--queue=high", "--nodes=4", *own), stepped(high))
        yield ("that job cancelled, to the next step of the preempted one",
               lambda: jobs_command.main(["cancel", f"{high}"]), stepped(low))
        first = engine_of("slurm").status(job_record.newest(low)).nodes.strip("n[]")[0]
        yield "a node killed, to found lost", lambda: cluster.kill(f"n{first}"), lambda: lambda: state(low) != "running"
        yield "from there to the next step on others", lambda: None, stepped(low)


def on_ray(place: Path) -> Iterator[Step]:
    """Yield what is done on Ray."""
    work = place / "work"
    with Raylets(place, **VARIABLES) as cluster:
        os.environ |= {"RAY_ADDRESS": cluster.dashboard, "RAY_AUTH_MODE": "disabled"}
        yield from begun("ray", work, "--nodes=2")
        yield "a node killed, to found lost", lambda: cluster.kill("second"), lambda: lambda: state(work) == "waiting"
        yield "another node started, to the next step", lambda: cluster.add("third"), stepped(work)
        jobs_command.main(["cancel", f"{work}", "--now"])


def begun(on: str, work: Path, *flags: str) -> Iterator[Step]:
    """Yield what every engine does."""
    yield "submitted, to the first step", lambda: submit(on, work, *flags), stepped(work)
    yield ("told to pause, to saved and held", lambda: jobs_command.main(["pause", f"{work}"]),
           lambda: lambda: state(work) == "paused")
    yield "resumed, to the next step", lambda: jobs_command.main(["resume", f"{work}"]), stepped(work)


def submit(on: str, work: Path, *flags: str) -> None:
    """Submit a run that does not end by itself."""
    launch.main([f"{ROOT}/configs/gpt.py:tiny", f"--on={on}", f"--workdir={work}", *flags, "--config.mesh.data=-1",
                 "--config.train.steps=1000000", "--config.train.log_every=1", "--config.checkpoint.every=1000"])


def state(work: Path) -> str:
    """Return the state of a job, as its engine says."""
    return engine_of(job_record.newest(work).engine).status(job_record.newest(work)).state


def stepped(work: Path) -> Callable[[], Callable[[], bool]]:
    """Return what tells whether the run has made a step since it was asked first."""
    def since() -> Callable[[], bool]:
        steps = Steps(work / "metrics.jsonl")
        before = steps.newest

        def again() -> bool:
            steps.look()
            return steps.newest > before
        return again
    return since


def process_of(work: Path) -> int:
    """Return a process that trains here."""
    supervisor = int(job_record.newest(work).id.partition(":")[0])
    return next(pid for pid in descendants(supervisor)
                if b"--process_id=1" in Path(f"/proc/{pid}/cmdline").read_bytes())


if __name__ == "__main__":
    main()
