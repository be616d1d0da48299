"""The interface of a tracker: what it is told of a run, always on a thread of its own."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxtrain.base.annotations import JsonMapping

Line = Mapping[str, float | int]
Position = tuple[int, bool]  # of a line in metrics.jsonl: its step, and whether it is an evaluation's
NOTHING: Position = (0, False)
IMPORTING = threading.Lock()  # large packages with circular imports fail in two threads at once


@dataclass(frozen=True)
class About:
    """The description of a run for trackers; without credentials, which are hidden in all URLs."""

    id: str  # that of run.json, kept in the workdir
    name: str
    project: str
    workdir: Path
    config: dict[str, dict[str, Any]]  # as config.json has it
    run: dict[str, Any]  # as run.json has it: commit, versions, mesh, hashes


class Tracker:
    """Shows a run elsewhere; a subclass overrides what it takes, `log` at least.

    All calls come from one thread, on which nothing else waits. An exception costs a warning: the tracker is begun
    again later, and gets the lines that it lacks, for metrics.jsonl has them all.
    """

    imports: ClassVar[str] = ""  # the module to import ahead, of a package that has to be installed; "": none

    def begin(self, run: About, since: Position) -> Position | None:
        """Begin a run, or go on with it; return the position of the last line that it has.

        Args:
            since: lines beyond it will come, or come again: a tracker that can forget what it has of them does so.

        Returns:
            `NOTHING` for a run that is new here; None: it cannot tell, and gets each line that it was not yet given.
        """

    def log(self, lines: Sequence[Line]) -> None:
        """Take lines of metrics.jsonl, in their order and without nulls: each has `step`, an evaluation `eval_loss`.

        What was taken should survive the death of this process.
        """

    def text(self, step: int, name: str, text: str) -> None:
        """Take a text, such as a sample of what the model writes."""

    def histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """Take how many numbers of an array lie between edges, one more than there are counts."""

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Take a table, in place of the one of that name before; without another way it is text."""
        cells = [columns, ["---"] * len(columns), *rows]
        self.text(step, name, "\n".join(f"| {' | '.join(map(str, row))} |" for row in cells))

    def artifact(self, step: int, uri: str, about: JsonMapping) -> None:
        """Take a checkpoint by reference: where it is, and what it says of itself."""

    def finish(self, status: str) -> None:
        """End: the run is `finished`, `stopped` (to be resumed), `failed`, `rolled_back` or `superseded`."""


def position(line: JsonMapping) -> Position:
    """Return the place of a line among the others."""
    return int(line["step"]), "eval_loss" in line
