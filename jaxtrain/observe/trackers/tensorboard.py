"""TensorBoard: event files in WORKDIR/tensorboard, written by tensorboardX."""

import json
from typing import Any

from jaxtrain.observe.trackers.tracker import IMPORTING, Position, Tracker


class Service(Tracker):
    """Writes every number as a scalar under its own name; can take back what it wrote."""

    imports = "tensorboardX"
    _writer: Any = None

    def begin(self, run, since) -> Position:
        """Open another file, which hides the steps that come again."""
        with IMPORTING:
            from tensorboardX import SummaryWriter

        if self._writer is not None:
            self._writer.close()
        step, with_evaluation = since
        again = step + with_evaluation  # a step whose evaluation is missing comes again
        self._writer = SummaryWriter(str(run.workdir / "tensorboard"), purge_step=max(again, 1))
        for name, text in (("config", run.config), ("run", run.run)):
            self.text(max(again, 1), name, f"```\n{json.dumps(text, indent=1, default=str)}\n```")
        return again - 1, True

    def log(self, lines):
        """Write lines, and wait until the system has them."""
        for line in lines:
            for key, value in line.items():
                if key != "step":
                    self._writer.add_scalar(key, value, line["step"])
        self._writer.flush()

    def text(self, step, name, text):
        """Write a text as Markdown."""
        self._writer.add_text(name, text, step)

    def histogram(self, step, name, counts, edges):
        """Write a histogram; the sums that its averages come from are those of the middles of the bins."""
        middles = (edges[1:] + edges[:-1]) / 2
        self._writer.add_histogram_raw(
            name, min=float(edges[0]), max=float(edges[-1]), num=int(counts.sum()), sum=float(counts @ middles),
            sum_squares=float(counts @ middles**2), bucket_limits=edges[1:].tolist(), bucket_counts=counts.tolist(),
            global_step=step)

    def artifact(self, step, uri, about):
        """Write where the checkpoint is."""
        self.text(step, "checkpoint", f"`{uri}`")

    def finish(self, status):
        """Close the file."""
        self._writer.close()
        self._writer = None
