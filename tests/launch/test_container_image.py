"""The container image has one version of every package, and a release is built of what is there."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tools.release import release_notes

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_of_the_image_has_one_version():
    lines = (DOCKER / "constraints.txt").read_text().splitlines()
    pinned = dict(re.fullmatch(r"([a-z0-9.-]+)==(\S+)(?: ; .*)?", line).groups() for line in lines if line[0] != "#")
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", (DOCKER / "Dockerfile").read_text(), re.M)
    wanted = PROJECT["build-system"]["requires"] + PROJECT["project"]["dependencies"]
    for extra in [*extras.split(","), "cuda", "tpu"]:
        wanted += PROJECT["project"]["optional-dependencies"][extra]
    for requirement in map(Requirement, [*wanted, "libtpu", "setuptools-scm", "vcs-versioning", "setuptools"]):
        version = pinned[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(version), f"{requirement} and {version}"


def test_what_the_image_copies_is_there():
    text = (DOCKER / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.*)$", text, re.M):
        assert [name for name in line.split()[:-1] if not (ROOT / name).exists()] == []
    assert "USER 65534" in text


def test_what_the_build_needs_of_the_checkout_is_copied_or_made():
    """The first installation, of the packages alone, has an empty package and no configs."""
    text, wheel = (DOCKER / "Dockerfile").read_text(), PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    folders = [*wheel["packages"], *wheel["force-include"]]
    assert f"mkdir {' '.join(folders)} " in text
    assert all(f"\nCOPY {folder} {folder}\n" in text for folder in folders)
    named = {PROJECT["project"]["readme"], "pyproject.toml", "LICENSE"}
    assert named <= set(re.findall(r"^COPY (.*) \./$", text, re.M)[0].split())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
@pytest.mark.parametrize(("accelerator", "extras"), {"cpu": "data,s3", "cuda": "cuda,data,s3", "tpu": "tpu,data,s3",
                                                     "gpu": None}.items())
def test_the_accelerator_chooses_the_extras(accelerator, extras):
    """The shell's part of the Dockerfile, up to what needs Docker."""
    (case,) = re.findall(r"^RUN (case .*?esac)", (DOCKER / "Dockerfile").read_text(), re.M | re.S)
    done = subprocess.run(["sh", "-c", case.replace("\\\n", "\n") + '; echo "$extras"'], capture_output=True, text=True,
                          env={**os.environ, "ACCELERATOR": accelerator, "EXTRAS": "data,s3"})
    assert (done.returncode, done.stdout.strip()) == ((0, extras) if extras else (2, ""))
    assert extras or "give cpu, cuda or tpu" in done.stderr


@pytest.mark.parametrize("name", ["release", "images"])
def test_workflows_name_what_is_there(name):
    """A script, a file or an extra that a step names exists; actions have the hash of a commit."""
    text = (ROOT / f".github/workflows/{name}.yml").read_text()
    for path in re.findall(r"(?<![\w./-])(?:tools|deploy|\.github)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path
    used = re.findall(r"uses: ([^.\s]\S*)", text)
    assert used and all(re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action) for action in used)
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    arguments = set(re.findall(r"--build-arg \"(\w+)=", text))
    assert arguments <= set(re.findall(r"^ARG (\w+)=", (DOCKER / "Dockerfile").read_text(), re.M))
    pinned = {re.split("==", line)[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    for packages in re.findall(r"pip install --constraint=constraints.txt (.*)", text):
        assert set(packages.split()) <= pinned


def test_the_notes_of_a_release_are_those_of_the_changelog():
    log = "# Changelog\n\n## 0.2.0 (not released yet)\n\n- new\n\n## 0.1.0 (2026-12-01)\n\n- first\n- second\n"
    built = ["jaxtrain-0.1.0-py3-none-any.whl", "jaxtrain-0.1.0.tar.gz"]
    assert release_notes.notes("v0.1.0", log, built) == "- first\n- second"
    for tag, files, told in (("v0.2.0", built, "not released yet"), ("v0.3.0", built, "has no section '## 0.3.0"),
                             ("v0.1.0", built[:1], "was built, not")):
        with pytest.raises(SystemExit, match=told):
            release_notes.notes(tag, log, files)


def test_the_changelog_has_a_section_for_each_release():
    found = release_notes.sections(release_notes.CHANGELOG.read_text())
    assert len(found) == release_notes.CHANGELOG.read_text().count("\n## ")
    numbers = [tuple(map(int, version.split("."))) for version in found]
    assert numbers == sorted(numbers, reverse=True) and all(text for _, text in found.values())
    assert [date for date, _ in found.values()][1:].count("not released yet") == 0
