"""Packages of plug-ins in folders of their own, as pip installs them: modules, and the entry points that name them."""

import contextlib
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from jaxtrain.base import plug_ins
from jaxtrain.config import family
from jaxtrain.hf import hf_config

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "plugin"
PAGE = (ROOT / "docs" / "extend.md").read_text()
DOCUMENTED = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGE, re.M | re.S))  # module -> source
_CACHED = plug_ins.points, family.family, hf_config.types


def install(site: Path, name: str, points: Mapping[str, Mapping[str, str]], modules: Mapping[str, str] = {}) -> Path:
    """Install a package. `points`: name -> MODULE:OBJECT for each group; `modules`: their sources."""
    about = site / f"{name.replace('-', '_')}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("".join(
        f"[{group}]\n" + "".join(f"{part} = {where}\n" for part, where in places.items())
        for group, places in points.items()))
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)
    return site


def install_example(site: Path) -> Path:
    """Install examples/plugin."""
    install(site, "jaxtrain-plugin", _groups((EXAMPLE / "pyproject.toml").read_text()))
    shutil.copytree(EXAMPLE / "jaxtrain_plugin", site / "jaxtrain_plugin", ignore=shutil.ignore_patterns("__pycache__"))
    return site


def install_documented(site: Path) -> Path:
    """Install the files of docs/extend.md, each a part, with the entry points that it shows."""
    return install(site, "documented", _groups(re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S)[0]), DOCUMENTED)


def _groups(text: str) -> dict[str, dict[str, str]]:
    return tomllib.loads(text)["project"]["entry-points"]


@contextlib.contextmanager
def importable(*sites: Path) -> Iterator[None]:
    """A context in which what is installed in these folders is found, and after which nothing of it is left."""
    def forget():
        for cached in _CACHED:
            cached.cache_clear()
        for name, module in [*sys.modules.items()]:
            if any((getattr(module, "__file__", None) or "").startswith(f"{site}/") for site in sites):
                del sys.modules[name]

    with pytest.MonkeyPatch.context() as patch:
        for site in sites:
            patch.syspath_prepend(site)
        forget()
        yield
    forget()
