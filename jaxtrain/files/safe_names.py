"""Check names of files that come from a file or another machine, before anything is read or written there."""

import os
from pathlib import Path


class Outside(ValueError):
    """A name that leads out of its folder."""


def parts_of(name: object) -> list[str]:
    """Return the parts of a relative name; raises `Outside` if it is absolute or has empty, `.` or `..` parts."""
    parts = name.split("/") if isinstance(name, str) else [""]
    if any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in parts):
        raise Outside(f"{name!r} does not name a file inside a folder")
    return parts


def inside(folder: str | Path, name: object) -> Path:
    """Return the path of `name` in `folder`; raises `Outside` if the name, or a link on the way, leads out of it."""
    path = Path(folder, *parts_of(name))
    if not path.resolve().is_relative_to(Path(folder).resolve()):
        raise Outside(f"{name!r} is a link that leads out of {folder}")
    return path


def linked(folder: str | Path, name: object) -> Path:
    """Return the path of `name` in a local folder whose files may be links, as in a cache of the Hugging Face hub.

    Links may lead anywhere if the owner of the folder made them, who can as well copy there what he can read; raises
    `Outside` for all other links and for names that lead out of the folder.
    """
    path, owner = Path(folder), os.stat(folder).st_uid
    for part in parts_of(name):
        path /= part
        if path.is_symlink() and os.lstat(path).st_uid != owner:
            raise Outside(f"{name!r} is a link that somebody else than the owner of {folder} made")
    return path
