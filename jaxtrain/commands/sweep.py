"""Search values of config keys with many runs, and stop bad ones early.

    jaxtrain sweep sweep.toml --on=local
    jaxtrain sweep sweep.toml --on=slurm --dry_run
    jaxtrain sweep sweep.toml --report

The file defines which keys to search and how (docs/sweep.md). Each trial is a job with its own workdir, which
`jaxtrain jobs list ROOT` shows. The same command resumes an interrupted sweep.
"""

import argparse
import json
import os
import time
from pathlib import Path

from jaxtrain.commands.flags import add_json, command, parser_of, tell_json
from jaxtrain.errors import UserError, tell
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import user_json
from jaxtrain.launch.job_spec import ENGINES
from jaxtrain.launch.sweep import findings, sweep_budget
from jaxtrain.launch.sweep.config_process import check_metric, values_of
from jaxtrain.launch.sweep.sweep_file import CONFIG, Sweep, check_form, read_content, shown, sweep_of
from jaxtrain.launch.sweep.sweep_record import FORM, RECORD, alone, check_same, report
from jaxtrain.launch.sweep.sweeper import Sweeper
from jaxtrain.pages.plain_text import aligned
from jaxtrain.redaction import redacted


@command(stopped="stopped; running trials continue, and the same command resumes the sweep")
def main(argv: list[str] | None = None) -> None:
    """Parse the flags and run the sweep, or show what it found."""
    parser = parser_of("sweep", __doc__)
    parser.add_argument("sweep", metavar="SWEEP", help="a TOML file, or a Python file with get_sweep()")
    parser.add_argument("--on", help=f"the engine: {', '.join(ENGINES[:4])}")
    parser.add_argument("--dry_run", action="store_true",
                        help="show the first trials and the maximum cost of the sweep, and stop")
    parser.add_argument("--report", action="store_true", help="show what was found so far, and write report.html")
    add_json(parser, "print a JSON object for each point: its trials, keys, state and value")
    flags = parser.parse_args(argv)
    content = read_content(flags.sweep)
    check_form(content)
    root = Path(content["workdir"]).absolute()
    begun = user_json(root / RECORD, FORM, "workdir", "give another")
    if flags.report:
        if begun is None:
            raise UserError("--report", f"{root} has no sweep", "begin it with --on=local")
        _report(flags, sweep_of(begun["content"], begun["values"]), root)
        return
    if flags.on not in ENGINES[:4]:
        raise UserError("--on", f"{flags.on!r} runs no trials" if flags.on else "nothing says where trials run",
                        f"give {', '.join(ENGINES[:4])}")
    content, values = (json.loads(json.dumps(each, default=str)) for each in (content, values_of(content["config"])))
    if redacted([content, values]) != [content, values]:
        raise UserError("config", "a URL in it has a password or a query, which would be in files of the sweep",
                        "pass the credentials in an environment variable, from a file in job.secrets")
    sweep = sweep_of(content, values)
    if begun is None:
        check_metric(sweep)
    else:
        check_same(begun, content, values)
    sweeper = Sweeper(sweep, root, flags.on, begun["began"] if begun else time.time())
    sweeper.check()
    sweeper.warn()
    if flags.dry_run:
        points = sweeper.first_points()
        if flags.json:
            tell_json(*({"keys": point} for point in points))
        else:
            tell("\n".join([*map(shown, points), *sweep_budget.at_most(sweep)]))
        return
    with alone(root):
        if begun is None:
            atomic_files.write_json(root / CONFIG, values)
            atomic_files.write_json(root / RECORD, {"content": content, "values": values, "directory": os.getcwd(),
                                                    "began": sweeper.began})
        sweeper.run()
    _report(flags, sweep, root)


def _report(flags: argparse.Namespace, sweep: Sweep, root: Path) -> None:
    tried = report(sweep, root)
    if flags.json:
        tell_json(*findings.points(sweep, tried))
    else:
        head, rows = findings.rows(sweep, tried)
        tell("\n".join(aligned([head, *rows])))
