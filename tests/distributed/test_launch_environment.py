"""The environment's description of the processes, from dictionaries of variables; and processes that really start."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.distributed import launch_environment as environment
from jaxtrain.errors import UserError
from tests.launch.slurm import cluster as clusters
from tests.tiny import free_address, virtual_devices

ROOT = Path(__file__).parents[2]
JAX = {"JAX_COORDINATOR_ADDRESS": "there:2", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "0"}
TORCH = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "3"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_NODES": "2",
         "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
         "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1"}
MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
       "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_NAMESPACE": "1947664385", "PMIX_RANK": "2",
       "OMPI_MCA_orte_hnp_uri": "1947664384.0;tcp://10.0.0.5,10.1.0.5:52947"}
MPI_5 = {name: value for name, value in MPI.items() if "orte" not in name}


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize("flags, variables, expected", [
    ((None, None, None), {}, None),
    (("here:1", 1, 0), {}, ("flags", "here:1", 1, 0)),
    (("here:1", 3, 2), JAX | SLURM, ("flags", "here:1", 3, 2)),
    ((None, None, None), JAX | TORCH | SLURM | MPI, ("variables of JAX", "there:2", 4, 0)),
    ((None, None, 1), JAX, ("flags", "there:2", 4, 1)),  # flags win, one by one
    ((None, None, None), TORCH, ("variables of torchrun", "host0:29500", 4, 3)),
    ((None, None, None), TORCH | {"TORCHELASTIC_RUN_ID": "x"}, ("variables of torchrun", "host0:29501", 4, 3)),
    ((None, None, None), TORCH | {"MASTER_ADDR": "fd00::2"}, ("variables of torchrun", "[fd00::2]:29500", 4, 3)),
    ((None, None, None), TORCH | SLURM | {"LOCAL_RANK": "1"}, ("variables of torchrun", "host0:29500", 4, 3)),
    ((None, None, None), SLURM, ("Slurm", "n1:61447", 2, 1)),
    ((None, None, None), SLURM | {"SLURM_STEP_ID": "1"}, ("Slurm", "n1:61544", 2, 1)),  # steps have their own ports
    ((None, None, None), SLURM | {"SLURM_STEP_NUM_NODES": "1"}, ("Slurm", "127.0.0.1:61447", 2, 1)),
    ((None, None, None), MPI, ("Open MPI", "10.0.0.5:62675", 4, 2)),
    ((None, None, None), MPI | SLURM, ("Open MPI", "10.0.0.5:62675", 4, 2)),  # Slurm started mpirun's daemons
    ((None, None, None), MPI_5 | SLURM, ("Open MPI", "n1:62675", 4, 2)),
    ((None, None, None), MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, ("Open MPI", "127.0.0.1:62675", 4, 2)),
    (("h:1", None, None), MPI_5, ("flags and Open MPI", "h:1", 4, 2)),
    (("h:1", None, None), SLURM, ("flags and Slurm", "h:1", 2, 1)),
    (("h:1", 4, None), {"JOB_COMPLETION_INDEX": "3"}, ("flags and Kubernetes", "h:1", 4, 3)),
    (("h:1", 4, None), {"PMIX_RANK": "3"}, ("flags and PMIx", "h:1", 4, 3)),
])
def test_what_is_used(flags, variables, expected):
    found = environment.used(variables, flags)
    assert found is expected is None or (found.source, found.coordinator, found.processes, found.rank) == expected


@pytest.mark.parametrize("variables", [
    without(TORCH, "RANK"), without(TORCH, "WORLD_SIZE"), {"WORLD_SIZE": "4"}, TORCH | {"RANK": "first"},
    without(SLURM, "SLURM_STEP_NODELIST", "SLURM_STEP_ID", "SLURM_PROCID"),  # the shell of salloc, or a batch script
    SLURM | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # its shell, where that is a step
    {"PMIX_RANK": "0"}, {"JOB_COMPLETION_INDEX": "2"}, {"MASTER_ADDR": "x", "MASTER_PORT": "1"}, {"SLURM_NTASKS": "8"},
])
def test_what_is_left_in_a_shell_does_not_make_it_wait(variables):
    assert environment.used(variables) is None


def test_a_step_of_one_task_is_alone():
    one = SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}  # although SLURM_NTASKS is 2
    assert environment.used(one).processes == 1
    assert environment.used({"WORLD_SIZE": "1", "RANK": "0"}).processes == 1


@pytest.mark.parametrize("flags, variables, words", [
    (("here:1", None, None), {}, "several processes need --coordinator, --num_processes and --process_id"),
    ((None, None, None), without(JAX, "JAX_PROCESS_ID"), "several processes need"),
    ((None, None, None), without(TORCH, "MASTER_ADDR"), "MASTER_ADDR: RANK=3 and WORLD_SIZE=4, without MASTER_ADDR"),
    ((None, None, None), TORCH | SLURM, "RANK: RANK and WORLD_SIZE say that this is process 3 of 4, and Slurm that it"),
    ((None, None, None), without(SLURM, "SLURM_PROCID"), "Slurm: not set: SLURM_PROCID; pass all"),
    ((None, None, None), MPI_5, "Open MPI: from version 5 on it does not say where process 0 is; mpirun -x JAX_COO"),
    ((None, None, None), {"PMIX_RANK": "1"}, "PMIX_RANK=1 does not say how many processes there are"),
    ((None, None, None), TORCH | {"RANK": "4"}, r"4 is not below --num_processes=4 \(variables of torchrun\)"),
    ((None, None, None), JAX | {"JAX_COORDINATOR_ADDRESS": "there"}, "'there' is not host:port"),
    ((None, None, None), {"JAX_NUM_PROCESSES": "two"}, "'two' is not a whole number; set it as you would --num_proc"),
])
def test_what_is_refused(flags, variables, words):
    with pytest.raises(UserError, match=words):
        environment.used(variables, flags)


@pytest.mark.parametrize("variables, gpus, expected", [
    ({}, 8, None),
    (SLURM, 8, None),  # one task a host has all of them, where JAX takes the first
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "3"}, 8, [3]),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"}, 8, [4, 5, 6, 7]),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"}, 0, [1]),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "3", "CUDA_VISIBLE_DEVICES": "3"}, 8, None),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_PER_TASK": "4"}, 8,
     None),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "4"}, 4, None),
    ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}, 4, [2]),
    (MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 4, [2, 3]),
])
def test_the_gpus_of_a_process(variables, gpus, expected):
    assert environment.local_devices(variables, gpus) == expected


@pytest.mark.parametrize("hosts, first", [
    ("n1", "n1"), ("n1,n2", "n1"), ("n[1-2]", "n1"), ("n[001-004,7],login", "n001"), ("r[1-2]n[03-04]-ib", "r1n03-ib")])
def test_the_first_host(hosts, first):
    assert environment.first_host(hosts) == first


def test_an_address_in_place_of_an_unknown_name():
    assert environment.known_to_the_network("127.0.0.1:5", lambda _: "10.0.0.1") == "127.0.0.1:5"
    assert environment.known_to_the_network("no.such.invalid:5", lambda _: "10.0.0.1") == "10.0.0.1:5"
    with pytest.raises(UserError, match="SLURM_STEP_NODELIST: the network does not know the name no"):
        environment.known_to_the_network("no.such.invalid:5", lambda _: "")


# ------------------------------------------------------------------------------------------------- processes that start
# What a run does first.
CONNECTS = """
import sys
from pathlib import Path
from jaxtrain.distributed import processes
processes.initialize()
processes.connect(300)
import jax
(Path(sys.argv[1]) / str(jax.process_index())).write_text(f"{jax.process_count()} {jax.device_count()}")
sys.exit(processes.leave(0))
"""


def connected(folder):
    return [(folder / str(rank)).read_text() for rank in range(2)] == ["2 2", "2 2"]


def variables_here(**more):
    own = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    return without(os.environ, *own) | {"PYTHONPATH": f"{ROOT}", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": virtual_devices(1)
                                        } | more


@pytest.mark.slow
def test_variables_of_torchrun_start_two_processes(tmp_path, forked):
    host, port = free_address().split(":")
    started = [forked.start(["-c", CONNECTS, f"{tmp_path}"], ROOT, variables_here(
        MASTER_ADDR=host, MASTER_PORT=port, WORLD_SIZE="2", RANK=f"{rank}")) for rank in range(2)]
    try:
        said = [process.communicate(timeout=400)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0] and connected(tmp_path), said


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="apt-get install openmpi-bin")
def test_open_mpi_starts_two_processes(tmp_path):
    done = subprocess.run(["mpirun", "-n", "2", "--allow-run-as-root", "--oversubscribe", sys.executable, "-c",
                           CONNECTS, str(tmp_path)], env=variables_here(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0 and connected(tmp_path), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not all(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in clusters.NEEDED),
                    reason="apt-get install --no-install-recommends slurm-wlm munge")
def test_slurm_starts_a_process_on_each_of_two_nodes(tmp_path, monkeypatch):
    """The names of the nodes are not known to the network here."""
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin")
    with clusters.Cluster(tmp_path / "slurm", nodes=2) as cluster:
        done = subprocess.run(["srun", "-N2", "-n2", sys.executable, "-c", CONNECTS, f"{tmp_path}"], text=True,
                              capture_output=True, timeout=400,
                              env=variables_here(SLURM_CONF=cluster.environment["SLURM_CONF"]))
    assert done.returncode == 0 and connected(tmp_path), done.stderr
