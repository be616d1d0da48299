"""The jobs under a folder on any engine: their state, history and output, as text."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError, say
from jaxtrain.launch import cost
from jaxtrain.launch import job_record as records
from jaxtrain.launch.job_engines import engine_of
from jaxtrain.launch.restarts import restart_history
from jaxtrain.launch.supervisor.progress_file import Steps
from jaxtrain.pages.plain_text import aligned


def status_of(job: records.Job) -> records.Status:
    """Return what became of a job, as its engine says; one that its sweep has told to end is stopped."""
    status = engine_of(job.engine).status(job)
    if status.state == "cancelled":
        from jaxtrain.launch.sweep import trials  # imports JAX, which a list of jobs does without

        if trials.stopped(job.workdir):
            return replace(status, state="stopped", detail="by its sweep")
    return status


def listed(root: Path) -> list[dict[str, Any]]:
    """Return what is known of each job under a folder."""
    if not root.is_dir():
        raise UserError("ROOT", f"there is no folder {root}", "give the one that workdirs are in")
    silent: set[str] = set()  # engines that cannot be asked from here
    rows: list[dict[str, Any]] = []
    for job in records.under(root):
        status = records.Status("unknown")
        if job.engine not in silent:
            try:
                status = status_of(job)
            except UserError as error:
                say(error)
                silent.add(job.engine)
        step = Steps(job.workdir / "metrics.jsonl").newest or None
        workdir = job.workdir.relative_to(root) if job.workdir.is_relative_to(root) else job.workdir
        rows.append({"workdir": f"{workdir}", "engine": job.engine, "id": job.id.partition(":")[0],
                     "state": status.state, "step": step, "nodes": status.nodes})
    return rows


def table(root: Path) -> list[str]:
    """Return a line for each job under a folder, below a head."""
    return aligned([("WORKDIR", "ENGINE", "ID", "STATE", "STEP", "NODES"),
                    *(tuple(f"{value or ''}" for value in row.values()) for row in listed(root))])


def shown(job: records.Job) -> str:
    """Return what is known of a job, one line for each fact."""
    return "\n".join(f"{name:<10} {value}" for name, value in facts_of(job).items())


def facts_of(job: records.Job) -> dict[str, Any]:
    """Return what is known of a job, by name."""
    status = status_of(job)
    step = Steps(job.workdir / "metrics.jsonl").newest or None
    facts = {"state": status.state + (f" ({status.detail})" if status.detail else ""), "engine": job.engine,
             "id": job.id.partition(":")[0], "name": job.name, "nodes": status.nodes, "step": step,
             **history(job, status.state),
             "submitted": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.submitted)),
             "command": records.quoted(job.command), "commit": job.about.get("commit"),
             "cost": cost.so_far(job), "to go": cost.to_go(job.spec, job.workdir), "files": job.folder}
    return {name: value for name, value in facts.items() if value not in (None, "")}


def history(job: records.Job, state: str) -> dict[str, str]:
    """Return how often a job was started again and why, and its last error, where it has failed or was started again.
    """
    found = restart_history.of(job)
    facts = {"restarts": f"{found}"} if found.count or found.idle else {"failure": found.reason} if found.reason else {}
    failed = state == "failed"
    error = restart_history.last_error(job, failed) if facts or failed else ""
    return facts | ({"last error": error} if error else {})


def output(job: records.Job, follow: bool):
    """Yield what the processes of a job have printed, and with `follow` what they print until it ends."""
    engine = engine_of(job.engine)
    if logs := getattr(engine, "logs", None):  # it keeps them itself
        yield from logs(job, follow)
        return
    place = 0
    while True:
        ended = not follow or engine.status(job).state not in ("running", "waiting")
        if job.output.is_file():
            with open(job.output, errors="replace") as file:
                file.seek(place)
                yield file.read()
                place = file.tell()
        if ended:
            return
        time.sleep(1)
