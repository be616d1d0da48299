"""A step that gives other bits the second time is found; one that does not is only slower."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.builder import build
from jaxtrain.config.load import load_config
from jaxtrain.observe.events import events
from jaxtrain.resilience.corruption.replays import Replays
from jaxtrain.resilience.corruption.suspects import Corrupted, SuspectDevices
from jaxtrain.run import compiled_step
from tests.faults import flipped_somewhere
from tests.tiers import exhaustive, slow

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", params=[*slow(4), *exhaustive(1)])
def run(request, tmp_path_factory):
    """A run on a mesh with a product of axes, and before a release one on a single device."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("".join(f"line {n} of a text that is long enough\n" for n in range(500)))
    return build(load_config(ROOT / "configs/gpt.py:tiny", {
        "model.num_layers": 1, "model.embed_dim": 32, "data.seq_len": 32, "data.source": str(text),
        "mesh.data": -1, "mesh.tensor": 2 if request.param > 1 else 1}), devices=jax.devices()[:request.param])


class Faulty:
    """A compiled step whose second run of a step is wrong on one device: every other call, where all are repeated."""

    def __init__(self, compiled, device):
        self.compiled, self.device, self.calls = compiled, device, 0

    def __call__(self, state, batch):
        state, metrics = self.compiled(state, batch)
        self.calls += 1
        return (flipped_somewhere(state, self.device) if self.calls % 2 == 0 else state), metrics


def test_the_same_bits_twice(run, tmp_path):
    replays, state, plain = Replays(2, SuspectDevices(tmp_path)), run.init(), run.init()
    for step in range(1, 6):
        batch = run.batch(step - 1)
        state, _ = replays.run(step, compiled_step(run), state, batch)
        plain, _ = compiled_step(run)(plain, batch)
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert events(tmp_path) == []


def test_a_step_is_run_twice_when_it_is_due(tmp_path):
    """There are eight devices: one that computes the same is accepted, and one that does not is refused."""
    mesh = jax.make_mesh((8,), ("data",))
    state = {"w": jax.device_put(np.arange(16, dtype=np.float32), NamedSharding(mesh, PartitionSpec("data")))}
    step = jax.jit(lambda state, batch: ({"w": state["w"] + batch}, {"loss": batch}), donate_argnums=0)
    replays, device = Replays(2, SuspectDevices(tmp_path)), mesh.devices.flat[5].id
    for n in (1, 2):
        state, _ = replays.run(n, step, state, np.float32(1))
    np.testing.assert_array_equal(state["w"], np.arange(16) + 2)
    state, _ = replays.run(3, Faulty(step, device), state, np.float32(1))
    with pytest.raises(Corrupted, match=r"step 4 run twice gave different bits, first in state/w \(1 arrays\)"):
        replays.run(4, Faulty(step, device), state, np.float32(1))
    [event] = events(tmp_path)
    assert [named["id"] for named in event["devices"]] == [device] and event["found_by"] == "replay"


def test_other_bits(run, tmp_path):
    device = int(run.mesh.devices.flat[-1].id)
    replays, state = Replays(1, SuspectDevices(tmp_path)), run.init()
    with pytest.raises(Corrupted, match=r"step 1 run twice gave different bits, first in state/.* \(1 arrays\)"):
        replays.run(1, Faulty(compiled_step(run), device), state, run.batch(0))
    [event] = events(tmp_path)
    assert [named["id"] for named in event["devices"]] == [device] and event["found_by"] == "replay"
