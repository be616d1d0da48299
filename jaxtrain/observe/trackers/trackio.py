"""trackio: its database on this machine, or the server or Space that TRACKIO_SERVER_URL or TRACKIO_SPACE_ID name."""

import contextlib
import json
import os
import sys
from typing import Any

from jaxtrain.observe.trackers.tracker import IMPORTING, NOTHING, Position, Tracker


class Service(Tracker):
    """Logs each line as a row; a thread of trackio's writes them, twice a second."""

    imports = "trackio"
    _trackio: Any = None
    _run: Any = None

    def begin(self, run, since) -> Position | None:
        """Go on with the run of this name, which has the run's id in it."""
        with IMPORTING:
            import trackio

        self._trackio = trackio
        if self._run is not None:
            self.finish("")
        title = f"{run.name}-{run.id}"
        with contextlib.redirect_stdout(sys.stderr):  # it greets
            self._run = trackio.init(run.project, title, config={**run.config, "run": run.run}, resume="allow",
                                     embed=False, auto_log_cpu=False, auto_log_gpu=False)
        away = any(os.environ.get(name) for name in ("TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID"))
        return None if away else _last(run.project, title)

    def log(self, lines):
        """Log lines as rows."""
        for line in lines:
            self._run.log({key: value for key, value in line.items() if key != "step"}, step=line["step"])

    def text(self, step, name, text):
        """Log a text as Markdown."""
        self._run.log({name: self._trackio.Markdown(text)}, step=step)

    def histogram(self, step, name, counts, edges):
        """Log a histogram."""
        self._run.log({name: self._trackio.Histogram(np_histogram=(counts, edges))}, step=step)

    def artifact(self, step, uri, about):
        """Log where a checkpoint is."""
        self.text(step, "checkpoint", f"`{uri}`")

    def finish(self, status):
        """Wait until all rows are written."""
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()
        self._run = None


def _last(project: str, name: str) -> Position:
    """Return the position of the last line in the database."""
    from trackio.sqlite_storage import SQLiteStorage

    if not SQLiteStorage.get_project_db_path(project).exists():
        return NOTHING
    quoted = name.replace("'", "''")
    rows = SQLiteStorage.query_project(project, "SELECT step, metrics FROM metrics WHERE run_name = "
                                       f"'{quoted}' ORDER BY step DESC, id DESC LIMIT 1000")["rows"]
    lines = [(int(row["step"]), json.loads(row["metrics"]) if isinstance(row["metrics"], str) else row["metrics"])
             for row in rows]
    return max(((step, "eval_loss" in keys) for step, keys in lines
                if any(isinstance(value, int | float) for value in keys.values())), default=NOTHING)
