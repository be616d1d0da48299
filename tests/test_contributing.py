"""CONTRIBUTING.md, the linters' hooks, the lock file, forms and .editorconfig agree with the rest of the project."""

import configparser
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", ".github/pull_request_template.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
# Where pages and recorded measurements name what was there at an older commit.
FORMER = {"tools/accelerator.py", "tools/calibrate.py", "tools/bench.py"}


def pinned(name: str) -> str:
    """Return the version of a linter that pyproject.toml names."""
    (version,) = {one.removeprefix(f"{name}==") for wanted in EXTRAS.values() for one in wanted if one.startswith(name)}
    return version


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/**/*.yml")), ids=lambda path: path.name)
def test_forms_and_workflows_are_yaml(path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_hooks_have_the_versions_of_pyproject():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["id"]: hook for hook in local["hooks"]}
    assert hooks.keys() == {"ruff", "pyrefly"}
    for name, hook in hooks.items():
        assert hook["additional_dependencies"] == [f"{name}=={pinned(name)}"]
        assert hook["entry"].startswith(f"{name} check")


def test_the_locked_versions_are_those_that_pyproject_allows_and_name_no_address():
    text = (ROOT / "constraints.txt").read_text()
    assert "://" not in text and "@" not in text
    locked: dict[str, list[Requirement]] = {}
    for line in text.splitlines():
        locked.setdefault((one := Requirement(line)).name, []).append(one)
    # Environments of other frameworks may have a Python of their own (rl.environment_python), and no lock here.
    extras = [each for name, extra in EXTRAS.items() for each in extra if name != "environments"]
    for wanted in map(Requirement, [*PROJECT["project"]["dependencies"], *extras]):
        if wanted.name != "jaxtrain":
            versions = [next(iter(one.specifier)).version for one in locked[wanted.name.lower().replace("_", "-")]]
            assert any(wanted.specifier.contains(version, prereleases=True) for version in versions), f"lock {wanted}"


def test_contributing_is_one_page_with_commands_that_are_those_of_elsewhere():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(text.splitlines()) <= 50
    commands = [line for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]
    readme = re.search(r"^python3 -m venv .* && (\S+ -m pytest .*)$", (ROOT / "README.md").read_text(), re.M)
    assert readme and readme[1] in commands
    extras = re.search(r"-e '\.\[(.*)\]'", commands[0])[1].split(",")
    assert set(extras) <= EXTRAS.keys() and f"-e '.[{','.join(extras)}]'" in (ROOT / ".ci/run").read_text()
    single = [command.partition("pytest ")[2].split(" -k ") for command in commands if "pytest tests/" in command]
    assert len(single) == 2
    for file, *word in single:
        assert "".join(word) in "".join(re.findall(r"def test_\w+", (ROOT / file).read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page):
    """Every path in code exists, unless it has NAME in it, which the reader replaces."""
    code = re.findall(r"^```.*?^```|`[^`\n]+`", page.read_text(), re.M | re.S)
    paths = re.compile(r"(?<![\w/.-])(?:tools|tests|docs|configs|examples|deploy|\.github|\.ci)/[\w./-]*\w")
    named = {name for one in code for name in paths.findall(one) if "NAME" not in name}
    assert [name for name in sorted(named - FORMER) if not (ROOT / name).exists()] == []


def test_text_files_are_as_editorconfig_says():
    parser = configparser.ConfigParser()
    parser.read_string("[top]\n" + (ROOT / ".editorconfig").read_text())
    for_all, python = parser["*"], parser["*.py"]
    assert int(python["max_line_length"]) == PROJECT["tool"]["ruff"]["line-length"]
    assert for_all["end_of_line"] == "lf" and for_all.getboolean("insert_final_newline")
    assert for_all.getboolean("trim_trailing_whitespace")
    done = subprocess.run(["git", "ls-files", "-z", "*.py", "*.md", "*.toml", "*.yml", "*.yaml", "*.sh", ".ci/run"],
                          cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("the files of a checkout are listed by git")
    wrong = [name for name in done.stdout.split("\0") if name and (content := (ROOT / name).read_bytes())
             and (b"\r" in content or not content.endswith(b"\n") or re.search(rb"[ \t]$", content, re.M))]
    assert wrong == []
