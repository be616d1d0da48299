"""The checks of `jaxtrain doctor`, in order; each yields findings as soon as it is done."""

import os
import socket
from collections.abc import Callable, Iterator
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
        return [*found, *speed.speed(outcome), *speed.slow_kernels(outcome),
                *file_systems.cache(outcome.measured.get("cache", "://"))]

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
