"""Find which of the compiler's options is to blame for a change: the fewest that, set back, undo it.

Candidates are the options whose values differ between two environments: defaults of XLA's versions, XLA_FLAGS, and
what is passed with the program. The case is compiled again in the new environment with some of them set back, until
no smaller set undoes the change (`smallest_set.py`).
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.errors import UserError
from tools.release_radar import changes
from tools.release_radar.recording import Lines
from tools.release_radar.smallest_set import smallest

Compile = Callable[[Mapping[str, str]], JsonMapping]  # options to their values -> the line of a case
ENOUGH = 0.2  # share of a change that options must explain together to be blamed
MOST = 0.9  # of what all options together undo, which the fewest must undo
OF_PLATFORMS = {"cuda": ("xla_cpu_", "xla_tpu_"), "tpu": ("xla_cpu_", "xla_gpu_"), "cpu": ("xla_gpu_", "xla_tpu_")}


@dataclass
class Verdict:
    """The options found to be to blame for the change of a figure, and how they were found."""

    case: str
    figure: str
    says: str  # what changed
    candidates: dict[str, list[str]]  # options to their old and new values
    untried: dict[str, str]  # options that cannot be set back, and why
    blamed: list[str] = field(default_factory=list)
    undone: float = 0.0  # the share of the change that those blamed undo
    undone_by_all: float = 0.0
    compiles: int = 0

    def sentences(self) -> list[str]:
        """Return the verdict in plain sentences."""
        lines = [f"{self.case}: {self.says}"]
        if self.blamed:
            named = [f"{name} (it was {_shown(old)} and is {_shown(new)})"
                     for name, (old, new) in self.candidates.items() if name in self.blamed]
            lines.append(f"  to blame: {', '.join(named)}; set back, {self.undone:.0%} of the change of the "
                         f"{self.figure} is undone ({len(self.candidates)} candidates, {self.compiles} compiles)")
        else:
            lines.append(f"  no option is to blame: all {len(self.candidates)} candidates set back together undo "
                         f"{self.undone_by_all:.0%} of the change ({self.compiles} compiles), so it comes from code")
        lines += [f"  not tried: {name}: {why}" for name, why in self.untried.items()]
        return lines

    def line(self) -> JsonObject:
        """Return the verdict as a line."""
        return asdict(self)


def candidates(old: Lines, new: Lines, name: str, platform: str, more: Mapping[str, str]) -> tuple[
        dict[str, list[str]], dict[str, str]]:
    """Return the options of a case that differ, with their old and new values, and those that cannot be set back.

    `more`: further ones with their old values, such as those of libtpu, whose defaults cannot be read.
    """
    before, after = (lines.environment["options"] | lines.cases[name].get("compiler_options", {})
                     for lines in (old, new))
    found, untried = {}, {}
    for option in sorted(before.keys() | after.keys()):
        was, now = _text(before.get(option)), _text(after.get(option))
        if was == now or option.startswith(OF_PLATFORMS[platform]):
            continue
        if option not in after:
            untried[option] = "XLA has it no more"
        elif option not in before and option in new.environment["options"]:
            if after[option] is True:  # what it turns on did not exist
                found[option] = ["false", now]
            else:
                untried[option] = f"it is new; its value is {_shown(now)}"
        elif not was and option not in flags_of(new) | new.cases[name].get("compiler_options", {}):
            untried[option] = "it was empty, which cannot be set"
        else:
            found[option] = [was, now]
    found |= {option: [was, found.get(option, ["", _text(after.get(option))])[1]] for option, was in more.items()}
    return found, {option: why for option, why in untried.items() if option not in more}


def flags_of(lines: Lines) -> dict[str, str]:
    """Return the words of XLA_FLAGS by the option that each sets."""
    return {word.lstrip("-").partition("=")[0]: word for word in lines.environment["xla_flags"]}


def flags_with(options: Iterable[str], old: Lines, new: Lines) -> list[str]:
    """Return the new environment's XLA_FLAGS with those of these options as they were."""
    before, after, options = flags_of(old), flags_of(new), set(options)
    return [*(word for name, word in after.items() if name not in options),
            *(word for name, word in before.items() if name in options)]


def blame(old: Lines, new: Lines, case: str, platform: str, compile_with: Compile, figure: str = "",
          more: Mapping[str, str] | None = None) -> Verdict:
    """Find the options to blame for the change of a case's figure; by default, of the one that matters most.

    Raises:
        UserError: the case did not change, or is not compiled here to what the new line says.
    """
    for lines in (old, new):
        if case not in lines.cases:
            raise UserError("--case", f"{lines.name} has no {case!r}", "record it, or name another case")
    was, now = old.cases[case], new.cases[case]
    found = [one for one in changes.of_case(case, was, now) if figure in ("", one.figure)]
    if not found:
        raise UserError("--case", f"{case} did not change{f' in its {figure}' if figure else ''}",
                        "`radar compare` says which cases did")
    change = min(found, key=lambda one: one.rank)
    options, untried = candidates(old, new, case, platform, more or {})
    verdict = Verdict(case, change.figure, change.says, options, untried)
    if options:
        _search(verdict, was, now, compile_with)
    return verdict


def _search(verdict: Verdict, was: JsonMapping, now: JsonMapping, compile_with: Compile) -> None:
    """Compile with options set back until the fewest are found that undo the change, and complete the verdict."""
    whole = changes.distances(was, now)[verdict.figure]
    undone_by: dict[frozenset[str], float] = {}

    def undone(names: frozenset[str]) -> float:
        """Return the share of the change that is undone with these options set back; of a failure, less than none."""
        if names not in undone_by:
            verdict.compiles += 1
            made = compile_with({name: verdict.candidates[name][0] for name in sorted(names)})
            undone_by[names] = 1 - changes.distances(was, made).get(verdict.figure, 2 * whole) / whole
            verdict.untried |= _not_taken(made, names)
        return undone_by[names]

    if abs(undone(frozenset())) > MOST / 2:
        raise UserError("NEW", f"{verdict.case} is compiled here to something else than it says",
                        "record it again in this environment")
    undone(frozenset(verdict.candidates))
    while refused := verdict.untried.keys() & verdict.candidates.keys():
        verdict.candidates = {name: one for name, one in verdict.candidates.items() if name not in refused}
        undone(frozenset(verdict.candidates))
    every = list(verdict.candidates)
    verdict.undone_by_all = max(0.0, undone(frozenset(every)))
    if verdict.undone_by_all < ENOUGH:
        # One of them may fail to compile, or make up for another: each may still do it alone.
        alone = max(every, key=lambda name: undone(frozenset([name])), default="")
        every = [alone] if alone and undone(frozenset([alone])) >= ENOUGH else []
    if every:
        goal = MOST * undone(frozenset(every))
        verdict.blamed = smallest(every, lambda names: undone(names) >= goal)
        verdict.undone = undone(frozenset(verdict.blamed))


def _not_taken(made: JsonMapping, names: frozenset[str]) -> dict[str, str]:
    """Return the options that XLA refused by name."""
    said = made.get("refused", "") if "compiler_options" in made.get("refused", "") else ""
    return {name: "XLA does not take the old value" for name in names & set(re.findall(r"\w+", said))}


def _text(value: Any) -> str:
    """Return a value as options are given: true, false, numbers, names with commas between."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ",".join(sorted(map(_text, value)))
    return f"{value}".lower() if isinstance(value, bool) else f"{value}"


def _shown(value: str) -> str:
    return value or "left to the compiler"
