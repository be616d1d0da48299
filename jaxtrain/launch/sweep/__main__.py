"""Search values of config keys with many runs, and stop bad ones early.

    jaxtrain sweep sweep.toml --on=local
    jaxtrain sweep sweep.toml --on=slurm --dry_run
    jaxtrain sweep sweep.toml --report

The file defines which keys to search and how (docs/sweep.md). Each trial is a job with its own workdir, which
`jaxtrain jobs list ROOT` shows. The same command resumes an interrupted sweep.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.distributed.run_lock import locked
from jaxtrain.errors import UserError, say, tell
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import user_json
from jaxtrain.flags import command, parser_of
from jaxtrain.launch.job_spec import ENGINES
from jaxtrain.launch.sweep import findings, sweep_budget, sweep_page
from jaxtrain.launch.sweep.config_process import check_metric, values_of
from jaxtrain.launch.sweep.sweep_file import CONFIG, Sweep, check_form, read_content, shown, sweep_of
from jaxtrain.launch.sweep.sweeper import Sweeper
from jaxtrain.launch.sweep.trials import RESULTS, points_of, read
from jaxtrain.pages.plain_text import aligned
from jaxtrain.redaction import redacted

RECORD = "sweep.json"
_FORM = {"content": dict, "values": dict, "directory": str, "began": float}
_MAY_CHANGE = ("budget", "parallel", "job", "workdir")  # when a sweep is taken up again


@command(stopped="stopped; running trials continue, and the same command resumes the sweep")
def main(argv: list[str] | None = None) -> None:
    """Parse the flags and run the sweep, or show what it found."""
    parser = parser_of("sweep", __doc__)
    parser.add_argument("sweep", metavar="SWEEP", help="a TOML file, or a Python file with get_sweep()")
    parser.add_argument("--on", help=f"the engine: {', '.join(ENGINES[:4])}")
    parser.add_argument("--dry_run", "--dry-run", action="store_true",
                        help="show the first trials and the maximum cost of the sweep, and stop")
    parser.add_argument("--report", action="store_true", help="show what was found so far, and write report.html")
    flags = parser.parse_args(argv)
    content = read_content(flags.sweep)
    check_form(content)
    root = Path(content["workdir"]).absolute()
    begun = user_json(root / RECORD, _FORM, "workdir", "give another")
    if flags.report:
        if begun is None:
            raise UserError("--report", f"{root} has no sweep", "begin it with --on=local")
        report(sweep_of(begun["content"], begun["values"]), root)
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
        _check_same(begun, content, values)
    sweeper = Sweeper(sweep, root, flags.on, begun["began"] if begun else time.time())
    sweeper.check()
    sweeper.warn()
    if flags.dry_run:
        tell("\n".join([*map(shown, sweeper.first_points()), *sweep_budget.at_most(sweep)]))
        return
    with _alone(root):
        if begun is None:
            atomic_files.write_json(root / CONFIG, values)
            atomic_files.write_json(root / RECORD, {"content": content, "values": values, "directory": os.getcwd(),
                                                    "began": sweeper.began})
        sweeper.run()
    report(sweep, root)


def _check_same(begun: JsonMapping, content: JsonMapping, values: JsonMapping) -> None:
    """Refuse a workdir in which another sweep was begun."""
    before = begun["content"]
    changed = [key for key in sorted({*before, *content} - {*_MAY_CHANGE}) if before.get(key) != content.get(key)]
    changed += [f"{section} of the config" for section in sorted({*values, *begun["values"]})
                if values.get(section) != begun["values"].get(section)]
    changed += ["the folder in which it is started"] if begun["directory"] != os.getcwd() else []
    if changed:
        raise UserError("workdir", f"the sweep in {content['workdir']} was begun with another {changed[0]}",
                        "give another workdir, or undo the change")


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Hold the sweep's folder against a second sweeper."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("workdir", f"{root} cannot be written ({error.strerror})", "give another") from error
    with locked(root, 0.0) as other:
        if other:
            raise UserError("workdir", f"another process works on this sweep ({other})", "end that one first")
        yield


def report(sweep: Sweep, root: Path) -> None:
    """Print the points from the best to the worst, and write report.html."""
    tried = points_of(read(sweep, root), sweep.runs)
    atomic_files.write(root / "report.html", sweep_page.page(sweep, tried))
    head, rows = findings.rows(sweep, tried)
    for row in aligned([head, *rows]):
        tell(row)
    say(f"{root / RESULTS} has a line for each trial, {root / 'report.html'} the curves")


if __name__ == "__main__":
    raise SystemExit(main())
