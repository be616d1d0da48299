"""The history of a job: how often it was started again and why, and the last error in its output."""

import re
import time
from dataclasses import dataclass

from jaxtrain.distributed import exit_codes
from jaxtrain.files.bounded_files import json_lines
from jaxtrain.launch.job_engines import engine_of
from jaxtrain.launch.job_record import RESTARTS, Job
from jaxtrain.launch.restarts import idle_starts
from jaxtrain.launch.supervisor import failure_report
from jaxtrain.observe.events import events

_LAUNCHERS = re.compile(r"(srun|slurmstepd|supervise|bash|the job|\d+ restarts in a row|process \d+ of \d+ was the "
                        r"first)\b")


@dataclass(frozen=True)
class Restarts:
    """The restarts of a job."""

    count: int
    reason: str = ""  # of the last one, with its time
    idle: int = 0  # starts in a row that completed no new step
    step: int = 0  # the last step before them

    def __str__(self) -> str:
        told = [f"{self.count}"] + [f"the last one because {self.reason}"] * bool(self.reason)
        told += [f"{self.idle} starts in a row without a new step after step {self.step}"] * bool(self.idle)
        return "; ".join(told)


def of(job: Job) -> Restarts:
    """Return the restarts of a job, from its engine where that counts them, or from what stands in its folder."""
    counted = idle_starts.read(job.folder / idle_starts.FILE)
    if count := getattr(engine_of(job.engine), "restarts", None):
        number, reason = count(job)
    elif job.engine == "local":
        found = [event for event in events(job.workdir) if event["kind"] == "restart" and _time(event) >= job.submitted]
        number, reason = len(found), _at(_time(found[-1]), f"{found[-1].get('why', '')}") if found else ""
    else:
        lines = list(json_lines(job.folder / RESTARTS, {"time": int | float, "status": int | None}))
        number, reason = len(lines), ""
        if lines:
            process, status = lines[-1].get("process"), lines[-1]["status"]
            who = "the run" if process is None else f"process {process}"
            reason = _at(lines[-1]["time"], f"{who} " + ("was lost with its machine" if status is None
                                                         else exit_codes.words(status)))
    return Restarts(max(number, counted["starts"] - 1), reason, counted["idle"], counted["step"])


def last_error(job: Job, failed: bool) -> str:
    """Return the line of a job's output that names the last error; of a job that failed without one, its last line."""
    if logs := getattr(engine_of(job.engine), "logs", None):
        lines = [line.rstrip() for line in logs(job, False)][-failure_report.LINES:]
    else:
        lines = failure_report.last_lines(job.output, failure_report.LINES)
    quoted = [line.removeprefix("  | ") for line in lines]  # as a supervisor shows the end of a process's log
    own = [line for line in quoted if line.strip() and not _LAUNCHERS.match(line)]
    return failure_report.error_in(own) or (own[-1][:400] if failed and own else "")


def _time(event: dict) -> float:
    when = event.get("time")
    return when if isinstance(when, int | float) else 0.0


def _at(when: float, why: str) -> str:
    return f"{why} at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(when))}"
