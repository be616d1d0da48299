"""Check whether the installed packages fit each other."""

import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence

from jaxtrain.doctor.finding import Finding, fail, note, ok, warn

CHECK = "versions"
# Packages whose requirements of each other decide whether training works; pip checks their other requirements.
_FAMILY = re.compile(r"jax|jaxlib|jax-(cuda|rocm)\d+-(plugin|pjrt)|libtpu|flax|optax|orbax-checkpoint|grain"
                     r"|ml-collections|numpy|scipy|ml-dtypes|nvidia-.*")
_SHOWN = "jaxtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain"
_PLUGIN = re.compile(r"jax-cuda(\d+)-plugin")
_TOOLKIT = "nvidia-cuda-nvcc", "nvidia-nvvm"  # ptxas and what it reads, which XLA also takes from an installed CUDA

Requires = Mapping[str, Sequence[str]]


class Installed:
    """The packages of this interpreter, by normalised name."""

    def __init__(self, versions: Mapping[str, Sequence[str]], requires: Requires, needs_python: Mapping[str, str]):
        """Store the packages, all by normalised name.

        Args:
            versions: of each package, as often as it is found; the first one is what Python imports.
            requires: the requirements of each package, from its metadata.
            needs_python: the versions of Python that each package supports.
        """
        self.versions, self.requires, self.needs_python = versions, requires, needs_python

    @classmethod
    def here(cls) -> "Installed":
        """Return the installed packages."""
        versions: dict[str, list[str]] = {}
        requires, needs_python = {}, {}
        for dist in importlib.metadata.distributions():
            said = dist.metadata
            if "Name" not in said:
                continue  # left by an interrupted pip
            name = _normal(said["Name"])
            versions.setdefault(name, []).append(dist.version)
            requires.setdefault(name, dist.requires or [])
            needs_python.setdefault(name, (said.get_all("Requires-Python") or [""])[0])
        return cls(versions, requires, needs_python)

    def version(self, name: str) -> str | None:
        """Return the version that is imported, or None."""
        return self.versions[name][0] if self.versions.get(name) else None

    def cuda(self) -> list[int]:
        """Return the major CUDA versions for which a plugin is installed."""
        return sorted(int(found[1]) for name in self.versions if (found := _PLUGIN.fullmatch(name)))


def versions(installed: Installed, python: str = ".".join(map(str, sys.version_info[:3]))) -> list[Finding]:
    """Return all findings about package versions."""
    found = [*python_fits(installed, python), *fit(installed, python), *twice(installed), *plugins(installed)]
    if not any(finding.level in ("warn", "FAIL") for finding in found):
        shown = [f"{name} {version}" for name in _SHOWN if (version := installed.version(name))]
        found.insert(0, ok(CHECK, f"Python {python}, {', '.join(shown)}: they fit each other"))
    return found


def fit(installed: Installed, python: str) -> list[Finding]:
    """Check the requirements of jaxtrain and the packages around JAX for each other, from their metadata."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        try:
            from pip._vendor.packaging.requirements import Requirement
        except ImportError:
            return [note(CHECK, "not compared with each other", "pip install packaging, and run this again")]
    found = []
    if "jaxtrain" not in installed.requires:
        found.append(note(CHECK, "jaxtrain is not installed, so its requirements are not known",
                          "pip install -e . in its checkout"))
    for name in ("jaxtrain", *sorted(name for name in installed.versions if _FAMILY.fullmatch(name))):
        absent = []
        for text in installed.requires.get(name, ()):
            need = Requirement(text)
            needed = _normal(need.name)
            around = {"python_version": ".".join(python.split(".")[:2]), "python_full_version": python}
            extras = [extra for extra in _extras(name, installed) if need.marker is None or need.marker.evaluate(
                {**around, "extra": extra})]
            if not extras or not (name == "jaxtrain" or _FAMILY.fullmatch(needed)):
                continue
            there, wanted = installed.version(needed), f"{need.name}{need.specifier}"
            if there is None:
                absent += [wanted] * (not (needed in _TOOLKIT and _toolkit()))
            elif not need.specifier.contains(there, prereleases=True):
                found.append(fail(CHECK, f"{name} {installed.version(name)} needs {wanted}, and {there} is installed",
                                  _together(name, needed, wanted, installed)))
        if absent:
            fix = _together(name, absent[0], "' '".join(absent), installed)
            found.append(fail(CHECK, f"{name} needs what is not installed: {', '.join(absent)}", fix))
    return found


def _toolkit() -> bool:
    """Return whether a CUDA toolkit is installed where XLA looks for one."""
    return bool(shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin"))


def python_fits(installed: Installed, python: str) -> list[Finding]:
    """Check Python's version against the requirements of JAX and jaxtrain."""
    found = []
    for name in ("jaxtrain", "jax", "jaxlib"):
        least = re.match(r">=\s*(\d+)\.(\d+)", installed.needs_python.get(name, ""))
        if least and tuple(map(int, python.split(".")[:2])) < (int(least[1]), int(least[2])):
            wanted = f"{least[1]}.{least[2]}"
            found.append(fail(CHECK, f"{name} {installed.version(name)} needs Python {wanted}, and this is {python}",
                              f"make an environment with Python {wanted} or later"))
    return found


def twice(installed: Installed) -> list[Finding]:
    """Check for packages in several versions: the order of folders decides which is imported."""
    return [warn(CHECK, f"{name} is installed {len(all_of)} times: {', '.join(all_of)}; the first one is used",
                 f"pip uninstall {name}, until none is left, then install it once")
            for name, all_of in sorted(installed.versions.items())
            if len(set(all_of)) > 1 and (name == "jaxtrain" or _FAMILY.fullmatch(name))]


def plugins(installed: Installed) -> list[Finding]:
    """Check for plugins of CUDA 12 and 13 at once, and for a plugin without its other half."""
    found, cuda = [], installed.cuda()
    if len(cuda) > 1:
        names = " ".join(f"jax-cuda{major}-plugin jax-cuda{major}-pjrt" for major in cuda[:-1])
        found.append(fail(CHECK, f"there are plugins for CUDA {' and '.join(map(str, cuda))}, which load each other's "
                          "libraries", f"keep one: pip uninstall {names}"))
    for name in installed.versions:
        half = re.fullmatch(r"jax-cuda(\d+)-pjrt", name)
        if half and int(half[1]) not in cuda:
            found.append(fail(CHECK, f"{name} is installed without jax-cuda{half[1]}-plugin",
                              f"pip install 'jax[cuda{half[1]}]'"))
    return found


def library_path(environ: Mapping[str, str], cuda: Sequence[int]) -> list[Finding]:
    """Check LD_LIBRARY_PATH for CUDA libraries, which would be used instead of those that pip installed."""
    if not cuda:
        return []
    names = ("libcudart.so", "libcublas.so", "libcudnn.so", "libnccl.so", "libcusolver.so", "libcusparse.so",
             "libcufft.so", "libnvJitLink.so", "libcupti.so")
    found = []
    for folder in dict.fromkeys(filter(None, environ.get("LD_LIBRARY_PATH", "").split(":"))):
        try:
            theirs = sorted(name for name in os.listdir(folder) if name.startswith(names))
        except OSError:
            continue
        if theirs:
            found.append(warn("LD_LIBRARY_PATH", f"{folder} has {theirs[0]} and is searched before the CUDA that pip "
                              "installed", "unset LD_LIBRARY_PATH, unless that CUDA is intended"))
    return found


def _extras(name: str, installed: Installed) -> list[str]:
    """Return the extras with which a package seems to be installed."""
    extras = [""]
    if name == "jax":
        extras += [f"cuda{major}-local" for major in installed.cuda()] + ["tpu"] * ("libtpu" in installed.versions)
    if plugin := _PLUGIN.fullmatch(name):  # unless CUDA comes from elsewhere
        extras += ["with-cuda"] * bool({"nvidia-cublas", f"nvidia-cublas-cu{plugin[1]}"} & set(installed.versions))
    return extras


def _together(name: str, needed: str, wanted: str, installed: Installed) -> str:
    """Return the pip command that installs a requirement; JAX's packages are upgraded together."""
    if name.startswith("jax") and needed.startswith(("jax", "nvidia-")) and name != "jaxtrain":
        cuda = installed.cuda()
        extra = f"[cuda{cuda[-1]}]" if cuda else "[tpu]" if "libtpu" in installed.versions else ""
        version = installed.version("jax")
        return f"pip install 'jax{extra}=={version}'" if version else f"pip install 'jax{extra}'"
    return f"pip install '{wanted}'"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()




