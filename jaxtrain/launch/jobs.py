"""List, pause, resume and cancel jobs on any engine.

    jaxtrain jobs list runs
    jaxtrain jobs show runs/big
    jaxtrain jobs logs runs/big --follow
    jaxtrain jobs pause runs/big

A job is identified by its workdir. `pause` saves a checkpoint first; `resume` continues from it, on as many
nodes as are then free.
"""

import time
from dataclasses import replace
from pathlib import Path

from jaxtrain.errors import UserError, say, tell
from jaxtrain.commands.flags import add_subcommand, command, parser_of
from jaxtrain.launch import cost, mesh_check
from jaxtrain.launch import job_record as records
from jaxtrain.launch.job_engines import engine_of
from jaxtrain.launch.restarts import restart_history
from jaxtrain.launch.supervisor.progress_file import Steps
from jaxtrain.launch.sweep import trials
from jaxtrain.pages.plain_text import aligned

_LINES = {
    "list [ROOT]": "list the jobs of all workdirs in a folder",
    "show WORKDIR": "show a job's state, command, restarts, last error and cost",
    "logs WORKDIR": "print the output of a job's processes",
    "why WORKDIR": "show why a job is waiting or has failed",
    "pause WORKDIR": "save a checkpoint and stop, until the job is resumed",
    "resume WORKDIR": "resume a paused job",
    "cancel WORKDIR": "save a checkpoint and cancel the job",
    "requeue WORKDIR": "save a checkpoint, stop, and queue the job again",
}


@command()
def main(argv: list[str] | None = None) -> None:
    """Parse the flags and do it."""
    parser = parser_of("jobs", __doc__)
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND")
    made = {words.partition(" ")[0]: add_subcommand(commands, "jobs", words, line) for words, line in _LINES.items()}
    for name, sub in made.items():
        if name == "list":
            sub.add_argument("workdir", nargs="?", default="runs", metavar="ROOT", help="default: runs")
        else:
            sub.add_argument("workdir", metavar="WORKDIR", help="workdir of the run")
    made["logs"].add_argument("--follow", "-f", action="store_true", help="keep printing until the job ends")
    made["resume"].add_argument("--nodes", type=int, help="number of machines; default: as before")
    made["cancel"].add_argument("--now", action="store_true", help="cancel without saving a checkpoint")
    flags = parser.parse_args(argv)
    if flags.what == "list":
        tell("\n".join(table(Path(flags.workdir))))
        return
    job = records.newest(Path(flags.workdir).absolute())
    engine = engine_of(job.engine)
    if flags.what == "show":
        tell(shown(job))
    elif flags.what == "why":
        tell(engine.why(job))
        failed = engine.status(job).state == "failed"
        said = [line for line in "".join(output(job, False)).split("\n") if line.strip()][-3:] if failed else []
        for name, fact in history(job, "failed" if failed else "").items():
            if fact not in said:
                tell(f"{name}: {fact}")
        if failed:
            tell("the end of what it printed (jaxtrain jobs logs):", *said, sep="\n  ")
    elif flags.what == "logs":
        for text in output(job, flags.follow):
            tell(text, end="", flush=True)
    elif flags.what == "resume":
        if flags.nodes is not None:
            if flags.nodes < 1:
                raise UserError("--nodes", f"{flags.nodes} is not a number of machines", "give 1 or more")
            mesh_check.check_resumed(job, flags.nodes)
        records.record(replace(job, id=engine.resume(job, flags.nodes)))
    elif flags.what == "cancel":
        engine.cancel(job, flags.now)
    else:
        getattr(engine, flags.what)(job)
    if flags.what in ("pause", "resume", "cancel", "requeue"):
        say(f"{flags.what}: told {job.engine}; see its state: jaxtrain jobs show {flags.workdir}")


def status_of(job: records.Job) -> records.Status:
    """Return what became of a job, as its engine says; one that its sweep has told to end is stopped."""
    status = engine_of(job.engine).status(job)
    if status.state == "cancelled" and trials.stopped(job.workdir):
        return replace(status, state="stopped", detail="by its sweep")
    return status


def table(root: Path) -> list[str]:
    """Return a line for each job under a folder, below a head."""
    if not root.is_dir():
        raise UserError("ROOT", f"there is no folder {root}", "give the one that workdirs are in")
    silent: set[str] = set()  # engines that cannot be asked from here
    rows: list[tuple[str, ...]] = [("WORKDIR", "ENGINE", "ID", "STATE", "STEP", "NODES")]
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
        rows.append((f"{workdir}", job.engine, job.id.partition(":")[0], status.state, f"{step or ''}", status.nodes))
    return aligned(rows)


def shown(job: records.Job) -> str:
    """Return what is known of a job, one line for each fact."""
    status = status_of(job)
    step = Steps(job.workdir / "metrics.jsonl").newest or None
    facts = {"state": status.state + (f" ({status.detail})" if status.detail else ""), "engine": job.engine,
             "id": job.id.partition(":")[0], "name": job.name, "nodes": status.nodes, "step": step,
             **history(job, status.state),
             "submitted": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.submitted)),
             "command": records.quoted(job.command), "commit": job.about.get("commit"),
             "cost": cost.so_far(job), "to go": cost.to_go(job.spec, job.workdir), "files": job.folder}
    return "\n".join(f"{name:<10} {value}" for name, value in facts.items() if value not in (None, ""))


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


if __name__ == "__main__":
    raise SystemExit(main())
