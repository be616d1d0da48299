"""Profile a running training job: where the time of its steps goes.

    jaxtrain profile WORKDIR --steps=5
    jaxtrain profile WORKDIR/profiles/120

Given a workdir, asks its run to trace the next steps, waits for the trace and summarizes it in WORKDIR/profiles/STEP.
Given a folder in WORKDIR/profiles, summarizes that profile, such as one requested by signal USR2. Exit status 0; 2: a
user error, reported in one line.
"""

import json
from pathlib import Path

from jaxtrain.commands.flags import add_json, command, parser_of, tell_json
from jaxtrain.errors import say, tell


@command()
def main(argv: list[str] | None) -> None:
    """Ask for a profile if need be, and print its summary."""
    parser = parser_of("profile", __doc__)
    parser.add_argument("workdir", metavar="WORKDIR", help="the workdir of a run, or a folder in its profiles")
    parser.add_argument("--steps", type=int, default=5, help="number of steps to trace; default: 5")
    parser.add_argument("--processes", type=int, default=8, metavar="COUNT",
                        help="trace in the first COUNT processes of the run; default: 8")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS",
                        help="seconds to wait for the run's answer; default: 600")
    add_json(parser, "print summary.json of the profile")
    flags = parser.parse_args(argv)
    from jaxtrain.profiling.summary import ask, summarise  # imports JAX, which --help does without

    folder = Path(flags.workdir)
    if not (folder / "profile.json").exists():
        folder = ask(folder, flags.steps, flags.processes, flags.timeout)
        say(f"traced into {folder}; summarising")
    text = summarise(folder)
    if flags.json:
        tell_json(json.loads((folder / "summary.json").read_text()))
    else:
        tell(text, end="")
