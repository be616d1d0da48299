"""Start processes as one run, and restart them when one dies or hangs.

    jaxtrain supervise --processes=2 -- --config=configs/gpt.py:tiny --workdir=runs/two

Starts N processes of `jaxtrain train` on this host as one run, with the flags that follow `--`. When one of them
crashes or hangs, it stops the others and restarts all, until the run is finished, the command turns out to be wrong, or
--max_restarts is reached. The exit status is the run's.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from jaxtrain.commands.flags import command, parser_of, workdir_of
from jaxtrain.commands.train import training_flags
from jaxtrain.distributed import exit_codes
from jaxtrain.errors import UserError
from jaxtrain.launch.supervisor.supervisor import Settings, Supervisor


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the supervisor's own flags; return them and those of the run."""
    parser = parser_of("supervise", __doc__,
                       usage="%(prog)s [--processes=N ...] -- --config=FILE [flags of jaxtrain train]")
    parser.add_argument("--processes", type=int, default=1, help="number of processes on this host; default: 1")
    parser.add_argument("--min_processes", type=int,
                        help="fewest processes to continue with when others keep crashing; default: all")
    parser.add_argument("--max_restarts", type=int, default=5,
                        help="consecutive restarts without a new step after which it gives up; default: 5")
    parser.add_argument("--max_backoff", type=float, default=60.0,
                        help="maximum seconds between two attempts; default: 60")
    parser.add_argument("--silent", type=float, default=300.0,
                        help="seconds without a heartbeat after which a process counts as hung; 0: never; default: 300")
    parser.add_argument("--lost_after", type=int, default=2,
                        help="consecutive crashes after which a process is no longer restarted; default: 2")
    parser.add_argument("--retry_lost", type=float, default=600.0,
                        help="seconds after which such a process is tried again; default: 600")
    parser.add_argument("--coordinator", help="host:port of node 0, in a run on several hosts")
    parser.add_argument("--nodes", type=int, default=1,
                        help="number of hosts, each with its own supervisor; default: 1")
    parser.add_argument("--node_rank", type=int, default=0, help="number of this host, from 0")
    parser.add_argument("--program", nargs="+", help=argparse.SUPPRESS)  # for tests: instead of jaxtrain.main
    parser.group("several hosts", "coordinator", "nodes", "node_rank")
    parser.group("restarts", "min_processes", "max_restarts", "max_backoff", "silent", "lost_after", "retry_lost")
    words = list(argv)
    split = words.index("--") if "--" in words else len(words)
    flags, unknown = parser.parse_known_args(words[:split])
    stray = [word for word in words[:split] if word.startswith(("--config", "--workdir")) or (
        word in unknown and not word.startswith("-"))]  # the config may be given without --config=
    if stray:
        raise UserError(stray[0], "the config and the flags of the run come after --",
                        f"write jaxtrain supervise --processes=N -- {' '.join([*stray, *words[split + 1:]])}")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    rest = words[split + 1:]
    flags.min_processes = flags.processes if flags.min_processes is None else flags.min_processes
    if flags.processes < 1:
        raise UserError("--processes", f"{flags.processes} is not a valid number of processes", "give 1 or more")
    if not 1 <= flags.min_processes <= flags.processes:
        raise UserError("--min_processes", f"{flags.min_processes} is not between 1 and --processes={flags.processes}",
                        "give a number that is")
    if not 0 <= flags.node_rank < flags.nodes:
        raise UserError("--node_rank", f"{flags.node_rank} is not below --nodes={flags.nodes}", "number them from 0")
    if (flags.nodes > 1) != bool(flags.coordinator):
        raise UserError("--coordinator", f"--nodes={flags.nodes} " + ("has none" if flags.nodes > 1 else "needs none"),
                        "give host:port of node 0 to the supervisors of all nodes, or to none")
    if flags.nodes > 1 and flags.min_processes < flags.processes:
        raise UserError("--min_processes", "a run on several hosts cannot change its size", "leave it out")
    for flag in ("max_restarts", "max_backoff", "silent", "retry_lost"):
        if getattr(flags, flag) < 0:
            raise UserError(f"--{flag}", f"{getattr(flags, flag)} is negative", "give 0 or more")
    if flags.lost_after < 1:
        raise UserError("--lost_after", f"{flags.lost_after} is not a valid number of deaths", "give 1 or more")
    return flags, rest


def main(argv: list[str] | None = None) -> int:
    """Run until there is a reason to end; `base/exit_statuses.py` explains the exit statuses."""
    status = exit_codes.DONE

    @command(stopped="stopped at once; what was saved before is kept")
    def supervised(argv: list[str] | None) -> None:
        nonlocal status
        flags, rest = parse(sys.argv[1:] if argv is None else argv)
        settings = Settings(**{field.name: getattr(flags, field.name) for field in fields(Settings)})
        supervisor = Supervisor(settings, rest, _workdir(rest))
        with supervisor.alone(), supervisor.listening():
            status = supervisor.run()

    return supervised(argv) or status


def _workdir(rest: list[str]) -> Path:
    """Return the workdir that the flags of a run name; reports mistakes in them once, before any process is started."""
    wanted, _ = training_flags(rest)
    for name in ("coordinator", "num_processes", "process_id"):
        if getattr(wanted, name) is not None:
            raise UserError(f"--{name}", "the supervisor gives it to each process", "leave it out behind --")
    return workdir_of(wanted)
