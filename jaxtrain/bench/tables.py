"""Render recorded measurements as Markdown tables, also in place in a document."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from jaxtrain.base.annotations import JsonObject
from jaxtrain.bench.records import Record, read
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.profiling.profile_tables import markdown, number, profiles

GB = 1e9
# In a document, text between these two lines is rendered: a kind of measurement and a label.
_PLACE = re.compile(r"(<!-- rendered: (\w+) (\S+) -->\n)(?:.*?)(<!-- end -->)", re.DOTALL)


def render(files: Iterable[str | Path]) -> str:
    """Return all tables of the lines in these files, by label and kind, in the order of the lines."""
    files = list(files)
    groups = grouped(line for file in files for line in read(file))
    if not groups:
        raise UserError("--render", f"{', '.join(map(str, files))} has no measurements",
                        "give files that --output wrote")
    return "\n".join(f"### {label}: {what}\n\n{table(what, lines)}" for (what, label), lines in groups.items())


def fill(document: str | Path, files: Iterable[str | Path]) -> int:
    """Write the tables into their places in a document, and return the number of places; each must have lines."""
    groups = grouped(line for file in files for line in read(file))
    try:
        before = Path(document).read_text()
    except (OSError, UnicodeDecodeError):
        raise UserError("--into", f"{document} cannot be read", "name a document") from None
    if not (places := len(_PLACE.findall(before))):
        raise UserError("--into", f"{document} has no place for a table", "write '<!-- rendered: run LABEL -->' and "
                        "'<!-- end -->' on lines of their own")
    text = filled(before, groups, str(document))
    try:
        atomic_files.write(Path(document), text)
    except OSError as error:
        raise UserError("--into", f"{document} cannot be written ({error.strerror})", "name a document") from None
    return places


def filled(text: str, groups: dict[tuple[str, str], list[Record]], name: str = "the document") -> str:
    """Return a document's text with its tables rendered again."""
    def rendered(place: re.Match) -> str:
        if (place[2], place[3]) not in groups:
            raise UserError("--into", f"{name} has a place for {place[2]} {place[3]}, but no line was given for it",
                            "also render the file with those lines")
        return f"{place[1]}{table(place[2], groups[place[2], place[3]])}{place[4]}"

    return _PLACE.sub(rendered, text)


def grouped(lines: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Group lines by kind and label, keeping only the newest of several measurements of the same thing."""
    newest: dict[tuple[str, ...], Record] = {}
    for line in lines:
        if line["what"] not in TABLES:
            continue
        label = line.get("label") or "measured"
        keys = [line["what"], label, *(str(line.get(key)) for key in (
            "name", "config_hash", "device", "devices", "environment", "rehearsal"))]
        newest.pop(tuple(keys), None)
        newest[tuple(keys)] = line
    groups: dict[tuple[str, str], list[Record]] = {}
    for (what, label, *_), line in newest.items():
        groups.setdefault((what, label), []).append(line)
        if what == "run":
            groups.setdefault(("memory", label), []).append(line)
        if "profile" in line:
            groups.setdefault(("profile", label), []).append(line)
    return groups


def table(what: str, lines: list[Record]) -> str:
    """Return one table, and below it the sources of its figures."""
    try:
        return TABLES[what](lines) + "\n" + sources(lines)
    except (KeyError, TypeError) as error:
        raise UserError("--render", f"a line of {what!r} lacks {error}", "measure it again") from None


def sources(lines: list[Record]) -> str:
    """Return machine, versions, commit and command of each line; equal ones only once."""
    said: dict[str, list[str]] = {}
    for line in lines:
        versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
        settings = "".join(f", {name}={value}" for name, value in line["environment"].items())
        where = (f"{line['devices']} x {line['device']}" if line["device"] != "cpu" else
                 f"{line['cores']} cores of {line['processor']}, {line['devices']} CPU device"
                 + "s" * (line["devices"] > 1))
        machine = f"{where}; {versions}; commit {short(line['commit'])}{settings}"
        said.setdefault(machine, [])
        if (command := f"`{line['command']}` (load {line['load']})") not in said[machine]:
            said[machine].append(command)
    return "\n".join(f"{machine}:\n" + "".join(f"- {command}\n" for command in commands)
                     for machine, commands in said.items())


def short(commit: str | None) -> str:
    """Return a commit's short hash."""
    return "unknown" if not commit else commit[:7] + ("-dirty" if commit.endswith("-dirty") else "")


# ----------------------------------------------------------------------------------------------------------- the tables
def runs(lines: list[Record]) -> str:
    """Return the table of throughput and step times."""
    def row(line: Record) -> list[str]:
        if failure := line.get("failed"):
            return [line["name"], shape(line), failure, *[""] * 5]
        ms = line["step_ms"]
        return [line["name"], shape(line), f"{ms['median']:,.1f} ({ms['p10']:,.1f} to {ms['p90']:,.1f})",
                f"{line['tokens_per_s']:,.0f}",
                f"{number(line['mfu'], '.1f', 100, ' %')} / {number(line['mfu_full'], '.1f', 100, ' %')}",
                number(line["predicted_ms"]), number(line["data_wait_share"], ".2f", 100, " %"),
                f"{line['compile_s']:.1f} s" + (" (cached)" if line["compile_cached"] else "")]

    return markdown(["config", "rows x tokens", "step, ms: median (p10 to p90)", "tokens/s, mean", "MFU causal / full",
                     "predicted, ms", "waiting for data", "compiled in"], map(row, lines))


def memory(lines: list[Record]) -> str:
    """Return the table of device memory and step time, predicted and measured."""
    def row(line: Record) -> list[str]:
        if failure := line.get("failed"):
            return [line["name"], failure, *[""] * 7]
        m, ms = line["memory"], line["step_ms"]["median"]
        known = m["peak"] or m["compiler"]
        return [line["name"], *(number(m.get(what), ".3g", 1 / GB) for what in ("peak", "compiler", "planner", "room")),
                number(m["planner"] and m["planner"] / known - 1, "+.1%"), f"{ms:,.1f}", number(line["predicted_ms"]),
                number(line["predicted_ms"] and line["predicted_ms"] / ms - 1, "+.1%")]

    return markdown(["config", "peak, GB", "by the compiler", "by the planner", "there is", "error of the planner",
                     "step, ms", "predicted", "error of the time"], map(row, lines))


def comparisons(lines: list[Record]) -> str:
    """Return the table with each contender of each comparison."""
    rows = []
    for line in lines:
        if failure := line.get("failed"):
            rows.append([line["name"], failure, *[""] * 5])
            continue
        for name, one in line["contenders"].items():
            ours = name == "jaxtrain"
            far = one["loss_apart"]
            rows.append([line["name"] if ours else "", name, f"{one['wall_ms']:,.2f}", f"{one['cpu_ms']:,.2f}",
                         "" if ours else f"{one['wall_ratio']:.3f}", "" if ours else _paired(one),
                         "" if far is None else f"{far:.1e}"])
    return markdown(["config", "program", "ms a step", "CPU ms", "jaxtrain / it: medians", "paired blocks (quartiles)",
                     "losses apart"], rows)


def _paired(one: JsonObject) -> str:
    spread = one.get("wall_quartiles")
    return f"{one['wall_paired']:.3f}" + (f" ({spread[0]:.3f} to {spread[1]:.3f})" if spread else "")


def blocks(lines: list[Record]) -> str:
    """Return the table of the blocks of a session on an accelerator."""
    return markdown(["block", "result", "seconds"], [[line["name"], line["status"], f"{line['seconds']:.0f}"]
                                                      for line in lines])


def figures(lines: list[Record]) -> str:
    """Return the table of named figures, one row per line."""
    head = list(dict.fromkeys(key for line in lines for key in line["figures"]))
    return markdown(["", *head], [[line["name"], *(_figure(line["figures"].get(key)) for key in head)]
                                  for line in lines])


def _figure(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def outcome(record: Record) -> str:
    """Summarise a measurement in a few words."""
    if failure := record.get("failed"):
        return failure
    return f"{record['step_ms']['median']:,.1f} ms a step" + (
        f", {record['mfu']:.1%} causal MFU" if record["mfu"] is not None else "")


def shape(line: Record) -> str:
    """Return rows and tokens of a step; empty for a run that failed before they were known."""
    if "rows" not in line:
        return ""
    micro = f", {line['accumulation']} parts" if line["accumulation"] > 1 else ""
    return f"{line['rows']} x {line['seq_len']:,}{micro}"


TABLES: dict[str, Callable[[list[Record]], str]] = {
    "run": runs, "memory": memory, "compare": comparisons, "profile": profiles, "block": blocks, "figures": figures}
