"""List, pause, resume and cancel jobs on any engine.

    jaxtrain jobs list runs
    jaxtrain jobs show runs/big
    jaxtrain jobs logs runs/big --follow
    jaxtrain jobs pause runs/big

A job is identified by its workdir. `pause` saves a checkpoint first; `resume` continues from it, on as many
nodes as are then free.
"""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.commands.flags import add_json, add_subcommand, command, parser_of, tell_json
from jaxtrain.commands.train import training_flags
from jaxtrain.errors import UserError, say, tell
from jaxtrain.launch import job_record as records
from jaxtrain.launch.job_engines import engine_of
from jaxtrain.launch.jobs import facts_of, history, listed, output, shown, table

if TYPE_CHECKING:
    from jaxtrain.config.schema import Config

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
    for name in ("list", "show"):
        add_json(made[name], "print a JSON object for each job")
    made["logs"].add_argument("--follow", "-f", action="store_true", help="keep printing until the job ends")
    made["resume"].add_argument("--nodes", type=int, help="number of machines; default: as before")
    made["cancel"].add_argument("--now", action="store_true", help="cancel without saving a checkpoint")
    flags = parser.parse_args(argv)
    if flags.what == "list":
        if flags.json:
            tell_json(*listed(Path(flags.workdir)))
        else:
            tell("\n".join(table(Path(flags.workdir))))
        return
    job = records.newest(Path(flags.workdir).absolute())
    engine = engine_of(job.engine)
    if flags.what == "show":
        tell_json(facts_of(job)) if flags.json else tell(shown(job))
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
            from jaxtrain.launch import mesh_check  # imports JAX, which the other commands do without

            if config := config_of(job):
                mesh_check.check_resumed(config, job.spec, flags.nodes)
        records.record(replace(job, id=engine.resume(job, flags.nodes)))
    elif flags.what == "cancel":
        engine.cancel(job, flags.now)
    else:
        getattr(engine, flags.what)(job)
    if flags.what in ("pause", "resume", "cancel", "requeue"):
        say(f"{flags.what}: told {job.engine}; see its state: jaxtrain jobs show {flags.workdir}")


def config_of(job: records.Job) -> "Config | None":
    """Return the config of a job; None: it has a command of its own, or the config was changed or deleted since."""
    from jaxtrain.config.load import load_config
    from jaxtrain.files.shipped_configs import is_named

    if "jaxtrain.main" not in job.command:
        return None
    flags, overrides = training_flags([*job.command[job.command.index("jaxtrain.main") + 1:]])
    with contextlib.suppress(UserError):  # which the run tells of
        own = Path(job.directory) / flags.config.partition(":")[0]
        named = is_named(flags.config) and not own.with_name(f"{own.name}.py").is_file()  # as where the job ran
        config = flags.config if named else Path(job.directory) / flags.config
        return load_config(config, overrides)
    return None
