"""Islands against plain DiLoCo, the same bits on all of them, and what becomes of an island that is late or new."""

import functools

import jax
import numpy as np
import pytest

from tests.islands import plain_diloco
from tests.islands.archipelago import Archipelago, assert_same_bits, numbers, outer_state
from tests.islands.memory_meeting import MemoryMeeting
from tests.numerics import reference

KEYS = dict(islands__count=3, islands__every=4, optimizer__eps=1e-3, data__global_batch_size=8)
ONE, FSDP, TENSOR = (1, 1, 1), (1, 2, 1), (1, 1, 2)


@functools.cache
def island(mesh=ONE, **keys):
    run = reference.build("gpt2", mesh, **(KEYS | keys))
    return run, reference.compiled(run)


def batch(step, number):
    return reference.batch(100 * number + step, 8)


def archipelago(meshes=(ONE, ONE, ONE), mode="sync", keys=None, **section):
    runs, steps = zip(*(island(mesh, **(keys or {})) for mesh in meshes), strict=True)
    section = dict(count=len(meshes)) | section
    meeting = MemoryMeeting(len(meshes), mode)
    return Archipelago(runs, steps, [reference.start(run) for run in runs], meeting, batch, mode=mode, **section)


def check(found, masks=(1,), steps=16, **section):
    """The islands' parameters and losses are those of plain DiLoCo, and their outer states equal to the bit."""
    found.train(steps)
    c = found.config
    params, outer, losses = plain_diloco.train(
        plain_diloco.inner(found.runs[0].config), reference.initial(), batch, steps=steps, islands=c.count,
        every=c.every, rate=c.learning_rate, momentum=c.momentum, masks=masks, overlap=c.overlap, blend=c.blend)
    np.testing.assert_allclose(found.losses, losses, rtol=2e-5)
    for state, want in zip(found.states, params, strict=True):
        error, leaf = reference.worst(numbers(state.params), want, floor=0.1)
        assert error < 2e-5, f"{leaf} is off by {error:.1e}"
    error, leaf = reference.worst(outer_state(found.states[0])["params"], outer, floor=0.1)
    assert error < 2e-5, f"the outer {leaf} is off by {error:.1e}"
    for state in found.states[1:]:
        assert_same_bits(outer_state(state), outer_state(found.states[0]))


@pytest.mark.slow
def test_diloco_is_the_paper_s():
    check(archipelago())


@pytest.mark.slow
def test_islands_with_meshes_of_their_own():
    check(archipelago((ONE, FSDP, TENSOR)))


def masks():
    """Two fragments of two layers: of the rest, the largest array is in the first, and all others in the second."""
    def mask(fragment):
        def one(path, leaf):
            keys = [key.key for key in path]
            if keys[0] == "blocks":
                return (np.arange(len(leaf)) == fragment).astype(np.float32).reshape(-1, *[1] * (leaf.ndim - 1))
            return np.float32((keys == ["embed", "table"]) == (fragment == 0))
        return jax.tree_util.tree_map_with_path(one, reference.initial())
    return mask(0), mask(1)


@pytest.mark.slow
def test_streaming_is_the_paper_s():
    check(archipelago(fragments=2, overlap=1), masks(), steps=15)


@pytest.mark.slow
def test_streaming_on_meshes_of_their_own():
    check(archipelago((FSDP, TENSOR), fragments=2, overlap=1), masks(), steps=15)
