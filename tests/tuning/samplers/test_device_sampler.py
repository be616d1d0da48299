"""Devices of the process that answer while the others train: whose weights, which tokens, kills, and refusals."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.hub.generate import generate
from jaxtrain.trainer.observers import Observer
from tests.tiers import exhaustive
from tests.tiny import devices
from tests.tuning.test_rollouts import config, files  # noqa: F401

pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once
BEGINS = dict(model__num_layers=1, rl__staleness=1, optimizer__learning_rate=1e-2)


@pytest.fixture
def on_four():
    with devices(4):
        yield


def told(workdir):
    """Return the answers of each step that are on record."""
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()]
            for path in (workdir / "rollouts").glob("*.jsonl")}


def same(some, others):
    return jax.tree.all(jax.tree.map(np.array_equal, *map(jax.device_get, (some, others))))


@pytest.mark.parametrize(("count", "sampling", "keys"), [
    (4, 2, dict(mesh__data=1, mesh__tensor=2, train__trainable=("blocks/*",))),
    *exhaustive((8, 4, dict(lora__rank=2)), (8, 2, dict(mesh__data=3, mesh__fsdp=2, mesh__tensor=1)))],
    ids=["2+2", "4+4", "6+2"])
def test_answers_are_those_of_the_mesh_that_trains(files, tmp_path, count, sampling, keys):  # noqa: F811
    with devices(count):
        run = jt.build(config(files, **BEGINS | dict(data__global_batch_size=12) | keys, rl__sampler_devices=sampling))
        begun, sampler = run.init(), run.data.sampler
        states = begun, replace(begun, params=jax.tree.map(lambda x: x + 0.03, begun.params))
        prompts, seeds, recorded = [run.data.prompts[n] for n in (0, 0, 1, 2)], [5, 6, 7, 8], []
        copied, sent = [], []
        for step, state in enumerate(states):
            copied.append(sampler.written(step, state))
            sent.append(sampler.pop_fields()["sync_bytes"])
        assert copied[0].version != copied[1].version and sampler.written(1, begun) is copied[1]
        assert sent[1] == sum(leaf.nbytes for leaf in jax.tree.leaves(begun.params))
        assert sent[0] - sent[1] == sum(leaf.nbytes for leaf in jax.tree.leaves(begun.frozen))
        found = [sampler.ask(4, lambda answering: answering(prompts, seeds), weights, recorded.append)
                 for weights in copied]
        sampler.before_save()
        assert len(recorded) == 2 and sampler.kept(0) is None and sampler.kept(1) is copied[1]
        for answers, state in zip(found, states, strict=True):
            wanted = generate(run, state, prompts, max_new_tokens=6, tempered=True, logprobs=True,
                              drawn=[(seed, 0) for seed in seeds], tokenizer=run.data.tokenizer)
            assert [one.tokens for one in answers] == [one.tokens for one in wanted]
            if "mesh__fsdp" not in keys:  # where sums are in another order
                assert list(answers) == wanted
            for one, other in zip(answers, wanted, strict=True):
                np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert list(found[0]) != list(found[1])
        run.data.forget()
        assert sampler.kept(1) is None


@pytest.mark.slow
def test_the_weights_of_a_step_answer_while_others_train(files, tmp_path, on_four):  # noqa: F811
    wanted = config(files, **BEGINS, mesh__data=1, train__trainable=("blocks/*",), rl__sampler_devices=2)
    jt.train(wanted, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["staleness"] for line in lines] == [0, 1, 1, 1, 1, 1]
    assert lines[0]["sampler_mismatch"] < 1e-5 < lines[-1]["sampler_mismatch"]
    sent = [line["sync_bytes"] for line in lines]
    assert sent[0] > sent[1] == sent[-1]
    for step, answers in told(tmp_path).items():
        assert {one["policy_step"] for one in answers} == {max(0, int(step) - 2)}
        assert {one["weights"].partition("-")[2].partition("-")[0] for one in answers} == {f"{max(0, int(step) - 2)}"}


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
