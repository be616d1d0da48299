"""A sink that writes metrics to TensorBoard."""

from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError, install_extra
from jaxtrain.observe.metrics import Record


def summary_writer() -> Any:
    """Return tensorboardX's SummaryWriter class; raises a `UserError` that names the extra if it is missing."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise UserError("observe.trackers", "the package tensorboardX is not installed",
                        f"{install_extra('tensorboard')}, or leave it out") from None
    return SummaryWriter


class TensorBoard:
    """Writes every number of every line as a scalar under its own name; needs the extra `tensorboard`."""

    def __init__(self, directory: str | Path, *, start_step: int = 0):
        """Open the event files of a run that has completed `start_step` steps; later points are hidden."""
        self._writer = summary_writer()(str(directory), purge_step=start_step + 1)

    def write(self, record: Record) -> None:
        """Write a line's numbers at its step; null values are left out."""
        for key, value in record.items():
            if key != "step" and value is not None:
                self._writer.add_scalar(key, value, int(record["step"] or 0))

    def close(self) -> None:
        """Flush and close the event files."""
        self._writer.close()
