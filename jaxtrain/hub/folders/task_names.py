"""Refuse names of tasks that lm-evaluation-harness does not have, by its YAML files and without importing it.

The harness needs the better part of a minute to import and to list its tasks, and a mistyped name should not.
"""

import difflib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxtrain.errors import UserError, install_extra

_NAME = re.compile(rb"^(?:task|group|tag):[ \t]*['\"]?([^\s'\"#\[\]{}]+)", re.MULTILINE)
_PATTERN = re.compile(r"[*?\[]")


def check(names: Sequence[str], include: str | None) -> None:
    """Raise a UserError for a name that no YAML file has, neither the harness's own nor one in the folder `include`."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("--tasks", "they need the package lm_eval", install_extra("eval"))
    if include and not Path(include).is_dir():
        raise UserError("--include", f"{include} is not a folder", "name the one with the tasks' YAML files")
    missing = {name: name.encode() for name in names if not _PATTERN.search(name) and not Path(name).exists()}
    known: set[bytes] = set()
    for path in _yaml_files([*([include] if include else []), f"{spec.submodule_search_locations[0]}/tasks"]):
        if not missing:
            return
        content = path.stem.encode() + b"\n" + path.read_bytes()
        missing = {name: word for name, word in missing.items() if word not in content}
        known.update(_NAME.findall(content))
    if missing:
        name = next(iter(missing))
        close = difflib.get_close_matches(name, [word.decode(errors="replace") for word in known], 1, 0.75)
        meant = f"did you mean {close[0]!r}? Otherwise " if close else ""
        raise UserError("--tasks", f"there is no task {name!r}",
                        f"{meant}see lm-eval ls tasks, or name the folder of your own by --include")


def _yaml_files(folders: Sequence[str]) -> Iterator[Path]:
    for folder in folders:
        for path in Path(folder).rglob("*.yaml"):
            if path.is_file():
                yield path
