"""The tables of docs/radar.md, made from recorded lines."""

import itertools
import re

from tools.benchmarks.bench_hlo import ROOT
from tools.release_radar import cases, changes, recording
from tools.release_radar.recording import Lines

PAGE = ROOT / "docs" / "radar.md"
RELEASES = ("jax-0.10.2", "jax-0.11.2", "jax-0.12.0.1")  # files of docs/measurements/radar/, the oldest first
VERDICTS = cases.FOLDER / "verdicts.jsonl"
_PLACE = re.compile(r"(<!-- rendered: radar (\w+) -->\n)(?:.*?)(<!-- end -->)", re.DOTALL)


def recorded() -> list[Lines]:
    """Return the lines of each release."""
    return [recording.read(cases.FOLDER / f"{name}.jsonl") for name in RELEASES]


def environments(found: list[Lines]) -> str:
    """Return the table of what the lines were recorded with, and how many cases."""
    rows = ["| | " + " | ".join(recording.PACKAGES) + " | cases compiled | refused | stopped |",
            "|" + "---|" * (len(recording.PACKAGES) + 4)]
    for lines in found:
        ended = [next((key for key in ("refused", "stopped") if key in line), "") for line in lines.cases.values()]
        versions = [lines.versions.get(name, "") for name in recording.PACKAGES]
        rows.append(f"| {_title(lines)} | {' | '.join(versions)} | {ended.count('')} | {ended.count('refused')} | "
                    f"{ended.count('stopped')} |")
    return "\n".join(rows)


def figures(found: list[Lines]) -> str:
    """Return the table of each case's simulated step and memory in every release."""
    names = dict.fromkeys(name for lines in found for name in lines.cases)
    rows = ["| case | target | " + " | ".join(f"{_title(lines)}: ms, GB" for lines in found) + " |",
            "|" + "---|" * (len(found) + 2)]
    for name in sorted(names):
        target = next(lines.cases[name]["target"] for lines in found if name in lines.cases)
        rows.append(f"| `{name}` | {target} | {' | '.join(_cell(lines, name) for lines in found)} |")
    return "\n".join(rows)


def _cell(lines: Lines, name: str) -> str:
    if name not in lines.cases:
        return "not recorded"
    line = lines.cases[name]
    if "step_ms" not in line:
        return "refused" if "refused" in line else "stopped"
    return f"{_digits(line['step_ms'])}, {_digits(line['peak_gb'])}"


def _digits(value: float) -> str:
    return f"{value:,.1f}" if value >= 9.95 else f"{value:.3f}"


def differences(found: list[Lines]) -> str:
    """Return what changed from each release to the next one, as lists."""
    parts = []
    for old, new in itertools.pairwise(found):
        first, *rest = changes.sentences(changes.compare(old.cases, new.cases), old, new)
        parts += [f"**{_title(old)} to {_title(new)}** ({first})\n",
                  *(f"- {' '.join(line.split()).replace('|', '/')}" for line in rest), ""]
    return "\n".join(parts).rstrip()


def options(found: list[Lines]) -> str:
    """Return the table of XLA's options whose defaults differ from one release to the next."""
    rows = ["| option | " + " | ".join(_title(lines) for lines in found) + " |", "|" + "---|" * (len(found) + 1)]
    every = [lines.environment["options"] for lines in found]
    for name in sorted(set.intersection(*map(set, every))):
        values = [_value(options[name]) for options in every]
        if len(set(values)) > 1:
            rows.append(f"| `{name}` | {' | '.join(values)} |")
    gone = [f"{_title(old)} to {_title(new)}: {len(_names(new) - _names(old))} options are new, and "
            f"{len(_names(old) - _names(new))} are gone" for old, new in itertools.pairwise(found)]
    return "\n".join([*rows, "", *(f"- {line}" for line in gone)])


def _names(lines: Lines) -> set[str]:
    return set(lines.environment["options"])


def _value(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(sorted(map(str, value))) or "none"
    return f"{value:.3g}" if isinstance(value, float) else f"{value}".lower() if isinstance(value, bool) else f"{value}"


def verdicts(found: list[dict]) -> str:
    """Return the table of what `blame` said of recorded changes."""
    rows = ["| case | from | to | what changed | candidates | compiles | to blame | undone |", "|" + "---|" * 8]
    for one in found:
        where = [f"JAX {side['versions']['jax']}{_flags(side)}" for side in (one["old"], one["new"])]
        blamed = [f"`{name}`: {was or 'left to the compiler'} to {now or 'left to the compiler'}"
                  for name, (was, now) in one["candidates"].items() if name in one["blamed"]]
        share = one["undone"] if blamed else one["undone_by_all"]
        rows.append(f"| `{one['case']}` | {' | '.join(where)} | {one['says']} | {len(one['candidates'])} | "
                    f"{one['compiles']} | {'; '.join(blamed) or 'no option'} | {share:.0%} |")
    return "\n".join(rows)


def _flags(side: dict) -> str:
    count = len(side["xla_flags"])
    return f" with {count} flag{'s' if count > 1 else ''}" if count else ""


def _title(lines: Lines) -> str:
    return f"JAX {lines.versions['jax']}"


def rendered(page: str) -> str:
    """Return the page with its tables made anew."""
    found = recorded()
    made = {"environments": environments, "figures": figures, "differences": differences, "options": options}
    judged = recording.objects(VERDICTS)

    def table(kind: str) -> str:
        return made[kind](found) if kind in made else {"verdicts": verdicts}[kind](judged)

    return _PLACE.sub(lambda place: f"{place[1]}{table(place[2])}\n{place[3]}", page)
