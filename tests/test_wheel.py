"""The wheel and the source archive are whole, and have the version of the newest tag."""

import importlib.util
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.tiny import QUICKLY
from tools.release.check_wheel import HELPS, SMALL, run

ROOT = Path(__file__).parents[1]
FILES = ("pyproject.toml", "README.md", "LICENSE", ".gitattributes", ".git_archival.txt")
GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always"]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("hatchling", "hatch_vcs"))), reason="needs pip install -e '.[release]'")]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with both archives, made without the network."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "hatchling", "build", "--directory", f"{folder}"], ROOT, {**os.environ})
    return folder


def tracked(folder: str) -> set[str]:
    """Return the files of a folder of the checkout that git has, and those that it would take."""
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", folder], cwd=ROOT,
                            capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("the files of a checkout are listed by git")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


def test_a_wheel_has_the_package_and_the_configs_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == tracked("jaxtrain") | {f"jaxtrain/{name}" for name in tracked("configs")}


def test_a_source_archive_has_what_is_tracked(built):
    (archive,) = built.glob("*.tar.gz")
    top = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.removeprefix(f"{top}/") for name in opened.getnames()} - {"PKG-INFO"}
    assert names == tracked(".")


def test_a_wheel_alone_trains_and_explains_its_commands(built, tmp_path):
    """The packages around it are those of the tests; tools/release/check_wheel.py has an environment of its own."""
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'installed'}", "XLA_FLAGS": QUICKLY}
    (tmp_path / "here").mkdir()

    def printed(*words: str) -> str:
        return run([sys.executable, *words], tmp_path / "here", environment)

    assert printed("-c", f"import jaxtrain; print(jaxtrain.__file__)\n{HELPS}").startswith(f"{tmp_path}/installed/")
    assert len(printed("-m", "jaxtrain", "configs").splitlines()) == len(tracked("configs"))
    source = f"--config.data.source={ROOT / 'README.md'}"
    printed("-m", "jaxtrain", "train", "gpt:tiny", *SMALL, source)
    assert (tmp_path / "here/runs/gpt-tiny/checkpoints/4").is_dir()


def version(folder: Path, **environment: str) -> str:
    return run([sys.executable, "-W", "ignore", "-m", "hatchling", "version"], folder,
               {**os.environ, **environment}).split()[-1]


def test_the_version_is_that_of_the_newest_tag(tmp_path):
    """Without a tag, in a shallow clone, in an archive and without git there is one, too."""
    def git(folder: Path, *words: str) -> None:
        run([*GIT, *words], folder, {**os.environ})

    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in FILES:
        (folder / name).write_bytes((ROOT / name).read_bytes())
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=first")
    assert version(folder).startswith("0.1.0.dev"), "no tag yet"
    git(folder, "tag", "v1.2.0")
    git(folder, "tag", "other-9.9.9")
    assert version(folder) == "1.2.0"
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{folder}", "shallow")
    assert version(tmp_path / "shallow") == "1.2.0"
    git(folder, "archive", "--prefix=archive/", "--output=../archive.tar", "HEAD")
    with tarfile.open(tmp_path / "archive.tar") as opened:
        opened.extractall(tmp_path, filter="data")
    assert version(tmp_path / "archive") == "1.2.0"
    (folder / "README.md").write_text("changed\n")
    git(folder, "commit", "--quiet", "--all", "--message=second")
    assert version(folder).startswith("1.2.1.dev1+g")
    (tmp_path / "bare").mkdir()
    for name in FILES:
        (tmp_path / "bare" / name).write_bytes((ROOT / name).read_bytes())
    assert version(tmp_path / "bare") == "0.1.0.dev0"
    assert version(tmp_path / "bare", SETUPTOOLS_SCM_PRETEND_VERSION="3.4.5") == "3.4.5", "as the image is built"
