"""List the numbers of processes on which a run could continue.

    jaxtrain elastic WORKDIR --min_processes=2 --processes=4 -- --config=FILE

With another number of devices, a run uses another mesh with the same batch and the same results. Prints the numbers of
processes, from `--min_processes` on, on which a run of `--processes` could continue: one line each, with the mesh.
Needs no devices. After `--` come the flags of `jaxtrain train`.
"""

import math
import sys
from pathlib import Path

from jaxtrain.commands.flags import add_json, command, parser_of, tell_json
from jaxtrain.commands.train import training_flags
from jaxtrain.errors import UserError, say, tell
from jaxtrain.files.bounded_files import user_json


@command()
def main(argv: list[str] | None = None) -> None:
    """Print with how many processes the run could go on."""
    parser = parser_of("elastic", __doc__)
    parser.add_argument("workdir", metavar="WORKDIR", type=Path, help="the workdir of the run, which must have started")
    parser.add_argument("--min_processes", type=int, required=True, help="fewest processes to try")
    parser.add_argument("--processes", type=int, required=True, help="number of processes of the whole run")
    add_json(parser, "print a JSON object for each number: processes, and the sizes of the mesh or auto")
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    flags, rest = parser.parse_args(given[:split]), given[split + 1:]
    trained, overrides = training_flags(rest)
    fix = "start the run with all its processes first"
    run = user_json(flags.workdir / "run.json", {"mesh": {str: int}, "process_count": int}, "WORKDIR", fix)
    if run is None or run["process_count"] < 1:
        raise UserError("WORKDIR", f"{flags.workdir} does not record how many devices a process has", fix)
    each = math.prod(run["mesh"].values()) // run["process_count"]
    from jaxtrain.config.load import load_config
    from jaxtrain.config.schema import AXES
    from jaxtrain.plan.elastic import choose, sizes_of, words  # imports JAX, for which --help does not wait

    config = load_config(trained.config, overrides)
    for count in range(flags.min_processes, flags.processes):
        try:
            chosen = choose(config, count * each, flags.processes * each)
        except UserError as refused:
            say(f"{count} processes would not do: {refused}")
            continue
        sizes = sizes_of(chosen)
        if flags.json:
            tell_json({"processes": count, "mesh": "auto" if chosen.mesh.auto else dict(zip(AXES, sizes, strict=True))})
        else:
            tell(count, "auto" if chosen.mesh.auto else words(sizes))
