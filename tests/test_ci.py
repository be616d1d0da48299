"""A test that fails in .ci/run is run once more; what then passes is named, and at most two tests may need that."""

import subprocess
import sys
from pathlib import Path

import pytest

RETRY = Path(__file__).parents[1] / ".ci" / "retry_failed.py"
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
