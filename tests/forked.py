"""Commands that start at once: each is a fork of a process that has imported what takes long, nothing of jaxtrain."""

import atexit
import functools
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Forked:
    """A command that runs, with what tests use of `subprocess.Popen`; what it prints goes to files."""

    def __init__(self, ask: Callable[..., Any], pid: int, printed: list[Path]):
        """`ask` is answered by the process that forked it, which alone can wait for it."""
        self._ask, self.pid, self._printed = ask, pid, printed
        self.returncode: int | None = None

    def poll(self, block: bool = False) -> int | None:
        """Return how it ended; None: it runs."""
        if self.returncode is None:
            self.returncode = self._ask(do="wait", pid=self.pid, block=block)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Unless it has ended: until somebody has waited for it, its number is its own."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Return how it ended, or raise as Popen does."""
        end = time.monotonic() + timeout if timeout is not None else None
        while self.poll(block=end is None) is None:
            if end and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"{self.pid}", timeout, *(path.read_text() for path in self._printed))
            time.sleep(0.05)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what it has printed, once it has ended."""
        self.wait(timeout)
        out, err = (path.read_text() for path in self._printed)
        return out, err


class Forks:
    """Runs Python's command lines, and starts some that run side by side."""

    def __init__(self, folder: Path):
        """The folder is for what they print."""
        self._folder, self._number = folder, 0
        self._process = subprocess.Popen([sys.executable, "-m", "tests.forked"], cwd=Path(__file__).parents[1],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, words: list[str], cwd: Path, env: dict[str, str], timeout: int) -> subprocess.CompletedProcess:
        """Run what follows the interpreter: `-m module ...`, `-c code ...` or `script.py ...`."""
        done = self.start(words, cwd, env, timeout)
        done.poll(block=True)
        out, err = done.communicate()
        if done.returncode == -signal.SIGALRM:
            pytest.fail(f"{words} took more than {timeout} seconds\n{out[-2000:]}\n{err[-3000:]}")
        return subprocess.CompletedProcess(words, done.returncode, out, err)

    def start(self, words: list[str], cwd: Path, env: dict[str, str], timeout: int = 0) -> Forked:
        """Start it; SIGALRM ends what takes longer than a timeout that is not 0."""
        self._number += 1
        printed = [self._folder / f"{self._number}-{name}" for name in ("stdout", "stderr")]
        for path in printed:
            path.touch()
        pid = self._ask(do="start", words=[*map(str, words)], cwd=str(cwd), env=env, printed=[*map(str, printed)],
                        timeout=timeout)
        return Forked(self._ask, pid, printed)

    def _ask(self, **request: Any) -> Any:
        assert self._process.poll() is None, "the process that forks commands has ended"
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process that forks commands ended at {request}"
        return json.loads(answer)

    def end(self) -> None:
        """Wait for the process, which has nothing more to do."""
        self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)


@functools.cache
def forks() -> Forks:
    """Return the one of this session."""
    return Forks(Path(tempfile.mkdtemp(prefix="jaxtrain-printed-")))


@pytest.fixture(scope="session", autouse=True)
def _ended():
    """End the process that forks, if there is one, with the session."""
    yield
    if forks.cache_info().currsize:
        forks().end()


@pytest.fixture(scope="session")
def forked():
    """A function that runs a command as a process, or starts it, without the seconds that its imports take."""
    return forks()


def _serve():
    """Fork for each line that starts a command, and wait for one as each other line says.

    JAX has no backend here, so a fork reads its own XLA_FLAGS; JAX's other variables were read by this process.
    """
    import gc

    import flax.nnx  # noqa: F401
    import grain  # noqa: F401
    import jax  # noqa: F401
    import ml_collections  # noqa: F401
    import optax  # noqa: F401
    import orbax.checkpoint  # noqa: F401

    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        if request.pop("do") == "wait":
            ended, status = os.waitpid(request["pid"], 0 if request["block"] else os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        elif not (answer := os.fork()):
            _leave(_status(**request))
        print(json.dumps(answer), flush=True)


def _status(**command) -> int:
    """Run a command line; return the exit status that Python would give it."""
    try:
        _become(**command)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _leave(status: int) -> None:
    """Do what Python does at its end but take its modules apart, of which a fork would first copy the memory."""
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status & 0xFF)


def _become(words, cwd, env, printed, timeout):
    """Do what Python does with a command line; SIGALRM ends what takes too long."""
    signal.alarm(timeout)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[1:1] = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder not in (*sys.path, "")]
    kind, *rest = words
    if kind == "-m":
        sys.argv, sys.path[0] = rest, cwd
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = words, str(Path(kind).parent.absolute())
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    _serve()
