"""Compare what compiled programs depend on with what a run has, and name the first difference in a sentence."""

import hashlib
import importlib.util
import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import distributions, entry_points
from pathlib import Path

import jax

from jaxtrain import compile_cache
from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.files import shipped_configs
from jaxtrain.observe.versions import version_of
from jaxtrain.redaction import redacted
from jaxtrain.run import Run, identity

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
# How the names of packages begin that compile for a kind of device, or that what they compile calls.
_COMPILERS: dict[str, tuple[str, ...]] = {"gpu": ("jax-cuda", "jax-rocm", "nvidia-cudnn"), "tpu": ("libtpu",)}
_OF_JAX = ("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable", "jax_default_matmul_precision",
           "jax_numpy_dtype_promotion", "jax_softmax_custom_jvp", "jax_random_seed_offset")
_NOT_OF_PROGRAMS = ("--xla_force_host_platform_device_count", "--xla_gpu_autotune", "--xla_gpu_load_autotune",
                    "--xla_gpu_dump_autotune", "--xla_dump")
# Keys that no compiled program depends on; all others must be equal. Sizes of the mesh are compared as it is.
_FREE: dict[str, frozenset[str] | None] = {
    "checkpoint": None, "evaluation": None, "observe": None,
    "mesh": frozenset({"data", "fsdp", "stage", "context", "expert", "tensor", "auto", "hsdp"}),
    "data": frozenset({"source", "seed", "eval_fraction", "tokenizer", "cache_dir", "cache_bytes", "corrupt",
                       "prefetch", "workers"}),
    "train": frozenset({"log_every", "eval_every", "eval_batches", "patience", "sample_tokens", "progress",
                        "check_memory", "epochs"}),
}


def of(run: Run, devices: Sequence[jax.Device]) -> JsonObject:
    """Return what the programs of this run on these devices depend on, as JSON."""
    kind = devices[0].platform
    found = {
        "platform": kind,
        "device_kind": devices[0].device_kind,
        "processor": compile_cache.processor() if kind == "cpu" else "",
        "mesh": dict(run.mesh.shape),
        # CPU devices have no places, and their numbers depend on the process: a program for them can be moved.
        "devices": [] if kind == "cpu" else [[device.id, _place(device)] for device in devices],
        "packages": {name: version_of(name) for name in (*_PACKAGES, *_installed(kind))},
        "python": ".".join(platform.python_version_tuple()[:2]),
        "code": code_here(),
        "plug_ins": _plug_ins(),
        "settings of JAX": {name: f"{getattr(jax.config, name, None)}" for name in _OF_JAX},
        "config": {f"{section}.{key}": value for section, keys in redacted(identity.settings(run)).items()
                   for key, value in keys.items() if not _free(section, key)},
    }
    return json.loads(json.dumps(found))  # as the manifest has it: lists in place of tuples


def xla_flags() -> list[str]:
    """Return the compiler's flags in the environment that change programs: they count where these are compiled."""
    words = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")).split()
    return sorted(word for word in words if not word.startswith(_NOT_OF_PROGRAMS))


def difference(there: JsonMapping, here: JsonMapping) -> str:
    """Return in words the first thing that differs between what programs were compiled for and a run; "": nothing."""
    for key, what in (("platform", "the platform"), ("device_kind", "devices of the kind"),
                      ("processor", "a CPU with the features")):
        if there.get(key) != here[key]:
            return f"for {what} {there.get(key)}, and here it is {here[key]}"
    if there["mesh"] != here["mesh"]:
        return f"for the mesh {_sizes(there['mesh'])}, and here it is {_sizes(here['mesh'])}"
    for place, (one, other) in enumerate(zip(there["devices"], here["devices"], strict=True)):
        if one != other:
            return (f"for another topology: device {place} of the mesh is number {one[0]} at {one[1]} there, and "
                    f"number {other[0]} at {other[1]} here")
    for name in dict.fromkeys([*there["packages"], *here["packages"]]):
        one, other = (found["packages"].get(name) or "none" for found in (there, here))
        if one != other:
            return f"with {name} {one}, and here is {other}"
    if there["python"] != here["python"]:
        return f"with Python {there['python']}, and here is {here['python']}"
    if there["code"] != here["code"]:
        return f"by other code of jaxtrain ({there['code'][:12]}, and here is {here['code'][:12]})"
    for name in dict.fromkeys([*there.get("plug_ins", {}), *here["plug_ins"]]):
        if there.get("plug_ins", {}).get(name) != here["plug_ins"].get(name):
            return f"with other code of the package {name}, which extends jaxtrain"
    for name, value in there["settings of JAX"].items():
        if value != here["settings of JAX"].get(name):
            return f"with {name}={value}, and here it is {here['settings of JAX'].get(name)}"
    for name in dict.fromkeys([*there["config"], *here["config"]]):
        one, other = (found["config"].get(name) for found in (there, here))
        if one != other:
            return f"for another config: {name} is {one} there and {other} here"
    return ""


def _place(device: jax.Device) -> list[int]:
    """Return where a TPU lies in its slice; of GPUs only the number counts."""
    return list(device.coords) if device.platform == "tpu" else []


def _free(section: str, key: str) -> bool:
    free = _FREE.get(section, frozenset())
    return free is None or key in free


def _sizes(mesh: JsonMapping) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1) or "of one device"


def _installed(kind: str) -> list[str]:
    """Return the names of the installed packages that compile for this kind of device."""
    begins = _COMPILERS.get(kind, ())
    names = {found.metadata["Name"] for found in distributions()} if begins else set()
    return sorted(name for name in names if name and name.startswith(begins))


def code_here() -> str:
    """Return the sha256 of jaxtrain's own source: a commit says nothing of what was edited since."""
    return _hash_of(Path(__file__).parents[1], without=shipped_configs.folder())  # which only a wheel has inside


def _plug_ins() -> dict[str, str]:
    """Return the sha256 of the source of each installed package that extends jaxtrain, whether the config uses it or
    not.
    """
    groups = sorted(group for group in entry_points().groups if group.startswith("jaxtrain."))
    names = {one.module.partition(".")[0] for group in groups for one in entry_points(group=group)}
    found = {name: importlib.util.find_spec(name) for name in sorted(names)}
    return {name: _hash_of(Path(spec.submodule_search_locations[0] if spec.submodule_search_locations else
                                f"{spec.origin}")) for name, spec in found.items() if spec}


def _hash_of(root: Path, without: Path | None = None) -> str:
    """Return the sha256 of a module's source, or of all in a package but what is in the folder `without`."""
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
        if without and path.is_relative_to(without):
            continue
        found.update(f"{path.relative_to(root).as_posix()}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
