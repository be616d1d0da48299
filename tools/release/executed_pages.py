"""The record of when the code of each page of the documentation was last executed, and what the site says of it.

    JAXTRAIN_EXECUTED=1 python -m pytest -m '' tests/test_readme.py

runs them and writes the record; the site's build (docs/conf.py) reads it.
"""

import hashlib
import json
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "measurements" / "executed.json"
_BLOCKS = re.compile(r"^```\w+\n.*?^```", re.M | re.S)


def digest(text: str) -> str:
    """Return a hash of all that a page shows as code: a change of its words does not alter it."""
    return hashlib.sha256("\n".join(_BLOCKS.findall(text)).encode()).hexdigest()[:16]


def recorded() -> dict[str, Any]:
    """Return the record: page -> date, commit, versions, number of commands and blocks that ran, and digest."""
    return json.loads(RECORD.read_text()) if RECORD.is_file() else {}


def record(ran: Mapping[Path, int]) -> None:
    """Add pages whose commands and blocks all ran just now, with the number of these."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    now = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit.stdout.strip(), "jax": version("jax"),
           "python": platform.python_version()}
    pages = recorded() | {path.relative_to(ROOT).as_posix(): {**now, "ran": count, "digest": digest(path.read_text())}
                          for path, count in ran.items() if count}
    RECORD.write_text(json.dumps(dict(sorted(pages.items())), indent=1) + "\n")


def sentence(page: str, text: str, pages: Mapping[str, Any]) -> str:
    """Return what the foot of a page says of it."""
    if not _BLOCKS.search(text):
        return "This page has nothing to execute."
    if page not in pages:
        return "Tests execute the commands and code of this page; when they last did is not recorded yet."
    one = pages[page]
    since = "" if one["digest"] == digest(text) else " They have changed since."
    return (f"Tests executed commands and code of this page, some with fewer steps, on {one['date']} "
            f"at commit {one['commit']}, with "
            f"Python {one['python']} and JAX {one['jax']} ({one['ran']} in all).{since}")


def notebook_sentence(path: Path) -> str:
    """Return the same of a notebook, whose outputs are those of the commit that has changed it last."""
    said = subprocess.run(["git", "log", "-1", "--format=%cs at commit %h", "--", path], cwd=ROOT, capture_output=True,
                          text=True).stdout.strip()
    return f"All cells were executed on {said}; tests execute them again and compare." if said else ""
