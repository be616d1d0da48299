"""The specification of a job for any engine: machines, time, priority, environment; a TOML file, or flags alike.

    name = "gpt-8b"
    nodes = 4
    accelerators_per_node = 8
    time = "24:00:00"
    setup = ["source .venv/bin/activate"]

    [secrets]
    HF_TOKEN = "file:~/.hf-token"
"""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.errors import UserError, nearest
from jaxtrain.redaction import redacted

ENGINES = ("local", "slurm", "kubernetes", "ray", "skypilot", "dstack")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?")  # that of a Kubernetes object, which is the narrowest
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME = re.compile(r"(?:(\d+)-)?(\d{1,3}):(\d\d):(\d\d)")
_TOPOLOGY = re.compile(r"[1-9]\d*(x[1-9]\d*){1,2}")
_OURS = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")  # what engines set
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|HEADERS", re.I)
# What in a URL of a line of bash is not a secret: variables in the places of secrets, and what pip reads behind a URL.
_OPEN = re.compile(r"""(?<=://)(?:[\w.-]*:)?\$(?:\w+|\{\w+\})@|=\$(?:\w+|\{\w+\})(?=[&#\s'"]|$)"""
                   r"""|[#&](?:egg|subdirectory|md5|sha\d+)=[^\s&'"]*""")


def _flag(default: object, about: str) -> Any:
    """Return a field that is also a flag of `jaxtrain launch`, with this help."""
    return field(default=default, metadata={"help": about})


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The resources and settings that a job needs."""

    name: str = _flag("", "name of the job; default: the workdir's name")
    nodes: int = _flag(1, "number of machines; default: 1")
    min_nodes: int = _flag(0, "fewest machines to continue with if others are lost, with resilience.elastic; "
                              "default: all")
    processes_per_node: int = _flag(0, "number of processes per machine; default: one per GPU, or one")
    accelerators_per_node: int = _flag(0, "number of GPUs or TPU chips per machine; default: 0")
    accelerator: str = _flag("", "type of accelerator as the engine names it, such as h100 or tpu-v5p-slice")
    topology: str = _flag("", "topology of a TPU slice, such as 4x4")
    cpus_per_process: int = _flag(0, "CPU cores per process; default: the engine's")
    memory_gb: float = _flag(0.0, "memory per machine in GB; default: the engine's")
    time: str = _flag("", "time limit, as H:MM:SS or D-HH:MM:SS; default: the engine's")
    grace_s: int = _flag(120, "seconds to save a checkpoint before the time limit or when told to stop; default: 120")
    queue: str = _flag("", "Slurm partition, or local queue of Kueue")
    account: str = _flag("", "Slurm account, or service account of Kubernetes pods")
    priority: str = _flag("", "Slurm QoS, or workload priority class of Kueue")
    preemptible: bool = _flag(True, "whether other jobs may preempt it: it then saves, and resumes later; "
                                    "default: true")
    retries: int = _flag(3, "number of restarts after crashes; a job that saved and stopped is restarted as long as "
                            "it makes progress; default: 3")
    image: str = _flag("", "container image")
    setup: tuple[str, ...] = ()  # shell commands before the run, such as one that activates an environment
    mounts: Mapping[str, str] = field(default_factory=dict)  # PATH in the container: a folder, pvc:NAME, or a bucket
    env: Mapping[str, str] = field(default_factory=dict)  # environment variables
    secrets: Mapping[str, str] = field(default_factory=dict)  # variables; file:PATH or secret:NAME/KEY, where they are
    notify: str = _flag("", "address that Slurm notifies when the job ends or fails")
    extra: tuple[str, ...] = ()  # the engine's own: --constraint=infiniband for sbatch, LABEL=VALUE of Kubernetes nodes

    def __post_init__(self):
        for key in ("nodes", "grace_s"):
            _at_least(self, key, 1)
        for key in ("min_nodes", "processes_per_node", "accelerators_per_node", "cpus_per_process", "memory_gb",
                    "retries"):
            _at_least(self, key, 0)
        if self.min_nodes > self.nodes:
            raise UserError("min_nodes", f"{self.min_nodes} is more than nodes={self.nodes}", "give fewer")
        if self.name and not _NAME.fullmatch(self.name):
            raise UserError("name", f"{self.name!r} is not lower-case letters, digits and hyphens, 52 at most",
                            "give one such as gpt-8b")
        if self.accelerator and not self.accelerators_per_node:
            raise UserError("accelerator", f"{self.accelerator} without any", "set accelerators_per_node too")
        if self.accelerators_per_node and self.accelerators_per_node % self.processes:
            raise UserError("processes_per_node", f"{self.processes} processes cannot share "
                            f"{self.accelerators_per_node} accelerators evenly", "give a number that divides them")
        if self.time and not self.seconds > self.grace_s:
            raise UserError("time", f"{self.time} leaves less than grace_s={self.grace_s} to save",
                            "give more, or a smaller grace_s")
        if self.mounts and not self.image:
            raise UserError("mounts", "they are of a container, and there is no image", "set image, or leave them out")
        self._check_topology()
        self._check_texts()

    def _check_topology(self) -> None:
        if not self.topology:
            return
        if not _TOPOLOGY.fullmatch(self.topology):
            raise UserError("topology", f"{self.topology!r} is not the sides of a slice", "write it like 4x4 or 2x2x4")
        chips, given = math.prod(map(int, self.topology.split("x"))), self.nodes * self.accelerators_per_node
        if chips != given:
            raise UserError("topology", f"{self.topology} has {chips} chips, and {self.nodes} x "
                            f"{self.accelerators_per_node} are requested", "set nodes and accelerators_per_node for it")

    def _check_texts(self) -> None:
        for variable in (*self.env, *self.secrets):
            if not _VARIABLE.fullmatch(variable):
                raise UserError("env", f"{variable!r} is not the name of a variable", "use letters, digits and _")
            if variable in _OURS:
                raise UserError("env", f"{variable} is set for each process", "leave it out")
        if both := sorted({*self.env} & {*self.secrets}):
            raise UserError("env", f"{both[0]} is under secrets too", "leave one of them out")
        if wrong := next((path for path in self.mounts if not path.startswith("/") or path == "/"), None):
            raise UserError("mounts", f"{wrong!r} is not a path in the container", "begin it with /")
        for variable, where in self.secrets.items():
            kind, _, place = where.partition(":")
            if kind not in ("file", "secret") or not place or (kind == "secret" and place.count("/") != 1):
                raise UserError(f"secrets.{variable}", "it does not give the place of the secret",
                                "give file:PATH, or secret:NAME/KEY in Kubernetes")
        said = {name: getattr(self, name) for name in ("accelerator", "topology", "queue", "account", "priority",
                                                       "image", "notify")}
        said |= {"extra": " ".join(self.extra)} | {f"mounts.{path}": what for path, what in self.mounts.items()}
        for name, text in said.items():
            if any(not letter.isprintable() for letter in text) or (name != "extra" and " " in text):
                raise UserError(name, f"{text!r} has spaces or line breaks", "leave them out")

    def check_secrets(self) -> None:
        """Refuse secrets where they would be written down; a job that was submitted before is read without this."""
        for variable, value in self.env.items():
            if _SECRET.search(variable) or redacted(value) != value:
                raise UserError(f"env.{variable}", "its value would be in files that others may read",
                                f'name where it is instead: secrets.{variable} = "file:PATH"')
        if any(redacted(line) != line for line in (_OPEN.sub("", line) for line in self.setup)):
            raise UserError("setup", "a URL has credentials in it, which would be in files that others may read",
                            "let it take them from a variable under secrets")

    @property
    def processes(self) -> int:
        """Processes of a node: of a TPU's host one for all chips, unless told otherwise."""
        tpu = self.accelerator.lower().startswith("tpu")
        return self.processes_per_node or (not tpu and self.accelerators_per_node) or 1

    @property
    def devices_per_node(self) -> int:
        """Return as how many devices JAX sees the accelerators of a node; 0: there are none, and it is not known."""
        return self.accelerators_per_node * (2 if "tpu7x" in self.accelerator.lower() else 1)  # each chip is two

    @property
    def seconds(self) -> int:
        """The time limit; 0: the engine's."""
        if not self.time:
            return 0
        found = _TIME.fullmatch(self.time)
        if not found:
            raise UserError("time", f"{self.time!r} is not a time", "write H:MM:SS or D-HH:MM:SS, such as 24:00:00")
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

    def as_dict(self) -> JsonObject:
        """Return what differs from the defaults, as JSON holds it."""
        shown = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
                for name, value in shown.items() if value != _default(name)}


def read_spec(path: str | Path | None, overrides: Mapping[str, str]) -> JobSpec:
    """Return the spec in a TOML file, if one is given, with overrides as a command line gives them."""
    found: dict[str, Any] = {}
    if path is not None:
        try:
            found = tomllib.loads(Path(path).read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UserError("--job", f"{path} cannot be read ({error})", "give a TOML file") from error
    return spec_of(found, overrides)


def spec_of(table: JsonMapping, overrides: Mapping[str, str] = MappingProxyType({})) -> JobSpec:
    """Return the spec that a table of TOML says, and overrides as a command line gives them."""
    values = {key: _converted(key, value, text=False) for key, value in table.items()}
    spec = JobSpec(**values | {key: _converted(key, value, text=True) for key, value in overrides.items()})
    spec.check_secrets()
    return spec


def _converted(key: str, value: Any, text: bool) -> Any:
    """Return the value of a key in the type of its field."""
    known = [spec.name for spec in fields(JobSpec)]
    if key not in known:
        raise UserError(f"{key}", "a job has no such key", nearest(key, known))
    wanted = type(_default(key))
    try:
        if text:
            return _parsed(value, wanted)
        if wanted is tuple and isinstance(value, list) and all(isinstance(one, str) for one in value):
            return tuple(value)
        if wanted is float and type(value) is int:
            return float(value)
        if type(value) is not wanted or (wanted is dict and not all(isinstance(one, str) for one in value.values())):
            raise ValueError
    except UserError:
        raise
    except ValueError:
        names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false",
                 tuple: "a list of texts", dict: "a table of texts"}
        raise UserError(key, f"{value!r} is not {names[wanted]}", "see docs/launch.md") from None
    return value


def _parsed(value: str, wanted: type) -> Any:
    if wanted is bool:
        return {"true": True, "false": False, "1": True, "0": False}[value.lower()] if value.lower() in (
            "true", "false", "1", "0") else int("not a bool")
    if wanted in (tuple, dict):
        raise UserError("command line", "lists and tables are given in a file only", "write them there: --job=FILE")
    if wanted is float and value.lower() in ("nan", "inf", "-inf"):
        raise ValueError
    return wanted(value)


def _default(name: str) -> Any:
    spec = JobSpec.__dataclass_fields__[name]
    return spec.default if spec.default is not MISSING else spec.default_factory()  # pyrefly: ignore[not-callable]


def _at_least(spec: JobSpec, key: str, least: int) -> None:
    if not getattr(spec, key) >= least:
        raise UserError(key, f"{getattr(spec, key)} is less than {least}", f"give {least} or more")
