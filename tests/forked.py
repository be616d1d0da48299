"""Commands that start at once: each is a fork of a process that has imported what takes long, nothing of jaxtrain."""

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest


class Forks:
    """Runs Python's command lines, one after the other."""

    def __init__(self, folder: Path):
        """The folder is for what they print."""
        self._folder = folder
        self._process = subprocess.Popen([sys.executable, "-m", "tests.forked"], cwd=Path(__file__).parents[1],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, words: list[str], cwd: Path, env: dict[str, str], timeout: int) -> subprocess.CompletedProcess:
        """Run what follows the interpreter: `-m module ...`, `-c code ...` or `script.py ...`."""
        assert self._process.poll() is None, "the process that forks commands has ended"
        printed = [self._folder / name for name in ("stdout", "stderr")]
        print(json.dumps(dict(words=words, cwd=str(cwd), env=env, printed=[*map(str, printed)], timeout=timeout)),
              file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process that forks commands ended while it ran {words}"
        out, err = (path.read_text() for path in printed)
        if int(answer) == -signal.SIGALRM:
            pytest.fail(f"{words} took more than {timeout} seconds\n{out[-2000:]}\n{err[-3000:]}")
        return subprocess.CompletedProcess(words, int(answer), out, err)

    def end(self) -> None:
        """Wait for the process, which has nothing more to do."""
        self._process.communicate()


@pytest.fixture(scope="session")
def forked(tmp_path_factory):
    """To run a command as a process of its own, without the seconds that its imports take."""
    forks = Forks(tmp_path_factory.mktemp("printed"))
    yield forks.run
    forks.end()


def _serve():
    """Fork for each line, and answer with the exit status.

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
        if not (child := os.fork()):
            _leave(_status(**json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


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
