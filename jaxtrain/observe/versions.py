"""The versions of installed packages, and the commit of a checkout."""

import importlib.metadata
import os
import subprocess
from pathlib import Path


def version_of(package: str) -> str | None:
    """Return the installed version of a package; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """The commit of the checkout that jaxtrain runs from, "-dirty" appended if it was edited.

    $JAXTRAIN_COMMIT, if set, says it for a copy, in a container for example; without either it is None.
    """
    root = Path(__file__).parents[2]
    if given := os.environ.get("JAXTRAIN_COMMIT"):
        return given
    if not (root / ".git").exists():  # site-packages may lie inside somebody else's repository
        return None
    command = ["git", "--no-optional-locks", "describe", "--always", "--match=", "--abbrev=40", "--dirty"]
    try:
        return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
