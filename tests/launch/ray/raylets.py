"""A real Ray on this machine: a head without CPUs, and nodes that can be killed, in a folder of its own.

Its Jobs API needs `pip install 'ray[default]'`.
"""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.launch.process_trees import descendants, kill
from tests.tiny import free_address

_RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def _port() -> str:
    return free_address().rpartition(":")[2]


class Raylets:
    """A running cluster; a context manager that ends it."""

    def __init__(self, folder: Path, **variables: str):
        self.folder, self.started = folder, {}
        self.gcs, self.dashboard = f"127.0.0.1:{_port()}", f"http://127.0.0.1:{_port()}"
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
            "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "HOME": f"{folder}", **variables}

    def __enter__(self) -> "Raylets":
        try:
            self._start("head", "--head", f"--port={self.gcs.rpartition(':')[2]}", "--num-cpus=0",
                        "--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard.rpartition(':')[2]}",
                        f"--temp-dir={self.folder}")
            self._wait(1)
            for number, name in enumerate(("first", "second"), start=2):
                self.add(name)  # one after the other, for they choose names in one folder
                self._wait(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for name in sorted(self.started, key=lambda name: name == "head"):
            self.kill(name)

    def add(self, name: str) -> None:
        """Start a node with one CPU."""
        self._start(name, f"--address={self.gcs}", "--num-cpus=1")

    def kill(self, name: str) -> None:
        """Kill all processes of a node, as if its power failed; those of the head too."""
        process = self.started.pop(name)
        kill([process.pid, *descendants(process.pid)])
        process.wait()

    def _start(self, name: str, *words: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.started[name] = subprocess.Popen(
                [*_RAY, "start", "--block", "--node-ip-address=127.0.0.1", "--object-store-memory=100000000",
                 f"--dashboard-agent-listen-port={_port()}", f"--metrics-export-port={_port()}", "--min-worker-port=0",
                 "--max-worker-port=0", "--disable-usage-stats", *words], stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, env=self.environment, start_new_session=True)

    def _wait(self, count: int) -> None:
        code = ("import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='error'); "
                "sys.exit(sum(node['Alive'] for node in ray.nodes()) != int(sys.argv[2]))")
        end = time.monotonic() + 120
        while not self._answers() or subprocess.run([sys.executable, "-c", code, self.gcs, f"{count}"],
                                                    env=self.environment, capture_output=True, timeout=120).returncode:
            time.sleep(0.5)
            dead = [name for name, process in self.started.items() if process.poll() is not None]
            if dead or time.monotonic() > end:
                logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log"))
                raise RuntimeError(f"{', '.join(dead) or 'nothing'} ended, and there are no {count} nodes: {logs}")

    def _answers(self) -> bool:
        host, _, port = self.dashboard.removeprefix("http://").rpartition(":")
        with contextlib.suppress(OSError):
            socket.create_connection((host, int(port)), timeout=5).close()
            return True
        return False


def missing() -> str:
    """Return the package that is not installed; "": none."""
    return next((name for name in ("ray", "aiohttp_cors", "opencensus") if importlib.util.find_spec(name) is None), "")
