"""Compile one case in this process, and return what its program is: time, memory, collectives, kernels.

The step's time is simulated from the program with one set of rates for all compilers (docs/performance.md): it is a
prediction. All other figures are the compiler's.
"""

from collections import Counter
from typing import Any

import jax

from jaxtrain.errors import UserError
from jaxtrain.plan import hlo, kinds
from jaxtrain.plan.compiler import compile_step
from jaxtrain.plan.instructions import program
from jaxtrain.plan.timeline import Timeline, simulate
from tools.benchmarks import bench_hlo
from tools.release_radar.cases import Case

MARK = "JSON of the case: "  # before what a process for one case prints


def figures(case: Case) -> dict[str, Any]:
    """Compile a case and return its figures; or, as "refused", the sentence with which it was refused."""
    try:
        guess = bench_hlo.planned({"config": case.config, "overrides": case.overrides, "target": case.target})
        real = compile_step(guess.config, guess.target, guess.devices)
    except UserError as error:
        if "is missing" in error.reason:  # the compiler itself, which says nothing of the case
            raise
        return {"refused": f"{error}"}
    except (jax.errors.JAXTypeError, jax.errors.JaxRuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return {"refused": sentence(error)}
    step = simulate(program(real.text), guess.target, guess.mesh)
    least, most = guess.interval or (0.0, 0.0)
    return {"step_ms": 1e3 * step.seconds, "exposed_ms": 1e3 * step.exposed,
            **({"interval": [least / guess.seconds, most / guess.seconds]} if most else {}),
            "peak_gb": real.bytes / 1e9, "collectives": collectives(real.text), "kernels": kernels(step),
            "compiler_options": dict(real.options), "compile_s": real.seconds}


def collectives(text: str) -> dict[str, dict[str, float]]:
    """Return the collectives of a program by kind: executions in a step, and MB of their results on one device."""
    found: dict[str, dict[str, float]] = {}
    for one in hlo.collectives(text):
        kind = found.setdefault(one.kind, {"times": 0, "mb": 0.0})
        kind["times"] += one.times
        kind["mb"] += one.bytes / 1e6
    return found


def kernels(step: Timeline) -> dict[str, float]:
    """Return how often a step runs each kind of kernel: fusions, and library's and own ones by what calls them."""
    found: Counter[str] = Counter()
    for one in step.operations:
        inner = one.instruction.inner or one.instruction
        if kinds.is_sent(one.kind):
            continue
        called = inner.target if inner.opcode == "custom-call" else ""
        found[f"{called} {inner.attention}".strip() or one.instruction.opcode] += round(one.times)
    return dict(sorted(found.items()))


def sentence(error: Exception) -> str:
    """Return what a compiler or JAX said, in one line of at most 300 characters."""
    first = next((line for line in f"{error}".splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first.strip()}"[:300]
