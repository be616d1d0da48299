"""Metrics of a run that is made up, and what their text says."""

import re

from jaxtrain.observe.ledger import Ledger
from jaxtrain.observe.prometheus.run_metrics import RunMetrics

INFO = {"version": "1", "jax_version": "2", "device_kind": "cpu"}
CONSTANTS = {"processes": 2, "devices": 4, "target_step": 100, "checkpoint_every": 50}


class Clock:
    """A time that tests set."""

    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time


def made(workdir, clock=None):
    """Metrics and the ledger that they read."""
    clock = clock or Clock()
    ledger = Ledger(workdir, every=0, now=clock, wall=lambda: 1000.0)
    return RunMetrics(workdir, ledger, info=INFO, constants=CONSTANTS), ledger, clock


def values(text, run="run"):
    """Return the value of each line, by its name and its own labels."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line).groups()
            common, _, own = labels.partition('host="')
            assert common == f'run="{run}",process="0",', line
            found[name + own.partition('"')[2]] = float(value)
    return found
