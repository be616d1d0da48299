"""The line of Python that made each instruction of a compiled program, from the tables at the head of its text."""

import re
from collections.abc import Callable

from jaxtrain.plan.instructions import Instruction

_ENTRY = re.compile(r"^(\d+) (.*)$")
_PACKAGE, _HELPERS = "/jaxtrain/", "sharding/"  # whose lines all models share


def source_lines(text: str) -> Callable[[Instruction], str]:
    """Return a function from an instruction to its line, such as "models/layers.py:41"; "" if the text has none.

    It is the innermost line of jaxtrain that is not a helper of all models, else the innermost of any code.
    """
    tables = {name: _table(text, name) for name in ("FileNames", "FileLocations", "StackFrames")}

    def lines(frame: int) -> list[str]:
        found: list[str] = []
        while entry := tables["StackFrames"].get(frame):
            location = tables["FileLocations"].get(_number(entry, "file_location_id"), "")
            name = tables["FileNames"].get(_number(location, "file_name_id"), "").strip('"')
            found.append(f"{name}:{_number(location, 'line')}")
            frame, before = _number(entry, "parent_frame_id"), frame
            if frame == before:  # the outermost one names itself
                break
        return found

    def line(instruction: Instruction) -> str:
        frame = re.search(r"stack_frame_id=(\d+)", instruction.text)
        found = lines(int(frame[1])) if frame else []
        ours = [one.rpartition(_PACKAGE)[2] for one in found if _PACKAGE in one]
        telling = [one for one in ours if not one.startswith(_HELPERS)]
        return (telling or ours or found or [""])[0]

    return line


def _table(text: str, name: str) -> dict[int, str]:
    """Return the numbered rows below a heading."""
    _, _, rest = text.partition(f"\n{name}\n")
    rows = {}
    for row in rest.splitlines():
        if not (entry := _ENTRY.match(row)):
            break
        rows[int(entry[1])] = entry[2]
    return rows


def _number(text: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", text)
    return int(found[1]) if found else 0
