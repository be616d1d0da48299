"""Run many drawn cases of hostile input: `python -m tests.data.chat.test_template_fuzz --cases=500`."""

import argparse
import random
import resource
import sys
import tempfile
import threading
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

GROWTH = 2**30  # bytes of memory that all cases of a test may add to this process
Case = Callable[[random.Random, Path], str]  # makes one case in a folder, tries it and returns how it ended


def run(case: Case, cases: range, folder: Path, seconds: float = 120.0) -> Counter[str]:
    """Return how often each outcome came; raises an AssertionError for a hang, an exception or growth."""
    outcomes: Counter[str] = Counter()
    before = _peak()
    for seed in cases:
        place = folder / str(seed)
        place.mkdir()
        found: list[str | BaseException] = []
        thread = threading.Thread(target=_tried, args=(case, random.Random(seed), place, found), daemon=True)
        thread.start()
        thread.join(seconds)
        assert found, f"case {seed} does not end"
        if isinstance(found[0], BaseException):
            raise AssertionError(f"case {seed}: {found[0]!r}") from found[0]
        assert _peak() - before < GROWTH, f"case {seed} takes {(_peak() - before) >> 20:,} MB"
        outcomes[found[0]] += 1
    return outcomes


def with_memory(do: Callable[[], Any], watch: AbstractContextManager[Any], seconds: float) -> tuple[Any, int]:
    """Return what `do` gave or raised on a thread of its own, and how many bytes `tracemalloc` saw it take."""
    found: list[Any] = []

    def run() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found.append(do())
            except BaseException as error:
                found.append(error)

    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    with watch:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
    return (found or [TimeoutError("it does not end")])[0], tracemalloc.get_traced_memory()[1] - before


def _tried(case: Case, rng: random.Random, folder: Path, found: list[str | BaseException]) -> None:
    try:
        found.append(case(rng, folder))
    except BaseException as error:
        found.append(error)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(case: Case) -> None:
    """Run as many cases as the command line says, and print the outcomes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    flags = parser.parse_args()
    start, before = time.monotonic(), _peak()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run(case, range(flags.first, flags.first + flags.cases), Path(folder))
    print(f"{flags.cases} cases in {time.monotonic() - start:.0f} s, {(_peak() - before) >> 20} MB more, "
          + ", ".join(f"{count} {what}" for what, count in outcomes.most_common()))
