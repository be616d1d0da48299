"""Commands that start at once: each is a fork of a process that has imported what takes long, nothing of jaxtrain."""

import functools
import itertools
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest


class Forks:
    """Runs Python's command lines, one after the other or several at once."""

    def __init__(self, folder: Path):
        """The folder is for what they print."""
        self._folder, self._numbers = folder, itertools.count()
        self._process = subprocess.Popen([sys.executable, "-m", "tests.forked"], cwd=Path(__file__).parents[1],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, words: list[str], cwd: Path, env: dict[str, str], timeout: int) -> subprocess.CompletedProcess:
        """Run what follows the interpreter: `-m module ...`, `-c code ...` or `script.py ...`."""
        started = self.start(words, cwd, env, timeout)
        out, err = started.communicate()
        if started.returncode == -signal.SIGALRM:
            pytest.fail(f"{words} took more than {timeout} seconds\n{out[-2000:]}\n{err[-3000:]}")
        return subprocess.CompletedProcess(words, started.returncode, out, err)

    def start(self, words: list[str], cwd: Path, env: dict[str, str], timeout: int = 1800) -> "Started":
        """Start what follows the interpreter."""
        number = next(self._numbers)
        printed = [self._folder / f"{number}-{name}" for name in ("stdout", "stderr")]
        pid = self.ask(words=words, cwd=str(cwd), env=env, printed=[*map(str, printed)], timeout=timeout)
        return Started(self, int(pid), printed)

    def ask(self, **request) -> str:
        """Return the answer of the process that forks."""
        assert self._process.poll() is None, "the process that forks commands has ended"
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process that forks commands ended while it was asked for {request}"
        return answer.strip()

    def end(self) -> None:
        """Wait for the process, which has nothing more to do."""
        self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)


class Started:
    """A process that runs; what tests use of `subprocess.Popen`."""

    def __init__(self, forks: Forks, pid: int, printed: list[Path]):
        """The paths are of what it prints."""
        self._forks, self._printed, self.pid, self.returncode = forks, printed, pid, None

    def __enter__(self) -> "Started":
        """It ends with the block."""
        return self

    def __exit__(self, *_) -> None:
        """End it."""
        self.kill()
        self.wait()

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        if self.returncode is None and (answer := self._forks.ask(ended=self.pid)):
            self.returncode = int(answer)
        return self.returncode

    def wait(self, timeout: float = 1800) -> int:
        """Return its exit status when it has ended."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return self.returncode

    def communicate(self, timeout: float = 1800) -> tuple[str, str]:
        """Return what it has written to stdout and stderr when it has ended."""
        self.wait(timeout)
        return tuple(path.read_text() for path in self._printed)

    def send_signal(self, number: int) -> None:
        """Send it this signal while it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


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
    """To run a command as a process of its own, without the seconds that its imports take."""
    return forks().run


def _serve():
    """Fork for each line and answer with the process's number, or say what has become of one: its exit status.

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
        if "ended" in request:
            child, status = os.waitpid(request["ended"], os.WNOHANG)
            print(os.waitstatus_to_exitcode(status) if child else "", flush=True)
        elif child := os.fork():
            print(child, flush=True)
        else:
            return _become(**request)


def _become(words, cwd, env, printed, timeout):
    """Do what Python does with a command line; SIGALRM ends what takes too long."""
    signal.alarm(timeout)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
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
