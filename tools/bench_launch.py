"""How long jobs take to begin, to pause and to go on, in a real Slurm of four nodes on this machine.

    python tools/bench_launch.py

A run of two processes trains configs/gpt.py:tiny. Seconds are from a command to the event that follows. This Slurm
looks for jobs every second, starts a job again after five at the least, and finds a node lost after ten.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxtrain.launch import __main__ as launch
from jaxtrain.launch import job_record
from jaxtrain.launch import jobs as jobs_command
from jaxtrain.launch.job_engines import engine_of
from jaxtrain.launch.supervisor.progress_file import Steps
from tests.launch.slurm.cluster import Cluster

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Measure, and print one line of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with Cluster(place / "slurm") as cluster:
            os.environ |= {"SLURM_CONF": cluster.environment["SLURM_CONF"], "PATH": cluster.environment["PATH"]}
            (place / "job.toml").write_text(f'setup = ["export PATH={Path(sys.executable).parent}:/usr/bin:/bin '
                                            f'PYTHONPATH={ROOT} JAX_PLATFORMS=cpu"]\n')
            print(json.dumps(measured(cluster, place)))


def measured(cluster: Cluster, place: Path) -> dict[str, float]:
    """Return seconds by what they were spent on."""
    low, high = place / "low", place / "high"
    found = {}

    def submit(workdir: Path, queue: str, nodes: int) -> None:
        launch.main([f"{ROOT}/configs/gpt.py:tiny", "--on=slurm", f"--workdir={workdir}", f"--queue={queue}",
                     f"--job={place}/job.toml", f"--nodes={nodes}", "--cpus_per_process=2", "--config.mesh.data=-1",
                     "--config.train.steps=1000000", "--config.train.log_every=1", "--config.checkpoint.every=1000"])

    def seconds(what: str, act, event) -> None:
        began = time.monotonic()
        act()
        while not event():
            time.sleep(0.05)
        found[what] = round(time.monotonic() - began, 1)

    def state(workdir: Path) -> str:
        return engine_of("slurm").status(job_record.newest(workdir)).state

    def stepped(workdir: Path):
        """Return whether the run has made a step since now."""
        steps = Steps(workdir / "metrics.jsonl")
        before = steps.newest

        def again() -> bool:
            steps.look()
            return steps.newest > before
        return again

    seconds("submitted, to the first step", lambda: submit(low, "low", 2), stepped(low))
    seconds("told to pause, to saved and held", lambda: jobs_command.main(["pause", str(low)]),
            lambda: state(low) == "paused")
    seconds("resumed, to the next step", lambda: jobs_command.main(["resume", str(low)]), stepped(low))
    seconds("a job of a higher priority submitted, to its first step", lambda: submit(high, "high", 4), stepped(high))
    seconds("that job cancelled, to the next step of the preempted one",
            lambda: jobs_command.main(["cancel", str(high)]), stepped(low))
    nodes = engine_of("slurm").status(job_record.newest(low)).nodes
    first = nodes.strip("n[]")[0]
    seconds("a node killed, to found lost", lambda: cluster.kill(f"n{first}"), lambda: state(low) != "running")
    seconds("from there to the next step on others", lambda: None, stepped(low))
    return found


if __name__ == "__main__":
    main()
