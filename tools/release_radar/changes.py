"""Compare what two environments make of the same cases, and say what changed in plain sentences.

A step's time and memory count as changed by more than two percent, as in tools/benchmarks/bench_hlo.py, collectives
by more than two percent of all that is sent or of their number, kernels of libraries and own ones by their number, and
fusions by more than five percent.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtrain.base.annotations import JsonMapping
from tools.benchmarks.bench_hlo import WORSE
from tools.release_radar.recording import Lines

FUSIONS = 0.05  # share of all kernels that XLA makes itself
SHOWN = 6  # kinds of kernels that a sentence names, those that differ most
FIGURES = ("refused", "step", "memory", "collectives", "kernels")  # the most important one first


@dataclass(frozen=True)
class Change:
    """One thing that changed of a case."""

    case: str
    figure: str  # of FIGURES
    size: float  # how much, as a share; of a case that is refused now, or no longer: 1
    worse: bool
    says: str

    @property
    def rank(self) -> tuple[int, float, str]:
        """The order of what is printed: the most important first."""
        return FIGURES.index(self.figure), -self.size, self.case


def compare(old: Mapping[str, JsonMapping], new: Mapping[str, JsonMapping]) -> list[Change]:
    """Return what changed of the cases that both have, the most important first."""
    found = [change for name in old if name in new for change in of_case(name, old[name], new[name])]
    return sorted(found, key=lambda change: change.rank)


def not_compared(old: Mapping[str, JsonMapping], new: Mapping[str, JsonMapping]) -> dict[str, str]:
    """Return why cases of either are not compared."""
    found = {name: "recorded in the old environment alone" for name in old.keys() - new.keys()}
    found |= {name: "recorded in the new environment alone" for name in new.keys() - old.keys()}
    for age, lines in (("old", old), ("new", new)):
        found |= {name: f"not compiled in the {age} environment: {line['stopped']}" for name, line in lines.items()
                  if "stopped" in line and name not in found}
    return dict(sorted(found.items()))


def of_case(name: str, old: JsonMapping, new: JsonMapping) -> list[Change]:
    """Return what changed of one case."""
    if "stopped" in old or "stopped" in new:
        return []
    if "refused" in old or "refused" in new:
        if "refused" in old and "refused" in new:
            return []
        worse = "refused" in new
        said = f"is refused now: {new['refused']}" if worse else f"is no longer refused (it was: {old['refused']})"
        return [Change(name, "refused", 1.0, worse, said)]
    found = []
    for figure, size in distances(old, new).items():
        if size and (said := _said(figure, old, new)):
            found.append(Change(name, figure, size, _more(figure, old, new), said))
    return found


def distances(old: JsonMapping, new: JsonMapping) -> dict[str, float]:
    """Return how far apart two lines are, by figure, as a share; 0 where they differ by less than counts.

    Of one that was stopped nothing is known.
    """
    if "stopped" in old or "stopped" in new:
        return {}
    if "refused" in old or "refused" in new:
        return {"refused": float(("refused" in old) != ("refused" in new))}
    step, memory = (_share(old[key], new[key]) for key in ("step_ms", "peak_gb"))
    return {"step": step if step > WORSE - 1 else 0.0, "memory": memory if memory > WORSE - 1 else 0.0,
            "collectives": _sent(old, new), "kernels": _launched(old, new)}


def _share(old: float, new: float) -> float:
    return abs(new - old) / old if old else float(new != old)


def _sent(old: JsonMapping, new: JsonMapping) -> float:
    """Return the bytes by kind that differ, as a share of all; if these hardly do, that of the collectives' number."""
    kinds = old["collectives"].keys() | new["collectives"].keys()
    for unit in ("mb", "times"):
        before, after = ({kind: line["collectives"].get(kind, {}).get(unit, 0.0) for kind in kinds}
                         for line in (old, new))
        total = max(sum(before.values()), sum(after.values()))
        share = sum(abs(after[kind] - before[kind]) for kind in kinds) / total if total else 0.0
        if share > WORSE - 1:
            return share
    return 0.0


def _launched(old: JsonMapping, new: JsonMapping) -> float:
    """Return the kernels that differ, as a share of all: any of libraries and own ones, and many fusions."""
    names = old["kernels"].keys() | new["kernels"].keys()
    before, after = ({name: line["kernels"].get(name, 0) for name in names} for line in (old, new))
    total = max(sum(before.values()), sum(after.values()), 1)
    differ = {name: abs(after[name] - before[name]) for name in names}
    calls = sum(count for name, count in differ.items() if _is_call(name))
    rest = sum(count for name, count in differ.items() if not _is_call(name))
    return (calls + rest) / total if calls or rest > FUSIONS * total else 0.0


def _is_call(name: str) -> bool:
    """Return whether a kernel is a library's or an own one, which programs call by name."""
    return not name.replace("-", "").isalpha() or "attention" in name


def _more(figure: str, old: JsonMapping, new: JsonMapping) -> bool:
    """Return whether a figure became worse; other kernels are neither better nor worse."""
    key = {"step": "step_ms", "memory": "peak_gb"}.get(figure)
    if key:
        return new[key] > old[key]
    if figure == "collectives":
        sent = [sum(kind["mb"] for kind in line["collectives"].values()) for line in (old, new)]
        return sent[1] > WORSE * sent[0]
    return False


def _said(figure: str, old: JsonMapping, new: JsonMapping) -> str:
    if figure == "step":
        return f"the simulated step takes {_from(old['step_ms'], new['step_ms'], 'ms')}"
    if figure == "memory":
        return f"the compiler takes {_from(old['peak_gb'], new['peak_gb'], 'GB of memory')}"
    if figure == "collectives":
        empty = {"times": 0, "mb": 0.0}
        kinds = sorted(old["collectives"].keys() | new["collectives"].keys())
        pairs = [(kind, old["collectives"].get(kind, empty), new["collectives"].get(kind, empty)) for kind in kinds]
        parts = [f"{kind} {a['times']:.0f} x, {a['mb']:,.1f} MB to {b['times']:.0f} x, {b['mb']:,.1f} MB"
                 for kind, a, b in pairs if a != b]
        return f"collectives of a step: {'; '.join(parts)}"
    names = sorted(old["kernels"].keys() | new["kernels"].keys())
    counts = [(name, old["kernels"].get(name, 0), new["kernels"].get(name, 0)) for name in names]
    differ = sorted((one for one in counts if one[1] != one[2]), key=lambda one: -abs(one[2] - one[1]))
    parts = [f"{name} {before} to {after}" for name, before, after in differ[:SHOWN]]
    more = [f"and {len(differ) - SHOWN} kinds more"] if len(differ) > SHOWN else []
    return f"kernels of a step: {'; '.join([*parts, *more])}"


def _from(old: float, new: float, unit: str) -> str:
    digits = 1 if old >= 9.95 else 3
    return f"{old:,.{digits}f} to {new:,.{digits}f} {unit} ({new / old - 1:+.1%})"


def sentences(found: list[Change], old: Lines, new: Lines) -> list[str]:
    """Return what changed as lines of text, with what was not compared and what differs beside the compilers."""
    versions = [f"{name} {old.versions.get(name, 'absent')} to {new.versions.get(name, 'absent')}"
                for name in {**old.versions, **new.versions} if old.versions.get(name) != new.versions.get(name)]
    both = old.cases.keys() & new.cases.keys()
    lines = [f"{', '.join(versions) or 'the same versions'}: {len({one.case for one in found})} of {len(both)} cases "
             "changed; times are simulated"]
    flags = [set(lines.environment["xla_flags"]) for lines in (old, new)]
    lines += [f"XLA_FLAGS of the {age} one alone: {' '.join(sorted(mine - other))}"
              for age, mine, other in (("old", *flags), ("new", *flags[::-1])) if mine - other]
    if any(old.cases[name]["jaxtrain"] != new.cases[name]["jaxtrain"] for name in both):
        lines.append("jaxtrain's code differs, too: what changed may be its own doing")
    lines += [f"{'worse ' if one.worse else '      '}{one.case}: {one.says}" for one in found]
    return lines + [f"{name}: {why}" for name, why in not_compared(old.cases, new.cases).items()]
