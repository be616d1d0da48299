"""Tests of .ci/run: its tiers, and the second run of a failed test, which names flaky ones, at most two."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
RETRY = ROOT / ".ci" / "retry_failed.py"
# Each flaky test fails in the first process that runs it; a broken one fails in all.
TESTS = """
import pathlib
import pytest

@pytest.mark.parametrize("n", range({flaky}))
def test_flaky(n):
    tried = pathlib.Path(f"tried-{{n}}")
    seen = tried.exists()
    tried.touch()
    assert seen

@pytest.mark.parametrize("n", range({broken}))
def test_broken(n):
    assert False

def test_sound():
    pass
"""


def _tier(folder):
    """Return the exit status of a tier with a second run of what failed, and what was printed meanwhile."""
    first = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:xdist"], cwd=folder).returncode
    command = [sys.executable, RETRY, f"{first}", "flaky", "-q"]
    again = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return again.returncode, again.stdout


@pytest.mark.parametrize(("flaky", "broken", "status"), [(0, 0, 0), (2, 0, 0), (3, 0, 1), (1, 1, 1)])
def test_a_failed_test_is_run_once_more_alone(tmp_path, flaky, broken, status):
    (tmp_path / "test_it.py").write_text(TESTS.format(flaky=flaky, broken=broken))
    ended, printed = _tier(tmp_path)
    assert ended == status, printed
    assert printed.count("+ once more, alone: ") == flaky + broken
    if flaky:
        named = (tmp_path / "flaky").read_text().splitlines()
        assert named == [f"test_it.py::test_flaky[{n}]" for n in range(flaky)]


def test_what_pytest_cannot_collect_is_not_run_again(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it(:\n")
    ended, printed = _tier(tmp_path)
    assert ended == 2
    assert not printed


@pytest.fixture
def small_project(tmp_path):
    """A committed project whose programs print their names and arguments, and the environment to run its .ci/run in."""
    project, programs = tmp_path / "project", tmp_path / "programs"
    shutil.copytree(ROOT / ".ci", project / ".ci")
    (project / "README.md").write_text("```bash\necho the quick tests, without pytest\n```\n")
    programs.mkdir()
    # With these there is nothing to install; `python3 -m venv .venv` makes programs of the same kind.
    for name in ("slurmctld", "slurmdbd", "mariadbd", "mpirun", "chromium", "promtool"):
        (programs / name).write_text("#!/bin/sh\n")
    (programs / "python3").write_text(
        "#!/bin/sh\nmkdir -p .venv/bin\nfor name in pip uv python; do\n"
        "printf '#!/bin/sh\\necho %s \"$@\"\\n' $name > .venv/bin/$name; chmod +x .venv/bin/$name\ndone\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], cwd=project, check=True)
    return project, os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}


@pytest.mark.parametrize(("words", "quick", "slow"), [
    ([], True, True), (["quick"], True, False), (["slow"], False, True)])
def test_each_tier_may_be_run_alone(words, quick, slow, small_project):
    project, environment = small_project
    done = subprocess.run([".ci/run", *words], cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert ("the quick tests, without pytest" in lines) == quick
    assert any(line.startswith("python -m pytest") and line.endswith("-m slow") for line in lines) == slow
    assert any("test-all,docs" in line for line in lines) == slow


def test_on_a_slow_machine_every_second_test_runs():
    command = [sys.executable, "-m", "pytest", "tests/test_ci.py", "-m", "", "--collect-only"]
    collected = [{line for line in subprocess.run(command, cwd=ROOT, env=os.environ | {"CI_EVERY": every},
                                                  capture_output=True, text=True).stdout.splitlines() if "::" in line}
                 for every in ("1", "2")]
    assert collected[1] < collected[0] and len(collected[1]) == (len(collected[0]) + 1) // 2


def test_an_unknown_tier_is_refused():
    done = subprocess.run([ROOT / ".ci/run", "all of it"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "usage: .ci/run [quick|slow]\n")


def test_the_forge_runs_these_tiers():
    """The workflow calls .ci/run and repeats nothing of it: quick for each push, slow every night, on both Pythons."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    assert {"push", "pull_request", "schedule"} <= workflow[True].keys()  # YAML 1.1 takes `on` for a boolean
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in workflow["jobs"].items()}
    assert commands == {"quick": [".ci/run quick"], "slow": ['sudo env "PATH=$PATH" .ci/run slow']}
    jobs = workflow["jobs"]
    assert all(job["strategy"]["matrix"]["python"] == ["3.11", "3.12"] for job in jobs.values())
    assert "schedule" in jobs["slow"]["if"] and jobs["quick"]["if"] == "github.event_name != 'schedule'"
