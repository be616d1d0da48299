"""Check names of files that come from a file or another machine, before anything is read or written there."""

from pathlib import Path
from typing import Any


class Outside(ValueError):
    """A name that leads out of its folder."""


def parts_of(name: Any) -> list[str]:
    """Return the parts of a relative name; raises `Outside` if it is absolute or has empty, `.` or `..` parts."""
    parts = name.split("/") if isinstance(name, str) else [""]
    if any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in parts):
        raise Outside(f"{name!r} does not name a file inside a folder")
    return parts


def inside(folder: str | Path, name: Any) -> Path:
    """Return the path of `name` in `folder`; raises `Outside` if the name, or a link on the way, leads out of it."""
    path = Path(folder, *parts_of(name))
    if not path.resolve().is_relative_to(Path(folder).resolve()):
        raise Outside(f"{name!r} is a link that leads out of {folder}")
    return path
