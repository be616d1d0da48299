"""Results of evaluations beside a run: a metrics.jsonl of their own, which the same trackers follow.

The process that trains writes the run's metrics.jsonl, and nobody else may. So what another process measures goes to a
file in a folder of its own, and in trackers to a run of its own.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import jax

from jaxtrain.files.bounded_files import json_lines
from jaxtrain.observe.metrics import Constants, MetricsWriter
from jaxtrain.observe.trackers.tracker import About, Tracker
from jaxtrain.observe.trackers.tracking import Tracking

_ENDS = {None: "finished", KeyboardInterrupt: "stopped", SystemExit: "stopped"}


class ResultsLog:
    """The lines of results, one for each step, in their order; a context manager.

    Trackers get each line once, whenever this process is stopped or killed. Where the results of a step are replaced,
    its line and those of later steps move to `metrics.rolled_back.jsonl`, as where a run goes back to that step.
    """

    def __init__(self, about: About, trackers: Callable[[], Sequence[Tracker]],
                 numbers_of: Callable[[int], Mapping[str, float] | None]):
        """Set up for the files in `about.workdir`, which is there.

        Args:
            trackers: makes those that follow; it is called again where lines were taken back.
            numbers_of: returns the results of a step by the names of metrics; None: there are none.
        """
        self._about, self._trackers, self._numbers_of = about, trackers, numbers_of
        self._lines = dict[int, Mapping[str, float | None]]()

    def __enter__(self) -> "ResultsLog":
        if jax.process_index() == 0:
            self._open()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if jax.process_index() == 0:
            self._close(_ENDS.get(kind, "failed"))

    def add(self, step: int) -> None:
        """Write the line of a step, unless it is there; called in process 0, for each step in order."""
        line = self._line_of(step)
        if line is None or self._lines.get(step) == line:
            return
        if step <= max(self._lines, default=0):
            self._close("rolled_back")
            self._open(before=step)
        self._writer.write_eval(step, self._numbers_of(step) or {})
        self._writer.flush()
        self._lines[step] = line

    def _line_of(self, step: int) -> Mapping[str, float | None] | None:
        numbers = self._numbers_of(step)
        return None if numbers is None else {
            "step": step, **{key: value if math.isfinite(value) else None for key, value in numbers.items()}}

    def _open(self, before: float = math.inf) -> None:
        """Keep the lines that are those of the results, up to the first that is not, and those of steps `before`."""
        self._lines = {}
        for line in json_lines(self._about.workdir / "metrics.jsonl", {"step": int}):
            if line["step"] >= before or line != self._line_of(line["step"]):
                break
            self._lines[line["step"]] = line
        self._tracking = Tracking(self._about, self._trackers())
        self._writer = MetricsWriter(self._about.workdir, start_step=max(self._lines, default=0), last_step=0,
                                     constants=Constants(0), sinks=[self._tracking])
        self._tracking.start()

    def _close(self, status: str) -> None:
        self._writer.close()
        self._tracking.finish(status)
