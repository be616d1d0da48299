"""The outer update against plain DiLoCo and its streaming form, on any mesh, and what each arrival alone makes."""

import functools
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest

from jaxtrain.diloco.outer_exchange import Exchange
from jaxtrain.diloco.outer_optimizer import OuterOptimizer
from tests.diloco import plain_diloco, plain_power_sgd
from tests.diloco.archipelago import Archipelago, numbers, outer_state
from tests.diloco.memory_meeting import MemoryMeeting
from tests.diloco.tiny_islands import few
from tests.numerics import reference

KEYS = dict(diloco__count=3, diloco__every=4, optimizer__eps=1e-3, data__global_batch_size=8)
LOW_RANK = dict(diloco__compression="power_sgd", diloco__rank=2)
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


@functools.cache
def plain():
    """The plain step, which neither the mesh nor the way of the exchange changes."""
    return plain_diloco.inner(island(FSDP)[0].config)


def check(found, masks=(1,), steps=16, off=2e-5, **keys):
    """The islands' parameters and losses are those of plain DiLoCo, and their outer states equal to the bit."""
    found.train(steps)
    c = found.config
    params, outer, losses = plain_diloco.train(
        plain(), reference.initial(), batch, steps=steps, islands=c.count,
        every=c.every, rate=c.learning_rate, momentum=c.momentum, masks=masks, overlap=c.overlap, blend=c.blend, **keys)
    np.testing.assert_allclose(found.losses, losses, rtol=off)
    for state, want in zip(found.states, params, strict=True):
        error, leaf = reference.worst(numbers(state.params), want, floor=0.1)
        assert error < off, f"{leaf} is off by {error:.1e}"
    error, leaf = reference.worst(outer_state(found.states[0])["params"], outer, floor=0.1)
    assert error < off, f"the outer {leaf} is off by {error:.1e}"
    for state in found.states[1:]:
        chex.assert_trees_all_equal(*(outer_state(one) | {"unsent": None} for one in (state, found.states[0])))


@pytest.mark.exhaustive  # as the next one
def test_diloco_is_the_paper_s():
    check(archipelago())


@pytest.mark.exhaustive
def test_islands_with_meshes_of_their_own():
    check(archipelago((ONE, FSDP, TENSOR)))


@pytest.mark.exhaustive
def test_adapters_in_float16_with_an_average_are_those_of_plain_training_to_the_bit():
    """One island exchanges after every step: the loss scale, moments and average are not the exchange's."""
    keys = dict(lora__rank=2, train__precision="float16", train__accumulation=2, train__ema_decay=0.9,
                data__global_batch_size=8, model__num_layers=1)
    talks = dict(diloco__count=1, diloco__every=1, diloco__learning_rate=1.0, diloco__momentum=0.0)
    plain, alone = (reference.build("llama", ONE, **keys, **more) for more in ({}, talks))
    exchange = Exchange(alone.config.diloco, alone.abstract, alone.layout.axes, MemoryMeeting(1))
    (want, step), (got, island) = ((run.init(), reference.compiled(run)) for run in (plain, alone))
    got = exchange.begin(0, got)
    for n in range(4):
        rows = reference.batch(n, 8)
        want, _ = step(want, plain.sharded.place(rows))
        got, metrics = island(got, alone.sharded.place(rows))
        got = exchange.after(n + 1, got)
    assert int(metrics["skipped"]) < 4
    chex.assert_trees_all_equal(*(numbers((state.params, state.extras["ema"], state.opt_state, state.loss_scale))
                       for state in (got, want)))


@pytest.mark.exhaustive
def test_progress_of_low_rank_is_that_of_plain_power_sgd():
    """Four exchanges, of which each has what the ones before lacked, and the steps behind the last one."""
    found = archipelago((ONE, FSDP, TENSOR), keys=LOW_RANK)
    senders = [plain_power_sgd.Sender(LOW_RANK["diloco__rank"]) for _ in found.states]
    check(found, steps=17, off=5e-5,
          arrives=lambda island, moved: senders[island].sent(moved, lambda path: path[0].key == "blocks"))
    for state, sender in zip(found.states, senders, strict=True):
        error, leaf = reference.worst(outer_state(state)["unsent"], jax.tree_util.tree_map_with_path(
            lambda path, _: sender.unsent[path], outer_state(state)["params"]), floor=0.1)
        assert error < 1e-4, f"what is unsent of {leaf} is off by {error:.1e}"


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


@pytest.mark.exhaustive  # as the next one
def test_streaming_is_the_paper_s():
    check(archipelago(fragments=2, overlap=1), masks(), steps=15)


@pytest.mark.slow
def test_streaming_on_meshes_of_their_own():
    check(archipelago((FSDP, TENSOR), fragments=2, overlap=1), masks(), steps=15)


def test_an_update_of_each_island_as_it_arrives_makes_the_step_of_all_together():
    old = {name: np.float32([1, 2]) * scale for name, scale in (("params", 1), ("momentum", 0.1), ("arrived", 0))}
    came = [np.float32([0.5, -1]), np.float32([0.25, 2]), np.float32([-1, 0.125])]
    optimizer = OuterOptimizer(0.7, 0.9, 3, age_decay=0.5)
    together = optimizer.together(old, came, [1, 1, 1], exact=False)
    for number, one in enumerate(came, 1):
        old = optimizer.arrived(old, one, number, age=number - 1)
    np.testing.assert_allclose(old["params"], together["params"], rtol=1e-6)
    np.testing.assert_allclose(old["momentum"], together["momentum"], rtol=1e-6)
    # Three entries older than at equal speed is one round: it counts 1 / sqrt(2).
    late = optimizer.arrived({**old, "params": np.zeros(2, np.float32)}, came[0], 1, age=5)["params"]
    np.testing.assert_allclose(late, -0.7 / 3 / np.sqrt(2) * came[0], rtol=1e-6)


def test_what_blending_and_overlap_leave_of_the_outer_step():
    """Outer parameters turn steady progress into (1 - (1 - b) t) / (1 + b (a - 1)) times as much: docs/diloco.md."""
    for blend, times in ((0.0, 1.5 * 0.5), (0.25, 1.5 * 0.625 / 1.125)):
        found = few(1, every=2, overlap=1, blend=blend, momentum=0.5, learning_rate=0.75)
        state, exchange = found.states[0], found.exchanges[0]
        for step in range(1, 26):
            state = replace(state, params=jax.tree.map(lambda p: p + 1, state.params))
            before, state = state, exchange.after(step, state)
        moved = jax.tree.map(np.subtract, outer_state(state)["params"], outer_state(before)["params"])
        for leaf in jax.tree.leaves(moved):
            np.testing.assert_allclose(leaf, 2 * times, rtol=1e-3)
