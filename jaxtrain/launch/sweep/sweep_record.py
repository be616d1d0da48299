"""The files of a sweep that make it possible to take it up again, and its report."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.distributed.run_lock import locked
from jaxtrain.errors import UserError, say
from jaxtrain.files import atomic_files
from jaxtrain.launch.sweep import sweep_page
from jaxtrain.launch.sweep.sweep_file import Sweep
from jaxtrain.launch.sweep.trials import RESULTS, Tried, points_of, read

RECORD = "sweep.json"
FORM = {"content": dict, "values": dict, "directory": str, "began": float}
_MAY_CHANGE = ("budget", "parallel", "job", "workdir")  # when a sweep is taken up again


def check_same(begun: Mapping[str, Any], content: Mapping[str, Any], values: Mapping[str, Any]) -> None:
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
def alone(root: Path) -> Iterator[None]:
    """Hold the sweep's folder against a second sweeper."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("workdir", f"{root} cannot be written ({error.strerror})", "give another") from error
    with locked(root, 0.0) as other:
        if other:
            raise UserError("workdir", f"another process works on this sweep ({other})", "end that one first")
        yield


def report(sweep: Sweep, root: Path) -> list[Tried]:
    """Write report.html, say where it is, and return the points that were tried."""
    tried = points_of(read(sweep, root), sweep.runs)
    atomic_files.write(root / "report.html", sweep_page.page(sweep, tried))
    say(f"{root / RESULTS} has a line for each trial, {root / 'report.html'} the curves")
    return tried
