"""Packages of plug-ins in folders, as pip installs them: modules, and the entry points that they register."""

import shutil
import tomllib
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "plugin"


def install(site: Path, name: str, points: dict[str, dict[str, str]], **modules: str) -> None:
    """Install a package of these modules' sources. `points`: name -> MODULE:OBJECT for each kind, such as "trackers".
    """
    about = site / f"{name.replace('-', '_')}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("".join(
        f"[jaxtrain.{kind}]\n" + "".join(f"{part} = {where}\n" for part, where in places.items())
        for kind, places in points.items()))
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)


def install_example(site: Path) -> None:
    """Install examples/plugin."""
    groups = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]
    install(site, "jaxtrain-plugin", {group.removeprefix("jaxtrain."): points for group, points in groups.items()})
    shutil.copytree(EXAMPLE / "jaxtrain_plugin", site / "jaxtrain_plugin")
