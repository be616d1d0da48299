"""Islands of a tiny model, one after the other in one process, that come, wait and go as a test tells them."""

import functools

import chex
import jax
import numpy as np

from jaxtrain.run import compiled_step
from tests.diloco.archipelago import Archipelago, numbers, outer_state
from tests.diloco.memory_meeting import MemoryMeeting
from tests.diloco.test_island_runs import built, islands, rows_of


@functools.cache
def tiny():
    run = built(**islands(3))
    return run, compiled_step(run, run.batch(0))


def few(count=3, mode="sync", max_age=None, dropped=16, into=None, **section):
    """Islands of a tiny model."""
    if section.get("compression") == "power_sgd":
        section = dict(rank=1) | section  # with a higher one, no matrix would become smaller
    runs, steps = zip(*[tiny() if not section.get("compression") else lossy(section["compression"])] * count,
                      strict=True)
    return Archipelago(runs, steps, [run.init() for run in runs], into or MemoryMeeting(count, mode, max_age), rows_of,
                       mode=mode, count=count, max_age=dropped, **section)


@functools.cache
def lossy(compression):
    run = built(**islands(3, compression=compression))
    return run, compiled_step(run, run.batch(0))


def agree(found):
    """All islands that are at the end of the log have the same outer state."""
    for state in found.states[1:]:
        chex.assert_trees_all_equal(shared(state), shared(found.states[0]))


def shared(state):
    return {name: tree for name, tree in outer_state(state).items() if name not in ("unsent", "open")}


def vector(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(numbers(tree))])
