"""A cluster for the tests of a file, and what submits the program to it."""

import contextlib
import sys
from pathlib import Path

import pytest

from jaxtrain.commands import launch
from jaxtrain.launch import job_record as jobs
from tests.launch.slurm.cluster import Cluster
from tests.launch.waiting import all_began, until

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests" / "launch" / "program.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, request):
    """A running cluster, with accounting where the file says ACCOUNTING = True, and a job.toml for its jobs."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(Cluster(tmp_path_factory.mktemp("slurm"),
                                                accounting=getattr(request.module, "ACCOUNTING", False)))
        except RuntimeError as error:
            pytest.skip(f"Slurm does not start here: {error}")
        patch.setenv("SLURM_CONF", found.environment["SLURM_CONF"])
        (found.folder / "job.toml").write_text(f'setup = ["export PATH={Path(sys.executable).parent}:/usr/bin:/bin '
                                               f'PYTHONPATH={ROOT} JAX_PLATFORMS=cpu"]\n')
        yield found


@pytest.fixture
def begun(cluster, tmp_path):
    """Submit the program; what it leaves running is ended."""
    made = []

    def begin(*flags: str, workdir: Path = tmp_path / "work", wait: bool = True) -> Path:
        assert launch.main(["--on=slurm", f"--workdir={workdir}", f"--job={cluster.folder}/job.toml", *flags, "--",
                            sys.executable, f"{PROGRAM}", f"{workdir}"]) == 0
        made.append(workdir)
        if wait:
            all_began(workdir)
        return workdir

    yield begin
    for workdir in made:
        cluster.run("scancel", jobs.newest(workdir).id)
    for workdir in made:
        until(workdir, lambda status: status.state not in ("running", "waiting", "paused"))
