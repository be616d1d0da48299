"""Check this machine for problems that make training fail or slow it down.

    jaxtrain doctor
    jaxtrain doctor --workdir=DIR --json

Prints one line per finding, with its fix. Exit status 0: training would work; 1: a check FAILs; 2: the command line
is wrong.
"""

import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from jaxtrain.doctor import (
    child,
    devices,
    environment,
    file_systems,
    installed_versions,
    machine,
    network,
    nvidia,
    speed,
)
from jaxtrain.doctor.finding import Finding, guarded
from jaxtrain.doctor.xla_flags import unknown_flags
from jaxtrain.errors import UserError, tell
from jaxtrain.commands.flags import Parser, command, parser_of

_WITHOUT, _WITH = 55.0, 240.0  # seconds in total without an accelerator, and with one


def findings(workdir: str, coordinator: str | None) -> Iterator[Finding]:
    """Run all checks and yield their findings, each as soon as it is done."""
    environ = dict(os.environ)
    accelerator = nvidia.present() or any(Path("/dev").glob("accel*")) or Path("/dev/vfio").exists()
    budget = child.Budget(_WITH if accelerator else _WITHOUT)
    host = network.split(coordinator)[0] if coordinator else ""
    several = network.several_hosts(environ, host)
    cuda: list[int] = []
    gpus: list[nvidia.Gpu] = []

    def packages() -> list[Finding]:
        installed = installed_versions.Installed.here()
        cuda.extend(installed.cuda())
        return [*installed_versions.versions(installed), *installed_versions.library_path(environ, cuda)]

    def driver() -> list[Finding]:
        found, refused = nvidia.here()
        gpus.extend(found)
        return [*refused, *nvidia.gpus(gpus, cuda, environ)]

    def workdir_is() -> list[Finding]:
        return file_systems.files(child.run("file_systems", workdir, seconds=15), _text("/proc/mounts"), several)

    def computing() -> list[Finding]:
        found, unknown = [], []
        for _ in range(2):
            around = environment.for_probe(environ, unknown)
            outcome = child.run("probe", seconds=budget.most(_WITH) - 1, environment=around)
            if not (unknown := unknown_flags(outcome.stderr)):
                break
            found += devices.failed(outcome, environ)  # and once more without the unknown flags
        found += devices.devices(outcome, environ, cuda, nvidia.present() or bool(gpus))
        return [*found, *speed.speed(outcome), *file_systems.cache(outcome.measured.get("cache", "://"))]

    checks: list[tuple[str, Callable[[], list[Finding]], float]] = [
        ("versions", packages, 15),
        ("driver", driver, 50),
        ("environment", lambda: environment.environment(
            environ, len(gpus), network.interfaces(), network.infiniband()), 5),
        ("processes", lambda: environment.processes(environ), 15),
        ("host", lambda: machine.machine(machine.here(), len(nvidia.visible(gpus, environ))), 5),
        ("workdir", workdir_is, 20),
        ("host name", lambda: network.hostname(socket.gethostname(), several), 5),
        ("proxy", lambda: network.proxies(environ, host if several else ""), 5),
        ("coordinator", lambda: network.coordinator(coordinator) if coordinator else [], 15),
        ("devices", computing, _WITH),
    ]
    for name, check, seconds in checks:
        yield from guarded(name, check, budget.most(seconds))


def _text(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


def parser() -> Parser:
    """Return the parser of the command line."""
    made = parser_of("doctor", __doc__)
    made.add_argument("--workdir", default=".", help="folder whose file system to check; default: the current one")
    made.add_argument("--coordinator", help="host:port of process 0, for runs of several processes; default: "
                                                     "JAX_COORDINATOR_ADDRESS")
    made.add_argument("--json", action="store_true", help="print one JSON object per finding: level, check, what, fix")
    return made


def main(argv: list[str] | None = None) -> int:
    """Print the findings; return the exit status."""
    counts: Counter[str] = Counter()

    @command()
    def examined(argv: list[str] | None) -> None:
        flags = parser().parse_args(argv)
        if "://" in flags.workdir:
            raise UserError("--workdir", "a workdir is a folder", "give one; a URL can be --config.checkpoint.mirror")
        coordinator = flags.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
        if coordinator:
            network.split(coordinator)
        for finding in findings(flags.workdir, coordinator):
            counts[finding.level] += 1
            tell(json.dumps(asdict(finding)) if flags.json else finding, flush=True)
        if not flags.json:
            tell(", ".join(f"{counts[level]} {level}" for level in ("ok", "note", "warn", "FAIL")))

    try:
        return examined(argv) or int(bool(counts["FAIL"]))
    except BrokenPipeError:  # the reader of a pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
