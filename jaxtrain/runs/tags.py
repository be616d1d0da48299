"""The tags of a run: names in tags.json of its workdir, by which people find it again."""

import re
from collections.abc import Collection
from pathlib import Path

from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import user_json

FILE = "tags.json"


def of(workdir: str | Path) -> list[str]:
    """Return the tags of a run, in order."""
    found = user_json(Path(workdir) / FILE, {"tags": [str]}, "WORKDIR", "delete it, and tag the run again")
    return sorted(set(found["tags"])) if found else []


def change(workdir: str | Path, names: Collection[str], remove: bool = False) -> list[str]:
    """Add names to the tags of a run, or remove them; return its tags."""
    workdir = Path(workdir)
    if not (workdir / "config.json").is_file() and not (workdir / "run.json").is_file():
        raise UserError("WORKDIR", f"{workdir} is not the workdir of a run", "give one that `runs list` shows")
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise UserError("NAME", f"{name!r} is not a tag",
                            "use letters, digits, dots, dashes and underscores, at most 64, and begin with a letter")
    before = set(of(workdir))
    if remove and (unknown := sorted(set(names) - before)):
        raise UserError("NAME", f"the run is not tagged {unknown[0]!r}", f"it has {', '.join(of(workdir)) or 'none'}")
    after = sorted(before - set(names) if remove else before | set(names))
    try:
        atomic_files.write_json(workdir / FILE, {"tags": after})
    except OSError as error:
        raise UserError("WORKDIR", f"{workdir} cannot be written ({error.strerror})", "tag the run where it can be"
                        ) from error
    return after
