"""Two teams, their accounts, QoS and limits in a real Slurm with accounting: who waits for whom, and what is said."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.commands import jobs as jobs_command
from jaxtrain.commands import launch
from jaxtrain.launch import job_record as jobs
from jaxtrain.launch.job_engines import engine_of
from tests.launch.slurm import cluster as clusters
from tests.launch.waiting import LIMIT, event, status_of, until, wait_for

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests" / "launch" / "program.py"
ACCOUNTING = True
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    bool(clusters.missing(*clusters.ACCOUNTING)),
    reason="apt-get install --no-install-recommends slurm-wlm slurmdbd mariadb-server munge")]
RESEARCH, PRODUCT = (["--account=research", "--priority=research"], ["--account=product", "--priority=product"])
SPARE = ["--account=product", "--priority=spare"]
WHOLE = ["--cpus_per_process=2"]  # of a node


@pytest.fixture(scope="module", autouse=True)
def teams(cluster):
    """The teams of the example, of whom this user is in both."""
    me = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    done = subprocess.run(["bash", f"{ROOT}/examples/launch/slurm-teams.sh"], capture_output=True, text=True,
                          timeout=LIMIT, env=cluster.environment | {"RESEARCH": me, "PRODUCT": me, "SHARE": "node=2"})
    assert done.returncode == 0, done.stderr + done.stdout
    return me


STOPPED = "it was stopped and put back; Slurm starts such jobs after a pause, of two minutes by default (BeginTime)"
SHARE_USED = "running jobs of its QoS use up what these may have together (QOSGrpNodeLimit)"
NEXT = "it is the next one, and waits until enough nodes are free (Resources)"
FIRST = "jobs of a higher priority wait too, and come first (Priority); "


def why(workdir: Path, capsys, restarts: int = 0) -> str:
    """Return why a job waits; of one that saved and stopped before, that is told too."""
    capsys.readouterr()
    assert jobs_command.main(["why", f"{workdir}"]) == 0
    told, *history = capsys.readouterr().out.splitlines()
    assert [line.partition(";")[0] for line in history] == [f"restarts: {restarts}"] * bool(restarts)
    return told


def waits(workdir: Path, reason: str) -> None:
    until(workdir, lambda status: (status.state, status.detail) == ("waiting", reason))


@pytest.fixture(scope="module")
def forgotten(cluster, teams, tmp_path_factory):
    """A job of each end, begun before all others: Slurm looks once a minute which ones to forget."""
    root = tmp_path_factory.mktemp("forgotten")
    for name, end in {"done": "0", "failed": "2", "cancelled": ""}.items():
        (workdir := root / name).mkdir()
        (workdir / "end").write_text(end)
        assert launch.main(["--on=slurm", f"--workdir={workdir}", f"--job={cluster.folder}/job.toml", *RESEARCH, "--",
                            sys.executable, f"{PROGRAM}", f"{workdir}"]) == 0
    event(workdir / "began-0-0")
    assert jobs_command.main(["cancel", f"{workdir}"]) == 0
    return root


def test_a_job_with_what_is_idle_gives_way_and_goes_on(forgotten, begun, cluster, tmp_path, capsys):
    """Its team has no nodes guaranteed; the other team has half of them, and no more."""
    spare = begun("--nodes=4", *SPARE, *WHOLE, workdir=tmp_path / "spare")
    own = begun("--nodes=2", *RESEARCH, *WHOLE, workdir=tmp_path / "own")
    assert len(list(spare.glob("saved-0-*"))) == 4
    until(spare, lambda status: status.state == "waiting")
    begin = ("scontrol", "update", f"JobId={jobs.newest(spare).id}")
    cluster.run(*begin, "StartTime=now+3600")  # else it waits for some seconds only, which may pass unseen
    waits(spare, "BeginTime")
    assert why(spare, capsys, restarts=1) == STOPPED
    cluster.run(*begin, "StartTime=now")
    more = begun("--nodes=1", *RESEARCH, *WHOLE, workdir=tmp_path / "more", wait=False)
    waits(more, "QOSGrpNodeLimit")
    assert why(more, capsys) == SHARE_USED
    waits(spare, "Resources")
    assert why(spare, capsys, restarts=1) == NEXT
    late = begun("--nodes=4", *SPARE, *WHOLE, workdir=tmp_path / "late", wait=False)
    waits(late, "Priority")
    first, second = jobs.newest(more).id, jobs.newest(spare).id
    assert why(late, capsys) == (
        f"{FIRST}2 before it: {first} (account and QoS: research research), {second} (account and QoS: product spare)")
    assert jobs_command.main(["cancel", f"{late}"]) == 0
    (own / "end").write_text("0")
    event(more / "began-0-0")
    (more / "end").write_text("0")
    event(spare / "began-1-0")
    assert jobs_command.main(["cancel", f"{spare}", "--now"]) == 0
    rows: list[list[str]] = []

    def ended() -> bool:
        rows[:] = [line.split("|") for line in cluster.run(
            "sacct", "-D", "-X", "-n", "-P", f"--jobs={second}", "--format=State,ElapsedRaw,NNodes").splitlines()]
        return rows[-1][0].startswith("CANCELLED")

    wait_for(ended, lambda: rows)
    assert len(rows) == 2 and rows[0][0] in ("REQUEUED", "PREEMPTED") and rows[0][1] != "0"
    counted = sum(int(seconds) * int(nodes) for _, seconds, nodes in rows)
    assert engine_of("slurm").node_hours(jobs.newest(spare)) * 3600 == pytest.approx(counted)


LIMITS = [  # what has a limit, the limit, no limit, what is asked for, and what is said of it
    (("account", "research"), "GrpTRESMins=cpu=0", "cpu=-1", "AssocGrpCPUMinutesLimit",
     "its account has used up all the time that it was given"),
    (("account", "research"), "MaxTRESPerJob=node=1", "node=-1", "AssocMaxNodePerJobLimit",
     "it asks for more than its account gives to one job"),
    (("account", "research"), "MaxWall=10", "-1", "AssocMaxWallDurationPerJobLimit",
     "it asks for more than its account gives to one job"),
    (("qos", "research"), "MaxTRESPerUser=node=1", "node=-1", "QOSMaxNodePerUserLimit",
     "running jobs of the same user use up what one may have"),
    (("qos", "research"), "MaxTRESPerAccount=node=1", "node=-1", "MaxNodePerAccount",
     "running jobs of its account use up what one account may have"),
    (("qos", "research"), "MinTRESPerJob=node=3", "node=-1", "QOSMinNode", "it asks for less than its QoS demands"),
    (("qos", "research"), "GrpTRES=node=0", "node=2", "QOSGrpNodeLimit",
     "running jobs of its QoS use up what these may have together"),
    (("user", "where", "account=research"), "MaxJobs=1", "-1", "AssocMaxJobsLimit",
     "running jobs of the same user use up what one may have")]


def test_limits_are_told_in_plain_words(begun, cluster, teams, tmp_path, capsys):
    begun(*RESEARCH, workdir=tmp_path / "first")  # so that there is one
    for number, (whose, limit, without, reason, words) in enumerate(LIMITS):
        if whose[0] == "user":
            whose = ("user", teams, *whose[1:])
        change = ("sacctmgr", "-i", "modify", *whose, "set")
        cluster.run(*change, limit)
        workdir = begun(*RESEARCH, "--nodes=2", "--time=0:30:00", workdir=tmp_path / f"{number}", wait=False)
        waits(workdir, reason)
        assert why(workdir, capsys) == f"{words} ({reason})"
        assert jobs_command.main(["cancel", f"{workdir}"]) == 0
        cluster.run(*change, f"{limit.partition('=')[0]}={without}")


@pytest.mark.parametrize("flags, said", [
    (["--account=none", "--priority=research"], "Invalid account"),
    (["--account=product", "--priority=research"], "Invalid qos")])
def test_a_wrong_account_or_qos_is_told_in_a_line(tmp_path, capsys, flags, said):
    assert launch.main(["--on=slurm", f"--workdir={tmp_path}", *flags, "--", "true"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and list((tmp_path / "jobs").iterdir()) == []


def test_what_slurm_has_forgotten_is_read_from_its_accounts(forgotten, cluster, capsys):
    ids = {name: jobs.newest(forgotten / name).id for name in ("done", "failed", "cancelled")}
    wait_for(lambda: not set(cluster.run("squeue", "-h", "-t", "all", "-o", "%i").split()) & set(ids.values()))
    for name in ids:
        assert status_of(forgotten / name).state == name
    capsys.readouterr()
    assert jobs_command.main(["list", f"{forgotten}"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[0], row[3]) for row in rows] == [(name, name) for name in sorted(ids)]


def test_of_those_who_wait_the_team_that_has_used_less_comes_first(begun, cluster, tmp_path, capsys):
    """Slurm works that out once a minute; by now it has."""
    shares: dict[str, float] = {}

    def differ() -> bool:
        for line in cluster.run("sshare", "-n", "-P", "-o", "Account,User,FairShare").splitlines():
            account, user, share = line.split("|")
            if user and account.strip() != "root":
                shares[account.strip()] = float(share)
        return len(set(shares.values())) == 2

    begun("--nodes=4", "--account=product", "--priority=spare", *WHOLE)
    wait_for(differ)
    less, more = sorted(shares, key=shares.get, reverse=True)
    first, second = (begun("--nodes=4", f"--account={team}", "--priority=spare", *WHOLE, workdir=tmp_path / team,
                           wait=False) for team in (more, less))
    waits(first, "Priority")
    assert why(first, capsys) == f"{FIRST}1 before it: {jobs.newest(second).id} (account and QoS: {less} spare)"


def test_the_guide_says_what_is_said_and_what_slurm_needs(cluster):
    """The tests above read the same sentences."""
    guide = (ROOT / "docs" / "launch-teams.md").read_text().partition("## Kubernetes")[0]
    rows = re.findall(r"^\| .* \| (.* \([A-Z]\w+\).*) \|$", guide, re.M)
    said = [STOPPED, SHARE_USED, NEXT, *(f"{words} ({reason})" for *_, reason, words in LIMITS)]
    assert len(rows) == 7 and [row for row in rows if row not in said] == [
        f"{FIRST}1 before it: 7 (account and QoS: product spare)"]
    (settings,) = re.findall(r"```ini\n(.*?)```", guide, re.S)
    assert set(settings.split()) <= set((cluster.folder / "slurm.conf").read_text().split())
