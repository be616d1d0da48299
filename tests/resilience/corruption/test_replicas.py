"""A device whose copy differs by one bit is found and named, on any mesh; what it computed is not saved."""

import json
import os
import socket
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint import CheckpointManager
from jaxtrain.main import main
from jaxtrain.observe.events import events, record
from jaxtrain.resilience.corruption.replays import Replays
from jaxtrain.resilience.corruption.replicas import LAG, Replicas
from jaxtrain.resilience.corruption.suspects import Corrupted, SuspectDevices
from jaxtrain.sharding.mesh import make_mesh
from tests.faults import flipped, flipped_somewhere
from tests.tiny import devices, free_address, tiny_flags, virtual_devices

ROOT = Path(__file__).parents[3]


def placed(mesh, spec, shape=(16, 24)):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=4, tensor=2)


# What a device with a wrong copy is found among: sharding -> the devices beside device 5 that hold the same.
@pytest.mark.parametrize("spec, others", [
    ((), [0, 1, 2, 3, 4, 6, 7]), ((None, "tensor"), [1, 3, 7]), (("data",), [4]), (("data", "tensor"), None)])
def test_a_wrong_copy(mesh, tmp_path, spec, others):
    tree = {"fine": placed(mesh, ()), "wrong": placed(mesh, spec)}
    replicas = Replicas(tree, 1, SuspectDevices(tmp_path))
    replicas.check(1, tree, now=True)
    tree["wrong"] = flipped(tree["wrong"], device=5, bits=1 << 31, word=3)
    if others is None:  # nobody else has this piece
        return replicas.check(2, tree, now=True)
    with pytest.raises(Corrupted, match="silent corruption: wrong differ between devices that hold the same after st"):
        replicas.check(2, tree, now=True)
    [event] = events(tmp_path)
    assert [device["id"] for device in event["devices"]] == ([5] if len(others) > 1 else [*others, 5])
    assert event["outvoted"] == (len(others) > 1) and event["leaves"] == ["wrong"] and event["step"] == 2


def test_meshes_of_three_axes(tmp_path):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    for spec, named in [(("fsdp", "tensor"), {2, 6}), ((("fsdp", "tensor"),), {2, 6}), (("tensor", "fsdp"), {2, 6}),
                        ((None, ("tensor", "data")), {0, 2}), (("fsdp",), {6})]:
        tree = {"x": placed(mesh, spec)}
        replicas = Replicas(tree, 1, SuspectDevices(tmp_path))
        replicas.check(1, tree, now=True)
        wrong = 2 if named == {0, 2} else 6
        with pytest.raises(Corrupted):
            replicas.check(2, {"x": flipped(tree["x"], wrong)}, now=True)
        found = events(tmp_path)[-1]
        assert {device["id"] for device in found["devices"]} == named, spec
        assert found["outvoted"] == (len(named) == 1)


def test_read_late_and_at_the_same_step(mesh, tmp_path):
    tree = {"x": placed(mesh, ())}
    replicas = Replicas(tree, 2, SuspectDevices(tmp_path))
    replicas.check(1, {"x": flipped(tree["x"], 3)})  # not a step that is looked at
    replicas.check(2, {"x": flipped(tree["x"], 3)})
    for step in range(3, 2 + LAG):
        replicas.check(step, tree)
    with pytest.raises(Corrupted, match=r"after step 2; under suspicion: device 3 \(process 0 on "):
        replicas.check(2 + LAG, tree)


def test_several_wrong_copies(mesh, tmp_path):
    """Two of four copies of one piece are wrong in different ways, so none has a majority; of another piece one is."""
    tree = {"x": placed(mesh, (None, "tensor")), "y": placed(mesh, ())}
    wrong = tree["x"]
    for device, bits in ((0, 1), (2, 2), (5, 1)):
        wrong = flipped(wrong, device, bits)
    with pytest.raises(Corrupted, match="x differ"):
        Replicas(tree, 1, SuspectDevices(tmp_path)).check(1, tree | {"x": wrong}, now=True)
    [event] = events(tmp_path)
    assert [device["id"] for device in event["devices"]] == [0, 2, 4, 5, 6] and not event["outvoted"]


@pytest.mark.parametrize("every, size", [(0, 8), (1, 1)])
def test_nothing_to_compare(tmp_path, every, size):
    tree = {"x": placed(make_mesh(data=size, devices=jax.devices()[:size]), ())}
    replicas = Replicas(tree, every, SuspectDevices(tmp_path))
    assert replicas._hashes is None
    replicas.check(1, tree, now=True)


def test_named_twice(mesh, tmp_path):
    """The first time the run begins again from its last good checkpoint; then a person must look."""
    here = tuple(jax.devices())
    assert SuspectDevices(tmp_path).accuse(here[3:5], "it").code == 76
    assert SuspectDevices(tmp_path).accuse(here[5:6], "it").code == 76  # another one
    again = SuspectDevices(tmp_path).accuse(here[2:4], "it")
    assert again.code == 77 and "device 3 on" in str(again) and "was under suspicion before" in str(again)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    words = ["model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32",
             "data.global_batch_size=8", "train.steps=8", "train.eval_every=0", "train.eval_batches=1",
             "checkpoint.every=3", "resilience.check_every=2"]
    return tiny_flags(tmp_path_factory, words)


def with_fault(monkeypatch, at, device):
    """Device `device` has a wrong bit in memory behind step `at`."""
    def run(self, step, compiled, state, batch):
        state, metrics = healthy(self, step, compiled, state, batch)
        return (flipped_somewhere(state, device) if step == at else state), metrics

    healthy = Replays.run
    monkeypatch.setattr(Replays, "run", run)


@pytest.mark.exhaustive
@devices(4)
def test_a_run_with_a_wrong_device(flags, tmp_path, capfd):
    workdir = tmp_path / "work"
    def life(at):
        with pytest.MonkeyPatch.context() as patch:
            with_fault(patch, at, device=3)
            return main([*flags, f"--workdir={workdir}"])

    assert life(at=5) == 76
    said = capfd.readouterr().err
    assert "silent corruption: " in said and "under suspicion: device 3 (process 0 on" in said
    assert "Traceback" not in said and "start again from the last good checkpoint" in said
    assert CheckpointManager(workdir / "checkpoints").latest() == 3  # step 6 was not saved
    assert life(at=8) == 77  # the very last step; and the device was named before
    assert "was under suspicion before: take it out of service" in capfd.readouterr().err
    assert CheckpointManager(workdir / "checkpoints").latest() == 6
    assert main([*flags, f"--workdir={workdir}"]) == 0
    assert [event["status"] for event in events(workdir) if event["kind"] == "corruption"] == [76, 77]


FAULTY = """
import sys
import jax
from jaxtrain.main import main
from jaxtrain.resilience.corruption.replays import Replays
from tests.faults import flipped_somewhere

def run(self, step, compiled, state, batch, healthy=Replays.run):
    state, metrics = healthy(self, step, compiled, state, batch)
    return (flipped_somewhere(state, jax.devices()[3].id) if step == 2 else state), metrics

Replays.run = run
status = main()
print([device.id for device in jax.devices()])
sys.exit(status)
"""


@pytest.mark.parametrize("mesh, named", [
    pytest.param(["data=4"], [3], marks=pytest.mark.exhaustive, id="data"),
    pytest.param(["data=2", "tensor=2"], [1, 3], marks=pytest.mark.slow, id="product")])
def test_two_processes_stop_together(flags, tmp_path, forked, mesh, named):
    """Device 3 is the second one of process 1; both processes know, at the same step."""
    coordinator = free_address()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu",
                   "XLA_FLAGS": virtual_devices(2)}
    command = ["-c", FAULTY, *flags, *(f"--config.mesh.{axis}" for axis in mesh),
               "--config.checkpoint.every=0", "--config.resilience.replay_every=1",
               f"--coordinator={coordinator}", "--num_processes=2"]
    started = [forked.start([*command, f"--process_id={i}", f"--workdir={tmp_path}/work"], ROOT, environment)
               for i in range(2)]
    try:
        told, outputs = zip(*(process.communicate(timeout=300) for process in started), strict=True)
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [76, 76], outputs
    ids = [json.loads(told[0].splitlines()[-1])[i] for i in named]  # on CPU those of process 1 do not begin with 2
    first = f"device {ids[0]} (process {named[0] // 2} on {socket.gethostname()})"
    assert all(f"after step 2; under suspicion: {first}" in output for output in outputs)
    [event] = [event for event in events(tmp_path / "work") if event["kind"] == "corruption"]
    assert [device["id"] for device in event["devices"]] == ids and event["process"] == 0
    assert [device["process"] for device in event["devices"]] == [device // 2 for device in named]


@pytest.mark.parametrize("devices", [None, [1], [{}], [{"host": [], "id": 1}]])
def test_an_event_of_another_form_accuses_nobody(tmp_path, devices):
    record(tmp_path, "corruption", devices=devices)
    assert SuspectDevices(tmp_path)._before == set()
