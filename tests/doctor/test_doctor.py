"""The doctor: each trap, made up, is found and comes with its fix; on this machine the whole command passes."""

import json
import os
import signal
import socket
import time

import pytest

from jaxtrain.commands.doctor import main
from jaxtrain.doctor import (
    child,
    devices,
    environment,
    file_systems,
    installed_versions,
    machine,
    network,
    nvidia,
    speed,
)
from jaxtrain.doctor.child import Outcome
from jaxtrain.doctor.finding import Finding, guarded, ok, size, warn
from jaxtrain.doctor.installed_versions import Installed
from jaxtrain.doctor.machine import Machine
from tests.tiny import ROOT

GB = 10**9


def found(findings, level, *words):
    """Exactly one of that level has all these words; whatever is not ok has a fix."""
    assert all(finding.fix for finding in findings if finding.level != "ok"), findings
    fitting = [one for one in findings if one.level == level and all(word in str(one) for word in words)]
    assert len(fitting) == 1, findings
    return fitting[0]


def fine(findings):
    """Nothing is wrong."""
    assert findings and {finding.level for finding in findings} <= {"ok", "note"}, findings


# ------------------------------------------------------------------------------------------------------------ findings
def test_a_short_fix_stands_in_the_same_line_and_a_long_one_in_the_next():
    assert str(ok("cores", "2 of 2 cores")) == "ok    cores: 2 of 2 cores"
    assert str(warn("cores", "one", "ask for more")) == "warn  cores: one; ask for more"
    assert str(warn("cores", "one", "more " * 30)).splitlines()[1].startswith("      fix: more")
    assert [size(number) for number in (5, 2_000, 81_559 * 2**20, 3 * 10**13)] == ["5 B", "2 kB", "85.5 GB", "30 TB"]


def test_a_check_that_crashes_or_hangs_is_a_finding():
    found(guarded("clock", lambda: [1 / 0], 5), "warn", "could not check", "ZeroDivisionError")
    found(guarded("clock", lambda: time.sleep(60) or [], 0.05), "warn", "could not check within")


def test_a_child_is_heard_as_far_as_it_comes():
    outcome = child.run("child_that_is_not_there", seconds=60)
    assert outcome.end == "ended with status 1" and "No module named" in outcome.stderr
    assert child.run("probe", seconds=0.01).end.startswith("took longer than")
    assert child._objects('noise\n{"a": 1}\n[2]\n{"b"\n{"b": 3}') == {"a": 1, "b": 3}
    assert child._ended(-signal.SIGABRT) == "died by SIGABRT" and child._ended(0) == ""


# ------------------------------------------------------------------------------------------------------------ versions
def installed(needs_python=">=3.11", jax_needs=("jaxlib<=0.10.2,>=0.10.1",), **packages):
    packages = {"jaxtrain": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12.8", **packages}
    named = {name.replace("_", "-"): version for name, version in packages.items() if version}
    requires = {"jaxtrain": ["jax>=0.10", "flax>=0.12.8", 'pytest>=8; extra == "test"'],
                "jax": [*jax_needs, 'jaxlib==0.10.1; extra == "ci"',
                        'jax-cuda13-plugin<=0.10.2,>=0.10.2; extra == "cuda13-local"'],
                "jax-cuda13-plugin": ["jax-cuda13-pjrt==0.10.2", 'nvidia-cublas>=13; extra == "with-cuda"',
                                      'nvidia-nccl-cu13>=2.27; extra == "with-cuda"',
                                      'nvidia-cuda-nvcc>=13; extra == "with-cuda"'],
                "flax": ["orbax-checkpoint>=99"] * ("orbax_checkpoint" in packages)}
    return Installed({name: [version] if isinstance(version, str) else version for name, version in named.items()},
                     {name: needs for name, needs in requires.items() if name in named}, {"jax": needs_python})


def test_versions_that_fit():
    fine(installed_versions.versions(installed(), "3.11.9"))
    fine(installed_versions.versions(installed(jax_cuda13_plugin="0.10.2", jax_cuda13_pjrt="0.10.2"), "3.11.9"))


@pytest.mark.parametrize(("there", "python", "words"), [
    (dict(jaxlib="0.9.0"), "3.11.9", ["jaxlib<=0.10.2,>=0.10.1", "0.9.0 is installed", "pip install 'jax==0.10.2'"]),
    (dict(jaxlib=None), "3.11.9", ["jax needs what is not installed: jaxlib", "pip install 'jax==0.10.2'"]),
    (dict(flax="0.10.0"), "3.11.9", ["jaxtrain 0.1.0 needs flax>=0.12.8", "pip install 'flax>=0.12.8'"]),
    (dict(orbax_checkpoint="0.12.8"), "3.11.9", ["flax 0.12.8 needs orbax-checkpoint>=99"]),
    (dict(jax_cuda13_plugin="0.9.0", jax_cuda13_pjrt="0.10.2"), "3.11.9",
     ["jax 0.10.2 needs jax-cuda13-plugin", "pip install 'jax[cuda13]==0.10.2'"]),
    (dict(jax_cuda13_plugin="0.10.2", jax_cuda13_pjrt="0.9.0"), "3.11.9", ["needs jax-cuda13-pjrt==0.10.2"]),
    (dict(jax_cuda13_plugin="0.10.2", jax_cuda13_pjrt="0.10.2", nvidia_cublas="13.0", nvidia_cuda_nvcc="13.0"),
     "3.11.9",
     ["jax-cuda13-plugin needs what is not installed: nvidia-nccl-cu13>=2.27", "pip install 'jax[cuda13]==0.10.2'"]),
    (dict(jax_cuda12_plugin="0.10.2", jax_cuda12_pjrt="0.10.2", jax_cuda13_plugin="0.10.2", jax_cuda13_pjrt="0.10.2"),
     "3.11.9", ["CUDA 12 and 13", "pip uninstall jax-cuda12-plugin jax-cuda12-pjrt"]),
    (dict(jax_cuda12_pjrt="0.10.2"), "3.11.9", ["without jax-cuda12-plugin"]),
    (dict(needs_python=">=3.12"), "3.11.9", ["jax 0.10.2 needs Python 3.12, and this is 3.11.9"]),
], ids=lambda value: "" if isinstance(value, str) else None)
def test_versions_that_do_not_fit(there, python, words):
    found(installed_versions.versions(installed(**there), python), "FAIL", *words)


def test_ptxas_may_come_from_a_cuda_that_pip_did_not_install(monkeypatch):
    there = installed(jax_cuda13_plugin="0.10.2", jax_cuda13_pjrt="0.10.2", nvidia_cublas="13.0",
                      nvidia_nccl_cu13="2.28")
    monkeypatch.setattr(installed_versions.shutil, "which", lambda name, path=None: None)
    found(installed_versions.versions(there, "3.11.9"), "FAIL", "needs what is not installed: nvidia-cuda-nvcc>=13")
    monkeypatch.setattr(installed_versions.shutil, "which", lambda name, path=None: path and f"{path}/{name}")
    fine(installed_versions.versions(there, "3.11.9"))


def test_one_package_in_two_versions():
    two = installed(jaxlib=["0.10.2", "0.9.0"])
    found(installed_versions.versions(two, "3.11.9"), "warn", "jaxlib is installed 2 times")
    fine(installed_versions.versions(installed(jaxlib=["0.10.2", "0.10.2"], absl_py=["1", "2"]), "3.11.9"))


def test_cuda_libraries_in_the_way(tmp_path):
    (tmp_path / "libcudnn.so.9").touch()
    paths = {"LD_LIBRARY_PATH": f"/not/there:{tmp_path}"}
    found(installed_versions.library_path(paths, [13]), "warn", "libcudnn.so.9", "unset LD_LIBRARY_PATH")
    assert installed_versions.library_path(paths, []) == []


def test_what_is_installed_here():
    fine(installed_versions.versions(Installed.here()))


# -------------------------------------------------------------------------------------------------------------- NVIDIA
def gpu(index=0, **keys):
    keys = {"uuid": f"GPU-{index}aaa", "name": "NVIDIA H100", "driver": "580.65.06", "total": 80 * GB, "free": 79 * GB,
            "capability": 9.0, "persistent": True, **keys}
    return nvidia.Gpu(index, **keys)


def test_the_tables_of_nvidia_smi():
    table = ("0, GPU-1, NVIDIA H100 80GB HBM3, 580.159.04, 81559, 81000, 9.0, Disabled, 0, Enabled, Default\n"
             "1, GPU-2, NVIDIA H100 80GB HBM3, 580.159.04, 81559, 20, 9.0, Enabled, 3, Disabled, Prohibited\n"
             "2, GPU-3, Tesla P4, 580.159.04, 7680, 7000, 6.1, [N/A], [Not Supported], Disabled, Default\n")
    first, second, third = nvidia.parse(table, "GPU-2, 4711, /usr/bin/python3, 80000\n")
    assert (first.driver, first.total, first.capability, first.users) == ("580.159.04", 81559 * 2**20, 9.0, ())
    assert (second.mig, second.ecc_errors, second.persistent, second.mode) == (True, 3, False, "Prohibited")
    assert second.users == ("python3 (pid 4711, 80000 MiB)",)
    assert (third.mig, third.ecc_errors) == (False, None)
    assert nvidia.parse("no devices were found") == []


def test_gpus_that_are_well():
    fine(nvidia.gpus([gpu(0), gpu(1)], [13], {}))
    fine(nvidia.gpus(nvidia.parse("0, GPU-1, NVIDIA GB10, 580.1, [N/A], [N/A], 12.1, [N/A], [N/A], Enabled, Default"),
                     [13], {}))


@pytest.mark.parametrize(("one", "level", "words"), [
    (dict(driver="535.104.05"), "FAIL", ["535.104.05 is too old for CUDA 13", "580", "jax[cuda12]"]),
    (dict(driver="470.1"), "FAIL", ["470.1 is too old", "update the driver"]),
    (dict(capability=7.0), "FAIL", ["compute capability 7.0", "CUDA 13 begins at 7.5"]),
    (dict(ecc_errors=2), "FAIL", ["GPU 0 (NVIDIA H100) has 2 that ECC could not correct"]),
    (dict(mode="Prohibited"), "FAIL", ["no process may compute on GPU 0", "-c DEFAULT"]),
    (dict(mig=True), "warn", ["MIG: on for GPU 0", "-mig 0"]),
    (dict(persistent=False), "note", ["persistence: off for GPU 0", "nvidia-smi -pm 1"]),
    (dict(users=("python (pid 7)",)), "warn", ["GPU 0 is used by python (pid 7)"]),
    (dict(free=65 * GB), "warn", ["15 GB of GPU 0", "does not show"]),
    (dict(free=20 * GB, users=("x (pid 1)",)), "warn", ["JAX takes 75% of 80 GB, and GPU 0 has 20 GB free", "=0.23"]),
])
def test_gpus_that_are_not(one, level, words):
    found(nvidia.gpus([gpu(**one)], [13], {}), level, *words)


def test_gpus_of_two_kinds():
    found(nvidia.gpus([gpu(0), gpu(1, name="NVIDIA A100")], [13], {}), "warn", "different kinds")


@pytest.mark.parametrize(("names", "left"), [
    (None, [0, 1]), ("1", [1]), ("GPU-1", [1]), ("", []), ("0,-1,1", [0]), ("9", [])])
def test_which_gpus_are_visible(names, left):
    environ = {} if names is None else {"CUDA_VISIBLE_DEVICES": names}
    assert [one.index for one in nvidia.visible([gpu(0), gpu(1)], environ)] == left


@pytest.mark.parametrize(("said", "fix"), [
    ("Failed to initialize NVML: Driver/library version mismatch", "reboot"),
    ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver", "modprobe"),
    ("it hung for 20 s", "Xid"),
])
def test_nvidia_smi_that_does_not_answer(said, fix):
    found(nvidia.refused(said), "FAIL", said, fix)


def test_nvidia_smi_is_asked(tmp_path, monkeypatch):
    """An old driver does not know all fields; a process is told by its name."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("""#!/bin/sh
case "$1" in
*compute_cap*) echo 'Field "compute_cap" is not a valid field to query.'; exit 2;;
--query-gpu=*) echo '0, GPU-1, Tesla V100, 450.80.02, 16160, 16000';;
*) echo 'GPU-1, 12, /usr/bin/python3, 100';;
esac
""")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gpus, refused = nvidia.here()
    assert not refused and [(one.driver, one.users) for one in gpus] == [("450.80.02", ("python3 (pid 12, 100 MiB)",))]
    tool.write_text("#!/bin/sh\nsleep 60\n")
    monkeypatch.setattr(nvidia, "_PATIENCE", 0.1)
    found(nvidia.here()[1], "FAIL", "it hung", "Xid")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(nvidia, "present", lambda: True)
    found(nvidia.here()[1], "note", "no nvidia-smi")


# ------------------------------------------------------------------------------------------------------------- devices
def probed(platform="cuda", count=2, end="", stderr="", **measured):
    names = [f"{platform}:{i}" for i in range(count)]
    rates = {name: {"rate": 7e14, "right": True} for name in names}
    return Outcome({"jax": "0.10.2", "devices": [{"name": name, "kind": platform.upper(), "platform": platform,
                                                  "memory": 60 * GB} for name in names],
                    "bfloat16": rates, "float32": rates, "done": True, **measured}, end, stderr)


def test_devices_that_are_seen():
    assert "2 x cuda (CUDA), 60 GB each" in str(devices.devices(probed(), {}, [13], True)[0])
    fine(devices.devices(probed("cpu", 1), {"JAX_PLATFORMS": "cpu"}, [], False))


@pytest.mark.parametrize(("outcome", "environ", "cuda", "nvidia", "level", "words"), [
    (probed("cpu", 1), {}, [], True, "FAIL", ["JAX uses the CPU: its CUDA plugin is not installed", "jax[cuda13]"]),
    (probed("cpu", 1, stderr="E cuInit failed"), {}, [13], True, "FAIL", ["does not work here (E cuInit failed)"]),
    (probed("cpu", 1, stderr="RuntimeError: Unable to load cuFFT. Is it installed?\nE libtpu"), {}, [13], True, "FAIL",
     ["(RuntimeError: Unable to load cuFFT. Is it installed?)", "--force-reinstall"]),
    (probed("cpu", 1, stderr="cuInit: CUDA_ERROR_SYSTEM_NOT_READY"), {}, [13], True, "FAIL", ["nvidia-fabricmanager"]),
    (probed("cpu", 1), {"JAX_PLATFORMS": "cpu"}, [13], True, "warn", ["JAX_PLATFORMS=cpu", "an NVIDIA GPU"]),
    (probed("cpu", 1, tpu_chips=4), {}, [], False, "FAIL", ["4 TPU chips", "libtpu is not installed", "jax[tpu]"]),
    (probed("cpu", 1), {}, [13], False, "note", ["no GPU is there"]),
    (probed("cpu", 8), {}, [], False, "note", ["8 CPU devices share"]),
], ids=range(8))
def test_devices_that_are_hidden(outcome, environ, cuda, nvidia, level, words):
    found(devices.devices(outcome, environ, cuda, nvidia), level, *words)


@pytest.mark.parametrize(("outcome", "environ", "words"), [
    (Outcome({"jax": "0.10"}, "died by SIGABRT", "F0 parse_flags Unknown flags in XLA_FLAGS: --xla_a=1 --xla_b \n"), {},
     ["XLA_FLAGS", "--xla_a, --xla_b"]),
    (Outcome({"jax": "0.10"}, "died by SIGABRT", "F0 parse_flags Unknown flag in XLA_FLAGS: --xla_a=1\n"), {},
     ["know --xla_a and"]),
    (Outcome({"jax": "0.10"}, "took longer than 35 s"), {}, ["JAX hangs while it searches for devices"]),
    (Outcome({"error": "ModuleNotFoundError: No module named 'jax'"}, "ended with status 1"), {},
     ["cannot be imported"]),
    (Outcome({"error": "RuntimeError: Unable to initialize backend 'cuda'"}, "ended with status 1"),
     {"JAX_PLATFORMS": "cuda"}, ["JAX_PLATFORMS=cuda names devices that cannot be used"]),
    (Outcome({"error": "AssertionError: "}, "ended with status 1"), {"JAX_PLATFORMS": "cuda"}, ["JAX_PLATFORMS=cuda"]),
    (Outcome({}, "died by SIGSEGV"), {}, ["JAX does not start (died by SIGSEGV)"]),
    (Outcome({}, "took longer than 35 s"), {}, ["importing JAX took longer than 35 s"]),
], ids=range(8))
def test_jax_that_does_not_start(outcome, environ, words):
    found(devices.devices(outcome, environ, [], False), "FAIL", *words)


def test_unknown_flags_are_left_out():
    environ = {"XLA_FLAGS": "--xla_a=1 --xla_good=2 --xla_dump_to=/x", "JAX_DISABLE_JIT": "1", "HOME": "/root"}
    assert environment.for_probe(environ, ["--xla_a"]) == {
        "XLA_FLAGS": "--xla_good=2", "HOME": "/root", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


# --------------------------------------------------------------------------------------------------------------- speed
def test_devices_that_compute_rightly():
    fine(speed.speed(probed(all_reduce={"rate": 4e11, "wrong": []})))
    assert speed.speed(Outcome({}, "died by SIGABRT")) == []


def test_kernels_that_are_slow_here():
    found, = speed.slow_kernels(probed(slow=["experts on this GPU compute every row 16 times"]))
    assert f"{found}".startswith("note  kernels: experts on this GPU compute every row 16 times")
    assert not speed.slow_kernels(probed())


def test_devices_that_do_not():
    rates = {f"cuda:{i}": {"rate": 7e14 if i else 1e14, "right": i != 2} for i in range(4)}
    findings = speed.products("bfloat16", rates, 4)
    found(findings, "FAIL", "bfloat16 is wrong on cuda:2")
    found(findings, "warn", "bfloat16 is slow on cuda:0 (100 TFLOP/s); the median is 700 TFLOP/s")
    found(speed.all_reduce({"rate": 1.0, "wrong": ["cuda:1"]}, 2), "FAIL", "wrong on cuda:1")
    stopped = probed(end="took longer than 150 s", done=False)
    full = probed(end="ended with status 1", done=False, stderr="RESOURCE_EXHAUSTED: Out of memory")
    found(speed.speed(full), "FAIL", "ended with status 1 while adding up", "free memory of the devices")
    found(speed.speed(stopped), "FAIL", "took longer than 150 s while adding up over all devices", "NCCL_DEBUG=INFO")


# --------------------------------------------------------------------------------------------------------- environment
def look(environ, gpus=8, interfaces=("lo", "eth0"), infiniband=("mlx5_0",)):
    return environment.environment(environ, gpus, interfaces, infiniband)


def test_an_environment_without_traps():
    fine(look({"PATH": "/bin", "NCCL_SOCKET_IFNAME": "eth", "NCCL_IB_HCA": "=mlx5_0:1", "XLA_FLAGS": "--xla_gpu_x=1",
               "XLA_CLIENT_MEM_FRACTION": ".92", "JAX_ENABLE_X64": "0", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}))


@pytest.mark.parametrize(("variable", "value", "level"), [
    ("NCCL_P2P_DISABLE", "1", "warn"), ("NCCL_IB_DISABLE", "1", "warn"), ("NCCL_SHM_DISABLE", "1", "warn"),
    ("NCCL_DEBUG", "TRACE", "warn"), ("NCCL_DEBUG", "INFO", "note"), ("NCCL_SOCKET_IFNAME", "ib0", "FAIL"),
    ("NCCL_SOCKET_IFNAME", "=eth", "FAIL"), ("NCCL_SOCKET_IFNAME", "^eth0", "warn"), ("NCCL_IB_HCA", "bnxt", "FAIL"),
    ("XLA_PYTHON_CLIENT_PREALLOCATE", "false", "warn"), ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", "warn"),
    ("XLA_PYTHON_CLIENT_ALLOCATOR", "best", "FAIL"), ("XLA_CLIENT_MEM_FRACTION", "0.99", "warn"),
    ("XLA_PYTHON_CLIENT_MEM_FRACTION", ".2", "warn"), ("XLA_CLIENT_MEM_FRACTION", "90%", "FAIL"),
    ("XLA_CLIENT_MEM_FRACTION", "90", "FAIL"), ("TF_GPU_ALLOCATOR", "cuda_malloc_async", "warn"),
    ("JAX_DISABLE_JIT", "true", "FAIL"), ("JAX_DEBUG_NANS", "1", "warn"), ("JAX_ENABLE_X64", "True", "warn"),
    ("XLA_FLAGS", "--xla_dump_to=/tmp/x", "warn"), ("XLA_FLAGS", "--xla_gpu_autotune_level=0", "warn"),
    ("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=false", "warn"),
    ("CUDA_VISIBLE_DEVICES", "", "FAIL"), ("CUDA_VISIBLE_DEVICES", "-1", "FAIL"),
    ("CUDA_VISIBLE_DEVICES", "0,1", "note"),
])
def test_a_variable_that_hurts(variable, value, level):
    assert variable in found(look({variable: value}), level).what + found(look({variable: value}), level).check


def test_both_names_of_the_share_of_memory():
    both = {"XLA_CLIENT_MEM_FRACTION": ".9", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}
    found(look(both), "FAIL", "both set", "unset XLA_PYTHON_CLIENT_MEM_FRACTION")


TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "16", "SLURM_PROCID": "3",
        "SLURM_LOCALID": "3", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}


@pytest.mark.parametrize(("environ", "gpus", "level", "words"), [
    (TASK, 8, "ok", ["8 tasks a host, 1 GPU each"]),
    ({**TASK, "CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_PER_TASK": "1"}, 8, "warn",
     ["each of 8 tasks sees one GPU", "--gpu-bind=none"]),
    ({**TASK, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "2"}, 8, "ok", ["1 task a host, 8 GPUs each"]),
    ({**TASK, "SLURM_STEP_TASKS_PER_NODE": "3(x2)"}, 8, "warn", ["3 tasks a host and 8 GPUs: 2 stay idle"]),
    ({**TASK, "CUDA_VISIBLE_DEVICES": "0", "JAX_LOCAL_DEVICE_IDS": "0"}, 8, "warn", ["each of 8 tasks sees one GPU"]),
], ids=["right", "bound", "all", "idle", "bound by hand"])
def test_tasks_of_slurm(environ, gpus, level, words):
    found(environment.slurm(environ, gpus), level, *words)


def test_slurm_with_one_task_or_without_gpus_is_left_alone():
    assert environment.slurm({**TASK, "SLURM_NTASKS": "1"}, 8) == []
    assert environment.slurm({name: value for name, value in TASK.items() if "STEP" not in name}, 8) == []
    assert environment.slurm(TASK, 0) == []


@pytest.mark.parametrize(("environ", "level", "words"), [
    ({}, "ok", ["a run here is a single process"]),
    (TASK, "ok", ["Slurm: processes 16, this one is 3, coordinator n1:61447"]),
    ({name: value for name, value in TASK.items() if "STEP" not in name}, "note", ["not a task of it", "srun"]),
    ({name: value for name, value in TASK.items() if "PROCID" not in name}, "FAIL", ["not set: SLURM_PROCID"]),
    ({"WORLD_SIZE": "4"}, "note", ["variables of torchrun: they do not count, because RANK is not set"]),
])
def test_what_is_known_of_other_processes(environ, level, words):
    found(environment.processes(environ), level, *words)


# ---------------------------------------------------------------------------------------------------------------- host
def test_a_host_that_is_well():
    fine(machine.machine(Machine(64, 64, None, 512 * GB, 500 * GB, shared=256 * GB), 8))


@pytest.mark.parametrize(("seen", "gpus", "level", "words"), [
    (Machine(64, 1), 8, "warn", ["1 of 64 cores, for 8 GPUs", "--cpus-per-task"]),
    (Machine(64, 64, quota=1.5), 0, "warn", ["1.5 of 64 cores"]),
    (Machine(64, 30), 0, "note", ["30 of 64 cores"]),
    (Machine(8, 8, memory=64 * GB, free=GB), 0, "warn", ["1 GB free"]),
    (Machine(8, 8, memory=64 * GB, free=60 * GB, limit=8 * GB, used=7 * GB), 0, "warn",
     ["1 GB free, of 8 GB that the container may use"]),
    (Machine(8, 8, files=(256, 65536)), 0, "warn", ["at most 256", "ulimit -n 65536"]),
    (Machine(8, 8, files=(1024, 1024)), 0, "note", ["at most 1024", "--ulimit nofile"]),
    (Machine(64, 64, shared=64 * 2**20), 8, "warn", ["67.1 MB, and NCCL", "--shm-size"]),
], ids=range(8))
def test_a_host_that_is_not(seen, gpus, level, words):
    found(machine.machine(seen, gpus), level, *words)


def test_the_limits_of_a_container(tmp_path):
    inner = tmp_path / "pod" / "box"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (inner / "memory.max").write_text("max\n")
    (tmp_path / "pod" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "pod" / "memory.max").write_text("8000000000\n")
    (tmp_path / "pod" / "memory.current").write_text("7000000000\n")
    (tmp_path / "pod" / "memory.stat").write_text("anon 5\ninactive_file 4000000000\n")
    assert machine.container(tmp_path, "0::/pod/box\n") == (1.5, 8 * GB, 3 * GB)
    assert machine.container(tmp_path, "0::/elsewhere\n") == (None, None, None)
    old = tmp_path / "cpu"
    old.mkdir()
    (old / "cpu.cfs_quota_us").write_text("200000\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.container(tmp_path, "4:cpu:/docker/1234\n")[0] == 2.0


# --------------------------------------------------------------------------------------------------------- file system
MOUNTS = ("/dev/vda / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\nserver:/x /mnt/big\\040disk nfs4 rw 0 0\n"
          "gcsfuse /bucket fuse.gcsfuse rw 0 0\noverlay /box overlay rw 0 0\n")


@pytest.mark.parametrize(("where", "level", "words"), [
    ("/tmp/run", "warn", ["in memory (tmpfs)"]), ("/mnt/big disk/run", "ok", ["nfs4"]), ("/tmpother", "ok", ["ext4"]),
    ("/bucket/run", "warn", ["fuse.gcsfuse", "checkpoint.mirror"]), ("/box/run", "note", ["container's own layer"])])
def test_where_the_workdir_lies(where, level, words):
    found(file_systems.kind(where, MOUNTS, several=False), level, *words)


def test_several_hosts_need_a_workdir_that_all_see():
    found(file_systems.kind("/home/run", MOUNTS, several=True), "warn", "ext4, which other hosts do not see")
    found(file_systems.kind("/mnt/big disk/run", MOUNTS, several=True), "ok", "nfs4")
    assert not network.several_hosts({"SLURM_NNODES": "1"}, "127.0.0.1") and not network.several_hosts({}, "")
    assert network.several_hosts({"SLURM_NNODES": "2"}, "") and network.several_hosts({}, "node1")


GOOD = {"folder": "/runs", "free": 900 * GB, "names": 10**6, "skew": 0.0, "locks": True, "wrote": 9e8, "read": 3e9,
        "small": 4000.0}


@pytest.mark.parametrize(("measured", "end", "level", "words"), [
    ({"folder": "/runs", "refused": "Read-only file system"}, "", "FAIL", ["/runs cannot be written (Read-only"]),
    ({**GOOD, "free": GB // 10}, "", "FAIL", ["100 MB free"]), ({**GOOD, "free": 5 * GB}, "", "warn", ["5 GB free"]),
    ({**GOOD, "names": 3}, "", "warn", ["inodes"]), ({**GOOD, "skew": -7.0}, "", "warn", ["7.0 s behind"]),
    ({**GOOD, "locks": False}, "", "FAIL", ["no file locks"]), ({**GOOD, "wrote": 1e7}, "", "warn", ["writes 10 MB/s"]),
    ({**GOOD, "small": 5.0}, "", "warn", ["5 small files per second"]),
    ({"folder": "/runs"}, "took longer than 25 s", "FAIL", ["/runs does not answer"]),
    (GOOD, "took longer than 25 s", "warn", ["not measured to the end"]),
], ids=range(10))
def test_a_workdir_that_is_not_well(measured, end, level, words):
    found(file_systems.files(Outcome(measured, end), MOUNTS, several=False), level, *words)


def test_a_folder_is_measured_and_left_as_it_was(tmp_path, capsys):
    file_systems.measure(tmp_path / "not" / "yet")
    seen = child._objects(capsys.readouterr().out)
    assert (seen["folder"], seen["missing"]) == (str(tmp_path), str(tmp_path / "not" / "yet"))
    assert seen["locks"] and abs(seen["skew"]) < file_systems.SKEW
    assert min(seen["wrote"], seen["read"], seen["small"]) > 0 and list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    file_systems.measure(tmp_path / "file" / "run")
    assert "is a file" in child._objects(capsys.readouterr().out)["refused"]


def test_the_cache(tmp_path, monkeypatch):
    found(file_systems.cache(str(tmp_path / "not" / "yet")), "ok", "can be written")
    assert file_systems.cache("gs://bucket/cache") == []
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found(file_systems.cache(str(tmp_path)), "warn", "cannot be written", "JAXTRAIN_CACHE")


# ------------------------------------------------------------------------------------------------------------- network
def test_a_coordinator_on_this_host():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found(network.coordinator(f"127.0.0.1:{port}"), "warn", f"port {port} of this host cannot be used", "ss -ltnp")
    found(network.coordinator(f"localhost:{port}"), "ok", "free for process 0")


@pytest.mark.parametrize(("error", "level", "words"), [
    (None, "ok", ["a process listens"]), (ConnectionRefusedError(), "note", ["as expected before process 0 starts"]),
    (TimeoutError(), "FAIL", ["does not answer within 5 s", "firewall"]),
    (OSError(113, "No route to host"), "FAIL", ["cannot be reached (No route to host)"]),
], ids=["ok", "no", "late", "route"])
def test_a_coordinator_elsewhere(error, level, words, monkeypatch):
    def connect(address, timeout):
        assert address == ("192.0.2.7", 1234) and timeout == network.SECONDS
        if error:
            raise error
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)
    found(network.coordinator("192.0.2.7:1234"), level, *words)


def test_a_name_that_nobody_knows(monkeypatch):
    def unknown(*args, **keys):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found(network.coordinator("nosuchhost:1234"), "FAIL", "the name nosuchhost is not known here")
    found(network.hostname("me", True), "warn", "me is not known to this host itself")


def test_a_host_whose_name_is_loopback():
    found(network.hostname("localhost", True), "warn", "/etc/hosts")
    found(network.hostname("localhost", False), "ok", "enough for one host")


def test_proxies():
    proxy = {"http_proxy": "http://proxy:3128", "no_proxy": "localhost,.cluster,10.0.0.0/8"}
    found(network.proxies(proxy, "node1"), "warn", "behind it", "export no_proxy=localhost,.cluster,10.0.0.0/8,node1")
    found(network.proxies(proxy, "node1.cluster"), "ok", "exempts node1.cluster")
    found(network.proxies(proxy, "10.1.2.3"), "ok", "exempts 10.1.2.3")
    found(network.proxies(proxy), "note", "http_proxy is set")
    assert network.proxies({"ftp_proxy": "x"}) == []


# --------------------------------------------------------------------------------------------------------- the command
@pytest.mark.parametrize(("flags", "words"), [
    (["--coordinator=node1"], "'node1' is not host:port"), (["--workdr=x"], "--workdir"),
    (["--workdir=s3://b/x"], "mirror")])
def test_a_wrong_command_line(flags, words, capsys):
    assert main(flags) == 2
    assert words in capsys.readouterr().err


def test_the_exit_status_tells_of_failures(monkeypatch, capsys):
    monkeypatch.setattr("jaxtrain.commands.doctor.findings", lambda *args: [Finding("FAIL", "driver", "old", "new")])
    assert main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"level": "FAIL", "check": "driver", "what": "old", "fix": "new"}


@pytest.mark.slow
def test_the_whole_command(tmp_path, forked):
    environ = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_no_such_flag=1"}
    command = ["-m", "jaxtrain", "doctor", f"--workdir={tmp_path}", "--json"]
    done = forked(command, ROOT, environ, timeout=300)
    findings = [Finding(**json.loads(line)) for line in done.stdout.splitlines()]
    found(findings, "FAIL", "XLA_FLAGS", "--xla_no_such_flag")
    found(findings, "ok", "2 x cpu")
    found(findings, "ok", "all-reduce", "over 2 devices is right")
    assert done.returncode == 1 and not done.stderr, done.stderr
    done = forked(command[:-1], ROOT, {**environ, "XLA_FLAGS": ""}, timeout=120)
    assert done.returncode == 0 and "could not check" not in done.stdout, done.stdout + done.stderr
    assert "float32 is right" in done.stdout and "0 FAIL" in done.stdout
