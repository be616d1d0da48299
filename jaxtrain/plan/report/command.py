"""The command line that trains with a layout."""

import shlex

from jaxtrain.config.load import diff
from jaxtrain.config.schema import Config
from jaxtrain.plan.report.table import Choice


def command(choice: Choice, source: str, base: Config) -> str:
    """Return the command that trains with exactly this layout; `base` is the config that `source` alone gives.

    Every key that differs is in it: those of the layout, and those that were given to the planner.
    """
    changed = diff(choice.estimate.config, base)
    words = [f"--config={source}", *(f"--config.{key}={value}" for key, (value, _) in changed.items())]
    return " ".join(["python -m jaxtrain.main", *map(shlex.quote, words)])
