"""A job's machines against its config: as many devices as the mesh asks for, and room for a step on each."""

import importlib
import os

import pytest

from jaxtrain.commands import jobs, launch
from jaxtrain.config.load import load_config
from jaxtrain.errors import UserError
from jaxtrain.launch import job_record as records
from jaxtrain.launch.job_spec import JobSpec
from jaxtrain.launch.mesh_check import check_mesh, memory_warning


def checked(spec: dict, **keys) -> list[int]:
    config = load_config("configs/gpt.py:tiny", {key.replace("_", ".", 1): value for key, value in keys.items()})
    return check_mesh(config, JobSpec(**spec))


@pytest.mark.parametrize("spec, keys, said", [
    ({"nodes": 2, "accelerators_per_node": 4}, {"mesh_data": 2, "mesh_tensor": 2}, "nodes: 2 x 4 accelerators are 8 "
     "devices, and the mesh (data=2,tensor=2) asks for 4; set nodes=1"),
    ({"nodes": 3, "accelerators_per_node": 2}, {"mesh_data": -1, "mesh_tensor": 4}, "nodes: 3 x 2 accelerators are 6 "
     "devices, and the mesh (data=-1,tensor=4) asks for a multiple of 4; set nodes=2"),
    ({"nodes": 1, "accelerators_per_node": 8}, {"mesh_data": 3}, "nodes: 1 x 8 accelerators are 8 devices, and the "
     "mesh (data=3) asks for 3; set one mesh axis to -1, or others"),
    ({"nodes": 1, "accelerators_per_node": 8}, {"mesh_data": -1, "mesh_tensor": 3}, "nodes: 1 x 8 accelerators are 8 "
     "devices, and the mesh (data=-1,tensor=3) asks for a multiple of 3; set other mesh axes"),
    ({"nodes": 1, "accelerators_per_node": 4, "accelerator": "tpu7x"}, {"mesh_data": 4},
     "nodes: 1 x 4 accelerators are 8 devices, ")])
def test_other_numbers_of_devices_than_the_mesh_asks_for_are_refused(spec, keys, said):
    with pytest.raises(UserError) as refused:
        checked(spec, **keys)
    assert f"{refused.value}".startswith(said)


def test_what_the_mesh_asks_for_is_not_refused():
    assert checked({"nodes": 2, "accelerators_per_node": 4}, mesh_data=2, mesh_tensor=4) == []
    assert checked({"nodes": 3, "accelerators_per_node": 4}, mesh_data=-1, mesh_tensor=4,
                   data_global_batch_size=24) == []
    assert checked({"nodes": 3}, mesh_data=2) == []  # of CPUs nobody knows how many devices they are


BATCH = {"data_global_batch_size": 16, "mesh_data": -1}


@pytest.mark.parametrize("spec, keys, said", [
    ({"nodes": 3}, {}, "nodes: on 3 machines the mesh and train.accumulation=1 cut a batch into 3 parts, which do not "
     "divide data.global_batch_size=16; set nodes=2 or nodes=4"),
    ({"nodes": 3, "accelerators_per_node": 4}, {"mesh_tensor": 2}, "nodes: on 3 machines the mesh and "
     "train.accumulation=1 cut a batch into 6 parts, which do not divide data.global_batch_size=16; set nodes=2 or "
     "nodes=4"),
    ({"nodes": 5, "processes_per_node": 2}, {"train_accumulation": 2}, "nodes: on 5 machines the mesh and "
     "train.accumulation=2 cut a batch into 20 parts, which do not divide data.global_batch_size=16; set nodes=4"),
    ({"nodes": 1, "accelerators_per_node": 3}, {}, "nodes: on 1 machines the mesh and train.accumulation=1 cut a batch "
     "into 3 parts, which do not divide data.global_batch_size=16; make the batch a multiple of 3")])
def test_a_number_of_nodes_over_which_the_batch_does_not_divide_is_refused(spec, keys, said):
    with pytest.raises(UserError) as refused:
        checked(spec, **BATCH | keys)
    assert f"{refused.value}" == said


def test_numbers_of_nodes_over_which_the_batch_divides_are_not_refused():
    for nodes in (1, 2, 4, 8, 16):
        assert checked({"nodes": nodes}, **BATCH) == []
    assert checked({"nodes": 3}, **BATCH, mesh_tensor=2) == []  # the CPUs of a process may be several devices


@pytest.mark.parametrize("engine", ["slurm", "kubernetes", "ray"])
def test_a_job_is_not_resumed_on_such_a_number_of_nodes(tmp_path, capsys, engine):
    command = ["python", "-m", "jaxtrain.main", "--config=configs/gpt.py:tiny", "--config.data.global_batch_size=16",
               "--config.mesh.data=-1", f"--workdir={tmp_path}"]
    records.record(records.Job(records.new_folder(tmp_path), engine, "a", command, os.getcwd(), JobSpec(nodes=2),
                               id="7"))
    for nodes, said in (("3", "nodes: on 3 machines the mesh"), ("0", "--nodes: 0 is not a number of machines")):
        assert jobs.main(["resume", f"{tmp_path}", f"--nodes={nodes}"]) == 2  # the engine is not asked
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


@pytest.mark.slow
def test_numbers_of_nodes_with_which_a_run_can_go_on():
    elastic = {"mesh_data": 4, "resilience_elastic": True, "data_global_batch_size": 16}
    assert checked({"nodes": 4, "min_nodes": 2, "accelerators_per_node": 1}, **elastic) == [2, 4]  # 16 rows, not by 3
    assert checked({"nodes": 4, "min_nodes": 2, "accelerators_per_node": 1},
                   **elastic | {"data_global_batch_size": 24}) == []
    with pytest.raises(UserError, match=r"^mesh: with 3 nodes of 1 devices: no substitute for data=4 fits 3 devices"):
        checked({"nodes": 4, "min_nodes": 3, "accelerators_per_node": 1}, **elastic)


@pytest.mark.slow
def test_a_dry_run_says_what_does_not_fit_and_a_job_is_refused_before_it_waits(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}")  # a Slurm that is installed here would be asked when the job starts
    job = ["configs/gpt.py:tiny", "--on=slurm", f"--workdir={tmp_path}/w", "--accelerators_per_node=2",
           "--accelerator=h100", "--time=10:00:00", "--config.mesh.data=2"]
    large = ["--config.model.embed_dim=32768", "--config.model.num_heads=256", "--config.model.vocab_size=200000"]
    assert launch.main([*job, "--dry_run", *large]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("warning: a step is predicted to take ") and "of a device's 78.1 GB (h100)" in said[0]
    assert said[1] == "at most $60.00 until it is stopped after 10:00:00, at $6.00 an hour"
    assert launch.main([*job, "--dry_run"]) == 0
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert launch.main([*job, "--nodes=2"]) == 2
    assert "set nodes=1" in capsys.readouterr().err and not (tmp_path / "w").exists()


def test_a_prediction_that_fails_stops_nothing(monkeypatch):
    def fails(*_):
        raise ZeroDivisionError("nothing\nto divide")

    monkeypatch.setattr(importlib.import_module("jaxtrain.plan.estimate"), "estimate", fails)
    said = memory_warning(load_config("configs/gpt.py:tiny", {}), JobSpec(accelerators_per_node=1, accelerator="h100"))
    assert said == "its memory is not predicted: nothing"
