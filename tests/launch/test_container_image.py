"""The container image has one version of every package, and it suits pyproject.toml."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"


def test_every_package_of_the_image_has_one_version():
    lines = (DOCKER / "constraints.txt").read_text().splitlines()
    pinned = dict(re.fullmatch(r"([a-z0-9.-]+)==(\S+)(?: ; .*)?", line).groups() for line in lines if line[0] != "#")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", (DOCKER / "Dockerfile").read_text(), re.M)
    wanted = project["build-system"]["requires"] + project["project"]["dependencies"]
    for extra in extras.split(","):
        wanted += project["project"]["optional-dependencies"][extra]
    for requirement in map(Requirement, wanted):
        version = pinned[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(version), f"{requirement} and {version}"


def test_what_the_image_copies_is_there():
    text = (DOCKER / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.*)$", text, re.M):
        assert [name for name in line.split()[:-1] if not (ROOT / name).exists()] == []
    assert "USER 65534" in text
