"""Explain an error of XLA that says the devices' memory ran out: what was asked for, what fills it, what to change."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxtrain.observe import events
from jaxtrain.observe.device_memory import device_memory
from jaxtrain.plan.targets import gigabytes
from jaxtrain.redaction import redacted
from jaxtrain.run import Run

SIGN = "RESOURCE_EXHAUSTED"
FILE = "memory.prof"
_FIGURES = {"memory_limit_bytes": "the limit is", "memory_bytes": "in use", "memory_peak_bytes": "at most so far"}


@contextlib.contextmanager
def explained(run: Run, workdir: Path,
              phase: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext) -> Iterator[None]:
    """Add an explanation to an error about the devices' memory, and write the arrays that live there to memory.prof.

    `phase` is a context manager for what takes longer than a step.
    """
    try:
        yield
    except Exception as error:
        if SIGN in f"{error}":
            with phase("out of memory"):
                error.add_note(_explanation(run, workdir, error))
        raise


def _explanation(run: Run, workdir: Path, error: Exception) -> str:
    asked = redacted(next(line for line in f"{error}".splitlines() if SIGN in line))[:400]
    memory = device_memory()
    figures = ", ".join(f"{said} {gigabytes(memory[name])} GB" for name, said in _FIGURES.items() if name in memory)
    lines = ["", f"The memory of a device ran out: {asked}", *([f"  of a device: {figures}"] if figures else [])]
    from jaxtrain.plan.report import memory_report  # only what has failed needs it

    try:
        lines.append(memory_report.report(run))
    except Exception as trouble:  # the error that is explained counts
        lines.append(f"  nothing more is known ({type(trouble).__name__}: {f'{trouble}'[:200]})")
    path = workdir / (FILE if jax.process_count() == 1 else f"memory-{jax.process_index()}.prof")
    with contextlib.suppress(Exception):
        jax.profiler.save_device_memory_profile(path)
        lines.append(f"  what was alive, by the code that made it: {path} (for pprof)")
    events.record(workdir, "out_of_memory", why=asked, **memory)
    return "\n".join(lines)
