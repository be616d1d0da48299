"""A run that is made again by other code: a process of its own with another checkout, or another Python.

The process has the same `Side`, and is told what to call over its standard input. Both ends are this program's own.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np

from jaxtrain.base.annotations import PyTree
from jaxtrain.bisection.operations import Trace
from jaxtrain.bisection.sides import Shape, Side
from jaxtrain.errors import UserError
from jaxtrain.train_step.state import TrainState


@dataclass(eq=False)
class ElsewhereSide(Side):
    """A side whose steps another process makes."""

    source: str = ""  # the workdir or the config, as that process is told it
    code: str = ""  # a checkout; "": the code here
    python: str = ""  # "": the Python here
    letter: str = "b"  # of the flags that name them

    @cached_property
    def _process(self) -> subprocess.Popen:
        paths = [self.code] * bool(self.code) + [os.environ.get("PYTHONPATH", "")] * bool(os.environ.get("PYTHONPATH"))
        if self.code and not (Path(self.code) / "jaxtrain/bisection/other_code.py").is_file():
            raise UserError(f"--code_{self.letter}", f"{self.code} is no checkout of jaxtrain that has this command",
                            "give one that is as new, such as by git worktree add FOLDER COMMIT")
        try:
            return subprocess.Popen([self.python or sys.executable, "-m", __name__], stdin=subprocess.PIPE,
                                    stdout=subprocess.PIPE, cwd=None, env=os.environ | {
                                        "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"})
        except OSError as error:
            raise UserError(f"--python_{self.letter}", f"{self.python} cannot be started ({error.strerror})",
                            "give VENV/bin/python") from None

    def _call(self, method: str, *args: object) -> PyTree:
        process = self._process
        try:
            _put(process.stdin, (self.source, method, args))
            failed, found = _get(process.stdout)
        except (OSError, EOFError):
            raise UserError(self.name, "the process that makes its steps has ended", "see what it says above") from None
        if failed:
            raise UserError(self.name, found, "run it there by itself to see more")
        return found

    @property
    def placement(self) -> str:
        """Its mesh and layout as text."""
        return self._call("placement")

    @cached_property
    def start(self) -> Mapping[str, np.ndarray]:
        """The parameters before the first step, by name."""
        return self._call("start")

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """Return the batch before this many steps, on the host."""
        return self._call("batch", step)

    def state(self, step: int) -> TrainState:
        """Return the state after this many steps, on the host."""
        return self._call("state", step)

    def made_again(self, start: int, stop: int) -> list[dict[str, float]]:
        """Return the metrics of these steps, each made again."""
        return self._call("made_again", start, stop)

    def arrays(self) -> dict[str, Shape]:
        """Return the shape and the dtype of each array of the state."""
        return self._call("arrays")

    def traced(self, state: TrainState, batch: PyTree) -> Trace:
        """Return the operations of a step on one device, in float64."""
        return self._call("traced", state, batch)

    def unrepeatable(self) -> str:
        """Return why its recorded steps cannot be made again by the step alone; "": they can."""
        return self._call("unrepeatable")

    def wrong_on_mesh(self, state: TrainState, batch: PyTree) -> tuple[str, list[str]] | None:
        """Return in what its mesh does not give the numbers of one device."""
        return self._call("wrong_on_mesh", state, batch)


def _put(line: IO[bytes] | None, content: object) -> None:
    assert line
    pickle.dump(content, line)
    line.flush()


def _get(line: IO[bytes] | None) -> PyTree:
    assert line
    return pickle.load(line)


def work() -> None:
    """Answer calls until there are no more."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no answer
    from jaxtrain.config.load import load_config

    side = None
    while True:
        try:
            source, method, args = _get(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if side is None:
                side = Side.of(source if Path(source).is_dir() else load_config(source), source, {})
            found = getattr(side, method)
            _put(answers, (False, found(*args) if callable(found) else found))
        except Exception as error:
            _put(answers, (True, error.reason if isinstance(error, UserError) else f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    work()
