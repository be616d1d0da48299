"""Weights & Biases, online or offline as WANDB_MODE says; its own variables (WANDB_API_KEY, ...) tell the rest.

Its steps must grow, and each is one row: so the line of step n is row 2n and an evaluation after it row 2n + 1, and
charts are drawn over `step`.
"""

import netrc
import os
from typing import Any
from urllib.parse import urlsplit

from jaxtrain.observe.trackers import wandb_offline
from jaxtrain.observe.trackers.tracker import IMPORTING, NOTHING, Position, Tracker


class Service(Tracker):
    """Logs lines as rows, with the histograms and samples since the row before."""

    imports = "wandb"
    _wandb: Any = None
    _run: Any = None

    def begin(self, run, since) -> Position:
        """Go on with the run of this id; what wandb would note by itself, arguments and console, stays here."""
        with IMPORTING:
            import wandb

        self._wandb, self._extra = wandb, dict[str, Any]()
        if self._run is not None:
            self._run.finish()
        mode, folder = _mode(), os.environ.get("WANDB_DIR") or str(run.workdir)
        self._run = wandb.init(
            dir=folder, id=run.id, name=run.name, project=os.environ.get("WANDB_PROJECT") or run.project,
            mode=mode, resume="allow", config={**run.config, "run": run.run}, reinit="create_new", save_code=False,
            settings=wandb.Settings(silent=True, console="off", x_disable_meta=True, x_disable_stats=True,
                                    disable_git=True, disable_code=True, disable_job_creation=True, program="jaxtrain"))
        self._run.define_metric("*", step_metric="step")
        row = wandb_offline.last_row(folder, run.id) if mode == "offline" else self._run.step - 1
        return (row // 2, bool(row % 2)) if row > 0 else NOTHING

    def log(self, lines):
        """Log lines, each as a row of its own at once."""
        for line in lines:
            self._run.log({**line, **self._extra}, step=2 * line["step"] + ("eval_loss" in line), commit=True)
            self._extra = {}

    def text(self, step, name, text):
        """Keep a text for the next row."""
        self._extra[name] = self._wandb.Table(columns=["step", "text"], data=[[step, text]])

    def histogram(self, step, name, counts, edges):
        """Keep a histogram for the next row."""
        self._extra[name] = self._wandb.Histogram(np_histogram=(counts, edges))

    def table(self, step, name, columns, rows):
        """Keep a table for the last row."""
        self._extra[name] = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])

    def artifact(self, step, uri, about):
        """Log a version of the run's model that refers to the checkpoint."""
        model = self._wandb.Artifact(f"checkpoint-{self._run.id}", type="model", metadata={**about, "step": step})
        model.add_reference(uri, name=str(step), checksum=False)
        self._run.log_artifact(model, aliases=["latest", f"step-{step}"])

    def finish(self, status):
        """End the run; online that waits for what is being sent."""
        self._run.summary.update({"status": status, **self._extra})
        self._run.finish(exit_code=int(status == "failed"))
        self._run = None


def _mode() -> Any:
    """Return WANDB_MODE; without it, online where credentials are known, for wandb would ask on the terminal."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        known = netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        known = False
    known |= any(name in os.environ for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))
    return os.environ.get("WANDB_MODE") or ("online" if known else "offline")
