"""Devices of the process that answer while the others train: whose weights, which tokens, kills, and refusals."""

import json
import threading

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.trainer.observers import Observer
from jaxtrain.tuning.samplers.sampler_server import SamplerServer
from jaxtrain.tuning.samplers.served_model import ServedModel
from tests.numerics import reference
from tests.tiers import exhaustive, slow
from tests.tiny import devices
from tests.tuning.samplers.test_sampler_server import TINY
from tests.tuning.test_rollouts import config, files  # noqa: F401

pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once
BEGINS = dict(model__num_layers=1, rl__staleness=1, optimizer__learning_rate=1e-2)


@pytest.fixture
def on_four():
    with devices(4):
        yield


def told(workdir):
    """What is on record of each step's answers, but for which weights they were."""
    return {path.stem: [{key: value for key, value in json.loads(line).items() if key != "weights"}
                        for line in path.read_text().splitlines()] for path in (workdir / "rollouts").glob("*.jsonl")}


def lines_of(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def same(some, others):
    return jax.tree.all(jax.tree.map(np.array_equal, *map(jax.device_get, (some, others))))


@pytest.fixture
def server(monkeypatch):
    """A sampler in place of one in another process, on one device."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with devices(1):
        run = jt.build(reference.tiny("llama", **TINY))
        served = ServedModel(run, run.init(), "tiny")
    with SamplerServer(served) as found:
        threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
        yield found
        found.shutdown()
    served.close()


@pytest.mark.parametrize(("count", "sampling", "keys"), [
    *slow((4, 2, dict(mesh__data=1, mesh__tensor=2, train__trainable=("blocks/*",)))),
    *exhaustive((8, 4, {}), (8, 2, dict(mesh__data=3, mesh__fsdp=2, mesh__tensor=1, data__global_batch_size=12)))],
    ids=["2+2", "4+4", "6+2"])
def test_tokens_are_those_of_a_sampler_in_another_process(files, server, tmp_path, count, sampling, keys):  # noqa: F811
    with devices(count):
        ours = jt.train(config(files, **BEGINS, **keys, rl__sampler_devices=sampling), tmp_path / "devices")
        lines = lines_of(tmp_path / "devices")
        assert len(lines) == 6 and [line["staleness"] for line in lines] == [0, 1, 1, 1, 1, 1]
        assert all(line["sampler_mismatch"] < 1e-5 for line in lines[:1]) and lines[-1]["sampler_mismatch"] > 1e-5
        sent = [line["sync_bytes"] for line in lines]
        assert sent[0] > sent[1] == sent[-1] if "train__trainable" in keys else sent[0] == sent[-1]
    with devices(count - sampling):
        theirs = jt.train(config(files, **BEGINS, **keys, rl__sampler=server.url), tmp_path / "server")
    assert told(tmp_path / "devices").keys() == told(tmp_path / "server").keys()
    for step, answers in told(tmp_path / "devices").items():
        for one, other in zip(answers, told(tmp_path / "server")[step], strict=True):
            assert one["tokens"] == other["tokens"] and one["policy_step"] == other["policy_step"]
            np.testing.assert_allclose(one["logprobs"], other["logprobs"], atol=1e-4)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-3), *map(jax.device_get, (
        ours.params, theirs.params)))


class Kill(Observer):
    """Ends a run after so many steps, as a kill does: nothing of it is saved."""

    def __init__(self, step):
        self.step = step

    def on_dispatch(self, step, metrics):
        if step == self.step:
            raise RuntimeError("killed")


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_with_the_same_answers(files, tmp_path, on_four):  # noqa: F811
    wanted = config(files, **BEGINS | dict(rl__staleness=2, mesh__data=1, rl__sampler_devices=2, train__steps=8))
    calm = jt.train(wanted, tmp_path / "calm")
    for step in (2, 5, 7):  # before the first save, and after two of them
        with pytest.raises(RuntimeError, match="killed"):
            jt.train(wanted, tmp_path / "storm", observers=[Kill(step)])
    storm = jt.train(wanted, tmp_path / "storm")
    assert same(calm.params, storm.params)
    assert told(tmp_path / "calm") == told(tmp_path / "storm")


def test_devices_that_are_not_there(files, on_four):  # noqa: F811
    with pytest.raises(jt.UserError, match=r"sampler_devices: of 4 devices, 4 leave none that trains; give at most 3"):
        jt.build(config(files, rl__sampler_devices=4))
    run = jt.build(config(files, mesh__data=-1, mesh__tensor=1, rl__sampler_devices=2))
    assert [device.id for device in run.mesh.devices.flat] == [0, 1]
    assert [device.id for device in run.data.sampler.run.mesh.devices.flat] == [2, 3]


@pytest.mark.parametrize(("keys", "message"), [
    (dict(rl__sampler="http://h/v1"), "rl.sampler_devices: with rl.sampler a server answers; leave one of them out"),
    (dict(resilience__elastic=True), "rl.sampler_devices: with resilience.elastic the mesh takes all devices"),
    (dict(rl__exact=True), "rl.exact: True is for answers that are made on the run's own mesh; leave it out, or leave "
     "out rl.sampler_devices")])
def test_keys_that_do_not_go_together(files, keys, message):  # noqa: F811
    with pytest.raises(jt.UserError) as refusal:
        config(files, rl__sampler_devices=1, **keys)
    assert str(refusal.value).startswith(message)
