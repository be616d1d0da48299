"""Schedules in CSV and JSON files: read custom tables, write any table."""

import csv
import json
import operator
import re
from pathlib import Path

from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import parsed, read
from jaxtrain.parallel.schedules.schedule import Cell, Op, Position, Schedule, straight
from jaxtrain.parallel.schedules.schedule_checks import check_sizes, validate


def from_file(path: str | Path, stages: int = 0, microbatches: int = 0, chunks: int = 0, *,
              latency: int = 1) -> Schedule:
    """Read and validate a custom table; sizes of 0 are taken from the table.

    CSV has one row per stage and one column per tick. A cell is empty or names operations: `F3`, `B0`, `W2`, `F3.1` for
    chunk 1, `F3+B1` for two. JSON is {"stages": [[cell, ...] of stage 0, ...]} with such cells, and may have a "name"
    and a "position": [[position of each chunk] of each stage]; otherwise the placement is `straight`.
    """
    key, path = "pipeline.table", Path(path)
    try:
        text = read(path).decode("utf-8-sig")  # spreadsheets begin with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(key, f"{path} cannot be read ({type(error).__name__})", "give a CSV or JSON file") from error
    name, position = path.stem, None
    if path.suffix.lower() == ".json":
        name, position, rows = _from_json(text, key, path, name)
    else:
        try:
            rows = [row for row in csv.reader(text.splitlines()) if row]
        except csv.Error as error:
            raise UserError(key, f"{path} is not valid CSV ({error})",
                            "write a line for each stage: F0,F1,,B0,B1") from error
    if len(rows) != (stages or len(rows)) or not rows:
        raise UserError(key, f"{path} has {len(rows)} rows for {stages or 'any'} stages", "give each stage one row")
    length = max(map(len, rows))
    cells = [[_parse(cell, key, stage, tick) for tick, cell in enumerate(row)] + [()] * (length - len(row))
             for stage, row in enumerate(rows)]
    ops = [op for row in cells for cell in row for op in cell]
    stages = len(rows)
    microbatches = microbatches or 1 + max((op.microbatch for op in ops), default=0)
    chunks = chunks or 1 + max((op.chunk for op in ops), default=0)
    check_sizes(stages, microbatches, chunks, latency)
    schedule = Schedule(name, stages, microbatches, chunks, position or straight(stages, chunks),
                        tuple(zip(*cells, strict=True)), latency)
    if "B" not in schedule.kinds:
        raise UserError(key, f"{path} has no B, so it would train nothing", "add the backwards")
    return validate(schedule, key)


def _from_json(text: str, key: str, path: Path, name: str) -> tuple[str, Position | None, list[list[str]]]:
    try:
        content = parsed(text, object)
        rows = [[str(cell) for cell in row] for row in content["stages"]]
        position = tuple(tuple(map(operator.index, row)) for row in content.get("position", ())) or None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(key, f"{path} is not of the form expected ({type(error).__name__}: {error})",
                        'write {"stages": [["F0", "", "B0"], ...]}') from error
    return str(content.get("name", name)), position, rows


def _parse(cell: str, key: str, stage: int, tick: int) -> Cell:
    words = [word.strip() for word in cell.split("+")] if cell.strip() else []
    found = [re.fullmatch(r"([FBW])(\d{1,9})(?:\.(\d{1,9}))?", word) for word in words]
    if not all(found):
        raise UserError(key, f"stage {stage}, tick {tick}: {cell!r} names no operation",
                        "write F3, B0, W2, F3.1 for chunk 1, or F3+B1 for two")
    return tuple(Op(match[1], int(match[2]), int(match[3] or 0)) for match in found if match)


def _cells(schedule: Schedule) -> list[list[str]]:
    return [["+".join(map(str, row[stage])) for row in schedule.ticks] for stage in range(schedule.stages)]


def to_csv(schedule: Schedule, path: str | Path) -> None:
    """Write a CSV that `from_file` reads; only for a straight placement, since CSV cannot represent another."""
    if schedule.position != straight(schedule.stages, schedule.chunks):
        raise UserError("pipeline.table", f"CSV cannot say where {schedule.name} places its chunks", "write JSON")
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(_cells(schedule))


def to_json(schedule: Schedule, path: str | Path) -> None:
    """Write a JSON file that `from_file` reads."""
    content = {"name": schedule.name, "position": schedule.position, "stages": _cells(schedule)}
    Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")
