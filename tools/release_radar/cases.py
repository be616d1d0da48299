"""The cases that the radar compiles: those of docs/measurements/hlo.json, and a few that take seconds."""

import fnmatch
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxtrain.errors import UserError, nearest_few
from jaxtrain.plan.targets import parse
from tools.benchmarks.bench_hlo import CASES, ROOT

FOLDER = ROOT / "docs" / "measurements" / "radar"
SMALL = FOLDER / "small_cases.json"  # steps of few layers, for TPUs and CPUs too, where the others take long


@dataclass(frozen=True)
class Case:
    """One step to compile: a config, its overrides, and devices."""

    name: str
    config: str  # a file of configs/, with its variant
    target: str
    overrides: dict[str, Any]

    @property
    def platform(self) -> str:
        """The platform of its devices: "cuda", "tpu" or "cpu"."""
        return parse(self.target)[0].platform

    def with_layers(self, layers: int) -> "Case":
        """Return the case with so many layers; its name says so."""
        return replace(self, name=f"{self.name} with {layers} layers",
                       overrides={**self.overrides, "model.num_layers": layers})

    def with_options(self, options: dict[str, Any]) -> "Case":
        """Return the case with further options of the compiler."""
        changes = {f"train.compiler_options.{name}": value for name, value in options.items()}
        return replace(self, overrides={**self.overrides, **changes})

    def as_json(self) -> str:
        """Return the case as one line of JSON."""
        return json.dumps(asdict(self))


def every() -> dict[str, Case]:
    """Return all cases by name."""
    found = json.loads(SMALL.read_text()) | json.loads(CASES.read_text())
    return {name: Case(name, one["config"], one["target"], one["overrides"]) for name, one in found.items()}


def chosen(patterns: str) -> list[Case]:
    """Return the cases whose names match one of some patterns, with commas between: `8b_2_layers_*,124m_h200x1`."""
    known, found = every(), dict[str, Case]()
    for pattern in filter(None, patterns.split(",")):
        matching = fnmatch.filter(known, pattern)
        if not matching:
            raise UserError("--cases", f"no case is called {pattern!r}", _meant(pattern, known))
        found |= {name: known[name] for name in matching}
    return list(found.values())


def named(name: str) -> Case:
    """Return the case of this name, which may end in "with N layers"."""
    whole, _, layers = name.removesuffix(" layers").partition(" with ")
    known = every()
    if whole not in known:
        raise UserError("--case", f"no case is called {whole!r}", _meant(whole, known))
    return known[whole].with_layers(int(layers)) if layers else known[whole]


def _meant(name: str, known: dict[str, Case]) -> str:
    return nearest_few(name, known, f"see {CASES.relative_to(ROOT)}")
