"""A bound on how often an engine starts a job again that makes no progress.

A run that saves and stops (75), or gives up to be started again (76), may be started any number of times, as long as it
completes new steps. Process 0 counts the starts in a row without one, in a file in the job's folder that the engine
names in JAXTRAIN_STARTS_FILE, and ends with 77 when there are too many: no engine starts it again after that. So the
bound is the same on all engines.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from jaxtrain.base.annotations import JsonObject
from jaxtrain.distributed import exit_codes
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import read_json
from jaxtrain.launch.job_record import Job
from jaxtrain.launch.supervisor.progress_file import Steps

VARIABLE, FILE = "JAXTRAIN_STARTS_FILE", "starts.json"
MOST = 10  # starts in a row without a new step
BRIEF_S = 600  # an attempt of a command of one's own, whose steps nobody knows, counts as one without a step below this
_FORM = {"starts": int, "idle": int, "step": int}


def variables(job: Job) -> dict[str, str]:
    """Return the environment variables by which the processes of a job know where to count its starts."""
    return {VARIABLE: f"{job.folder / FILE}"}


def counted(job: Job) -> bool:
    """Return whether a job's command counts its own starts, as a run of a config does."""
    return "jaxtrain.main" in job.command


def check(workdir: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Count this start, in process 0 of a job.

    Raises:
        RunExit: so many starts before it completed no new step that another one would not either.
    """
    path = Path(environ.get(VARIABLE, ""))
    if not path.name or environ.get("JAX_PROCESS_ID", "0") != "0":
        return
    before, step = read(path), _reached(workdir)
    idle = before["idle"] + 1 if before["starts"] and step <= before["step"] else 0
    stop = idle >= MOST
    with contextlib.suppress(OSError):  # a full disk is not a reason not to start
        atomic_files.write_json(path, {"starts": before["starts"] + 1, "idle": 0 if stop else idle,
                                       "step": max(step, before["step"])})
    if stop:
        raise exit_codes.RunExit(exit_codes.STOPPED, (
            f"{idle} starts in a row have completed no new step (the last one is step {before['step']}), so the job "
            f"ends; see why in its output (jaxtrain jobs why {workdir}), and launch it again"))


def read(path: Path) -> JsonObject:
    """Return what is counted in a file: all starts, those in a row without a new step, and the last step."""
    try:
        return read_json(path, _FORM)
    except (OSError, ValueError):
        return {"starts": 0, "idle": 0, "step": 0}


def _reached(workdir: Path) -> int:
    """Return the last step of a run that its metrics or its checkpoints tell of."""
    steps = [Steps(workdir / "metrics.jsonl").newest]
    with contextlib.suppress(OSError):
        steps += [int(entry.name) for entry in (workdir / "checkpoints").iterdir() if entry.name.isdecimal()]
    return max(steps)
