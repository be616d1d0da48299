"""Jobs in a real Slurm of four nodes on this machine."""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from jaxtrain.commands import jobs as jobs_command
from jaxtrain.commands import launch
from jaxtrain.distributed import exit_codes
from jaxtrain.launch import job_record as jobs
from tests.launch.process_trees import kill, writers
from tests.launch.slurm import cluster as clusters
from tests.launch.waiting import event, status_of, until, wait_for
from tests.tiny import tiny_flags, virtual_devices

pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    bool(clusters.missing()), reason="apt-get install --no-install-recommends slurm-wlm munge")]


def told(what: str, workdir: Path, *flags: str) -> None:
    assert jobs_command.main([what, f"{workdir}", *flags]) == 0


def test_a_run_pauses_and_goes_on_with_other_nodes(begun, capsys):
    workdir = begun("--nodes=3")
    assert (workdir / "began-0-0").read_text().startswith("3 127.0.0.1:")
    told("pause", workdir)
    until(workdir, lambda status: status.state == "paused")
    assert len(list(workdir.glob("saved-0-*"))) == 3
    told("why", workdir)
    assert "it is paused: jaxtrain jobs resume" in capsys.readouterr().out
    assert jobs_command.main(["resume", f"{workdir}", "--nodes=9"]) == 2  # more than there are
    assert jobs_command.main(["requeue", f"{workdir}"]) == 2
    assert "its job is paused; resume it" in capsys.readouterr().err
    told("resume", workdir, "--nodes=2")
    event(workdir / "began-1-0")
    assert (workdir / "began-1-0").read_text().startswith("2 ")
    (workdir / "end").write_text("0")
    until(workdir, lambda status: status.state == "done")
    told("list", workdir.parent)
    assert "work     slurm" in capsys.readouterr().out


def test_a_job_that_may_have_fewer_nodes_has_all_that_are_free_and_others_when_it_is_resumed(begun):
    workdir = begun("--nodes=3", "--min_nodes=1", "--processes_per_node=2")
    assert (workdir / "began-0-0").read_text().startswith("6 127.0.0.1:")
    told("pause", workdir)
    until(workdir, lambda status: status.state == "paused")
    told("resume", workdir, "--nodes=2")
    event(workdir / "began-1-0")
    assert (workdir / "began-1-0").read_text().startswith("4 ")


def test_a_crash_starts_again_as_often_as_it_may(begun, capsys):
    """The other process saves then (75), which alone would start the job again any number of times."""
    workdir = begun("--nodes=2", "--retries=1")
    (workdir / "end-1-1").write_text("1")
    (workdir / "end-0-1").write_text(f"-{signal.SIGSEGV}")
    until(workdir, lambda status: status.state == "failed")
    assert (workdir / "jobs" / "1" / "crashes").read_text() == "\n\n"  # it began twice
    assert (workdir / "saved-0-0").exists() and (workdir / "saved-1-0").exists()
    told("show", workdir)
    assert f"1; the last one because process 1 {exit_codes.words(139)} at" in capsys.readouterr().out


def test_a_mistake_of_one_process_does_not_start_the_job_again(begun):
    workdir = begun("--nodes=2")
    (workdir / "end-0-1").write_text("2")
    until(workdir, lambda status: status.state == "failed")
    assert not (workdir / "began-1-0").exists() and (workdir / "saved-0-0").exists()
    assert "process 1 of 2 was the first to end early, with status 2" in jobs.newest(workdir).output.read_text()


def test_cancelling_saves_first(begun, tmp_path):
    """The folder's name has to be quoted for sbatch."""
    workdir = begun("--nodes=2", workdir=tmp_path / """it's 5%j of "all" #1""")
    told("cancel", workdir)
    until(workdir, lambda status: status.state == "cancelled")
    assert len(list(workdir.glob("saved-0-*"))) == 2 and not (workdir / "began-1-0").exists()
    assert (workdir / "jobs" / "1" / "output.log").is_file()


def test_a_job_of_a_higher_priority_comes_first_and_the_other_goes_on_after_it(begun, tmp_path):
    low, high = begun("--nodes=4", "--queue=low", "--cpus_per_process=2"), tmp_path / "high"
    begun("--nodes=4", "--queue=high", "--cpus_per_process=2", workdir=high)
    assert len(list(low.glob("saved-0-*"))) == 4
    until(low, lambda status: status.state == "waiting")
    (high / "end").write_text("0")
    event(low / "began-1-0")


def test_a_lost_node_starts_the_job_again_on_the_others(begun, cluster):
    workdir = begun("--nodes=2")
    lost = status_of(workdir).nodes.removeprefix("n[")[0]
    cluster.kill(f"n{lost}")
    event(workdir / "began-1-0")
    cluster.start_node(int(lost))


def test_a_second_job_in_a_workdir_is_refused(begun, capsys):
    workdir = begun()
    assert jobs_command.main(["resume", f"{workdir}"]) == 2
    assert "its job is running, and continues by itself; leave it" in capsys.readouterr().err
    jobs.record(replace(job := jobs.newest(workdir), id=""))  # its submission was cut off
    assert launch.main(["--on=slurm", f"--workdir={workdir}", "--", "true"]) == 2
    assert "has a job that is running" in capsys.readouterr().err and jobs.newest(workdir).id == job.id


def test_an_array_is_a_job_for_each_number(cluster, tmp_path):
    assert launch.main(["--on=slurm", f"--workdir={tmp_path}/of-{{task}}", "--array=1-2", "--", "echo", "{task}"]) == 0
    for task in "12":
        until(workdir := tmp_path / f"of-{task}", lambda status: status.state == "done")
        assert jobs.newest(workdir).output.read_text() == f"{task}\n"


def test_slurm_says_where_a_job_would_run_or_refuses_it(cluster, tmp_path, capsys):
    words = ["--on=slurm", f"--workdir={tmp_path}/work", "--dry_run"]
    assert launch.main([*words, "--nodes=2", "--", "true"]) == 0
    assert re.search(r"Job \d+ to start at .* on nodes n\[1-2\] in partition low", capsys.readouterr().err)
    assert launch.main([*words, "--nodes=9", "--", "true"]) == 2
    assert capsys.readouterr().err.startswith("sbatch: ") and not (tmp_path / "work").exists()


def test_what_slurm_refuses_is_told_in_a_line_and_leaves_nothing(cluster, tmp_path, capsys):
    assert launch.main(["--on=slurm", f"--workdir={tmp_path}", "--queue=none", "--", "true"]) == 2
    assert capsys.readouterr().err.startswith("sbatch: invalid partition specified: none")
    assert list((tmp_path / "jobs").iterdir()) == []


def test_a_run_saves_before_its_time_is_over_and_goes_on(begun):
    """Slurm sends the signal up to a minute early; in the first seconds there would be no run to get it."""
    workdir = begun("--time=0:02:00", "--grace_s=45")
    event(workdir / "saved-0-0")
    event(workdir / "began-1-0")


def test_two_nodes_compute_what_two_devices_of_one_process_do(cluster, tmp_path, tmp_path_factory):
    """The same bits, and the run is the command's own."""
    losses, flags = [], tiny_flags(tmp_path_factory, [
        "model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.steps=4",
        "data.global_batch_size=4", "train.eval_every=0", "mesh.data=2", "checkpoint.every=4", "train.log_every=1"])
    for on, more in (("slurm", ["--nodes=2"]), ("local", [])):
        workdir = tmp_path / on
        (tmp_path / "job.toml").write_text((cluster.folder / "job.toml").read_text() + (
            f'[env]\nXLA_FLAGS = "{virtual_devices(2 if on == "local" else 1)}"\n'))
        assert launch.main([flags[0].partition("=")[2], *flags[1:], f"--on={on}", f"--workdir={workdir}",
                            f"--job={tmp_path}/job.toml", *more]) == 0
        status = until(workdir, lambda status: status.state not in ("waiting", "running"))
        assert status.state == "done", jobs.newest(workdir).output.read_text()
        lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if line.get("loss") is not None])
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_nothing_is_left_of_a_cluster_whose_node_was_killed(tmp_path):
    with clusters.Cluster(tmp_path / "other", nodes=1) as other:
        (tmp_path / "job.sh").write_text(f"#!/bin/bash\necho $$ > {tmp_path}/partial\nmv {tmp_path}/partial "
                                         f"{tmp_path}/pid\nsrun sleep 600\n")
        other.run("sbatch", "--output=/dev/null", f"{tmp_path}/job.sh")
        wait_for((tmp_path / "pid").exists)
        wait_for(lambda: ".0 " in other.run("squeue", "--noheader", "--steps"))
        other.kill("n1")
        kill([int((tmp_path / "pid").read_text())])  # then nobody ends srun, and what it has started
    assert not writers(other.folder)
