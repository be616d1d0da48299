"""Submit a run to this machine, Slurm, Kubernetes or Ray, or write a job file.

    jaxtrain launch configs/gpt.py:tiny --on=local --workdir=runs/first
    jaxtrain launch configs/llama3_8b.py --on=slurm --workdir=runs/8b --nodes=4 --accelerators_per_node=8
    jaxtrain launch configs/gpt.py --on=slurm --workdir=runs/big --job=job.toml --dry_run
    jaxtrain launch configs/gpt.py --on=kubernetes --workdir=/mnt/runs/big --job=job.toml
    jaxtrain launch --on=slurm --workdir=runs/own --nodes=2 -- python train.py
    jaxtrain launch configs/gpt.py --on=slurm --workdir=runs/seed-{task} --array=0-3 --config.train.seed={task}

A job is one run, submitted to an engine that starts its processes on one or more machines, restarts them after a crash
or a preemption, and keeps its place in the queue. The resources that it needs are given by flags, or by keys of the
same names in a TOML file (--job). The config is checked before the job is submitted. `jaxtrain jobs` lists jobs, and
pauses, resumes and cancels them.
"""

import argparse
import re
import sys
from pathlib import Path

from jaxtrain.commands.flags import add_config, command, default_workdir, overrides_of, parser_of
from jaxtrain.config.load import load_config
from jaxtrain.errors import UserError, say, tell
from jaxtrain.launch import cost
from jaxtrain.launch.job_engines import engine_of
from jaxtrain.launch.job_spec import ENGINES, JobSpec, read_spec
from jaxtrain.launch.submission import describe, submit


@command()
def main(argv: list[str] | None = None) -> None:
    """Parse the flags and submit."""
    words = sys.argv[1:] if argv is None else argv
    words, own = (words[:words.index("--")], words[words.index("--") + 1:]) if "--" in words else (words, [])
    parser = parser_of("launch", __doc__)
    add_config(parser)
    parser.add_argument("--on", required=True, help=f"where the job runs: {', '.join(ENGINES)}")
    parser.add_argument("--workdir", help="workdir of the run, on a file system that all machines share; not needed "
                        "with --dry_run")
    parser.add_argument("--job", metavar="FILE", help="TOML file with the resources of the job (docs/launch.md)")
    parser.add_argument("--array", metavar="TASKS", help="several jobs, such as 0-3 or 1,5,7: each of these numbers "
                                                         "stands for {task}, in --workdir and in any key")
    parser.add_argument("--compiled", metavar="FOLDER", help="start with the programs that jaxtrain compile wrote")
    parser.add_argument("--dry_run", action="store_true", help="show what would be submitted, and stop")
    keys = parser.add_argument_group("resources of the job", "each is also a key of the file that --job names; lists "
                                     "and tables (setup, mounts, env, secrets, extra) are given there only")
    for name, spec in JobSpec.__dataclass_fields__.items():
        keys.add_argument(f"--{name}", metavar="VALUE", help=spec.metadata.get("help", argparse.SUPPRESS))
    flags, rest = parser.parse_known_args(words)
    given = {name: value for name in JobSpec.__dataclass_fields__ if (value := getattr(flags, name)) is not None}
    engine, spec, made, loaded = engine_of(flags.on), read_spec(flags.job, given), [], None
    flags.workdir = flags.workdir or _example_workdir(flags)
    for task in tasks_of(flags.array, flags.workdir):
        workdir, *said = (word.replace("{task}", task or "{task}") for word in (flags.workdir, *rest, *own))
        overrides, command = said[:len(rest)], said[len(rest):]
        if flags.config and not own:
            loaded = load_config(flags.config, overrides_of(overrides, vars(flags)))
        if flags.compiled:
            folder = Path(flags.compiled.replace("{task}", task or "{task}")).absolute()
            overrides = [*overrides, f"--compiled={folder}"]
        made.append(describe(flags.on, Path(workdir), flags.config, loaded, overrides, command, spec))
        engine.check(made[-1])
    if flags.dry_run:
        from jaxtrain.launch.mesh_check import memory_warning

        for name, content in engine.render(made[0]).items():
            tell(f"# {name}\n{content}")
        rehearsed = engine.rehearse(made[0]) if hasattr(engine, "rehearse") else ""
        warning = memory_warning(loaded, spec) if loaded else ""
        for line in filter(None, (rehearsed, warning, cost.at_most(spec), cost.to_go(spec, made[0].workdir))):
            say(line)
        return
    for job in map(submit, made):
        say(f"submitted as {job.id.partition(':')[0]} on {job.engine}; see it: jaxtrain jobs show {job.workdir}")


def _example_workdir(flags: argparse.Namespace) -> str:
    """Return a workdir to show a job with that was given none; refuses to submit one."""
    found = f"{default_workdir(flags.config) if flags.config else 'runs/job'}{'-{task}' if flags.array else ''}"
    if not flags.dry_run:
        raise UserError("--workdir", "it is missing",
                        f"give a folder on a file system that all machines share, such as --workdir={found}")
    say(f"shown with --workdir={found}, since none is given")
    return found


def tasks_of(array: str | None, workdir: str) -> list[str]:
    """Return the numbers in an array such as 0-3 or 1,5,7; [""] without one."""
    if array is None:
        if "{task}" in workdir:
            raise UserError("--workdir", "{task} has a meaning with --array only", "give that too, such as --array=0-3")
        return [""]
    found = [re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part) for part in array.split(",")]
    if not all(found):
        raise UserError("--array", f"{array!r} is not a list of numbers", "write one such as 0-3 or 1,5,7")
    if "{task}" not in workdir:
        raise UserError("--workdir", "the jobs of an array need one each", "write it with {task}, as runs/seed-{task}")
    tasks = [n for part in found if part for n in range(int(part[1]), int(part[2] or part[1]) + 1)]
    if not 0 < len(tasks) <= 1000:
        raise UserError("--array", f"{array} are {len(tasks)} jobs", "give 1 to 1000")
    return [f"{n}" for n in tasks]
