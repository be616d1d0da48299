"""A real Ray on this machine: a head, and nodes that can be killed, each with one CPU, in a folder of its own.

Its Jobs API needs `pip install 'ray[default]'`.
"""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.launch.process_trees import descendants, kill
from tests.launch.waiting import LIMIT
from tests.tiny import free_address

_RAY = [sys.executable, "-m", "ray.scripts.scripts"]
_STARTS = 4  # of a node: `ray start` gives up after 30 seconds, also on a machine that is only busy


def _port() -> str:
    return free_address().rpartition(":")[2]


class Raylets:
    """A running cluster; a context manager that ends it."""

    def __init__(self, folder: Path, **variables: str):
        self.folder, self.started, self.words, self.starts = folder, {}, {}, Counter()
        self.of: dict[str, set[int]] = {}  # the processes that a node was seen to have
        self.gcs, self.dashboard = f"127.0.0.1:{_port()}", f"http://127.0.0.1:{_port()}"
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
            "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "HOME": f"{folder}", **variables}

    def __enter__(self) -> "Raylets":
        try:
            self._start("head", "--head", f"--port={self.gcs.rpartition(':')[2]}", f"--temp-dir={self.folder}",
                        "--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard.rpartition(':')[2]}",
                        "--no-monitor")
            self._wait()
            self.add("second")  # one after the other, for they choose names in one folder
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for name in sorted(self.started, key=lambda name: name == "head"):
            self.kill(name)

    def fill(self) -> None:
        """Start nodes until there are two, if a test before this one left fewer."""
        while len(self.started) < 2:
            self.add(f"further-{sum(self.starts.values())}")

    def add(self, name: str) -> None:
        """Start a node, and wait for it."""
        self._start(name, f"--address={self.gcs}")
        self._wait()

    def kill(self, name: str) -> None:
        """Kill all processes of a node, as if its power failed; those of the head too."""
        process = self.started.pop(name)
        kill([process.pid, *descendants(process.pid)])
        process.wait()

    def _start(self, name: str, *words: str) -> None:
        self.words[name] = words
        self.starts[name] += 1
        with open(self.folder / f"{name}.log", "ab") as log:
            self.started[name] = subprocess.Popen(
                [*_RAY, "start", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=1",
                 "--object-store-memory=100000000", f"--dashboard-agent-listen-port={_port()}",
                 f"--metrics-export-port={_port()}", "--min-worker-port=0", "--max-worker-port=0",
                 "--disable-usage-stats", "--include-log-monitor=False", *words], stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, env=self.environment, start_new_session=True)

    def _wait(self) -> None:
        """Wait until all nodes that were started are there."""
        code = ("import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='error'); "
                "sys.exit(sum(node['Alive'] for node in ray.nodes()) != int(sys.argv[2]))")
        end = time.monotonic() + LIMIT
        while not self._answers() or subprocess.run(
                [sys.executable, "-c", code, self.gcs, f"{len(self.started)}"], env=self.environment,
                capture_output=True, timeout=LIMIT).returncode:
            time.sleep(0.5)
            dead = [name for name in [*self.started] if not self._lives(name)]
            if dead:  # Ray's own start failed, which says nothing of jaxtrain
                warnings.warn(f"Ray did not start a node in {_STARTS} attempts:\n{self._logs(dead)}", stacklevel=3)
                for name in dead:
                    self.kill(name)
                pytest.skip(f"Ray did not start a node in {_STARTS} attempts; the warnings have its logs")
            assert time.monotonic() < end, f"there are no {len(self.started)} nodes: {self._logs(self.started)}"

    def _logs(self, names: Iterable[str]) -> str:
        """Return the ends of what `ray start` of these nodes said, and of the newest logs of nodes and of the head."""
        newest = sorted(self.folder.glob("session_latest/logs/*"), key=lambda path: path.stat().st_mtime)
        paths = [self.folder / f"{name}.log" for name in names] + [
            path for path in newest if path.name.startswith(("raylet", "gcs_server"))][-3:]
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in paths)

    def _lives(self, name: str) -> bool:
        """Return whether a node is there or is started again, and not as often as it may have been."""
        process = self.started[name]
        seen = self.of.setdefault(name, set())
        seen.update(descendants(process.pid))
        if process.poll() is None:
            return True
        if self.starts[name] == _STARTS:
            return False
        kill(seen)  # what it has left
        seen.clear()
        self._start(name, *self.words[name])
        return True

    def _answers(self) -> bool:
        host, _, port = self.dashboard.removeprefix("http://").rpartition(":")
        with contextlib.suppress(OSError):
            socket.create_connection((host, int(port)), timeout=5).close()
            return True
        return False


def missing() -> str:
    """Return the package that is not installed; "": none."""
    return next((name for name in ("ray", "aiohttp_cors", "opencensus") if importlib.util.find_spec(name) is None), "")
