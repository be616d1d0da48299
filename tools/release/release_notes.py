"""Print what CHANGELOG.md says of a release, and refuse a tag that does not fit it or what was built.

    python tools/release/release_notes.py TAG DIST

TAG is such as v0.1.0. The section must have a date in place of "not released yet", and DIST the wheel and the source
archive of this version.
"""

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).resolve().parents[2] / "CHANGELOG.md"
SECTION = re.compile(r"^## (\S+) \((\d{4}-\d\d-\d\d|not released yet)\)\n(.*?)(?=^## |\Z)", re.M | re.S)


def sections(text: str) -> dict[str, tuple[str, str]]:
    """Return the date and the text of each version, the newest first."""
    return {version: (date, said.strip()) for version, date, said in SECTION.findall(text)}


def notes(tag: str, text: str, built: list[str]) -> str:
    """Return the text of the release that a tag names; a SystemExit says why there is none."""
    version = tag.removeprefix("v")
    date, said = sections(text).get(version, ("", ""))
    if not said:
        raise SystemExit(f"CHANGELOG.md has no section '## {version} (DATE)'; write it, and tag that commit")
    if date == "not released yet":
        raise SystemExit(f"CHANGELOG.md says that {version} is not released yet; write the date, and tag that commit")
    wanted = {f"jaxtrain-{version}-py3-none-any.whl", f"jaxtrain-{version}.tar.gz"}
    if set(built) != wanted:
        raise SystemExit(f"{', '.join(built) or 'nothing'} was built, not {', '.join(sorted(wanted))}; tag a commit "
                         "without changes")
    return said


if __name__ == "__main__":
    print(notes(sys.argv[1], CHANGELOG.read_text(), [file.name for file in sorted(Path(sys.argv[2]).iterdir())]))
