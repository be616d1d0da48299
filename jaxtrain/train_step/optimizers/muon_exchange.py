"""The exchange by which Muon has whole matrices (`newton_schulz.py`), for the planner.

A trace does not say it: the optimizer's update is the one region in which the compiler lays out arrays. The products
are in the trace, as many as a device computes.
"""

import math
from collections.abc import Iterator

import jax
from jax.sharding import AbstractMesh, AxisType

from jaxtrain.config.schema import OptimizerConfig
from jaxtrain.sharding.axis_rules import axes_of
from jaxtrain.train_step.optimizers import newton_schulz
from jaxtrain.train_step.optimizers.matrices import Dimensions
from jaxtrain.train_step.optimizers.muon import muon_dimensions
from jaxtrain.train_step.state import Layout, TrainState

Exchange = tuple[str, tuple[str, ...], int]  # the kind of collective, its mesh axes, the bytes it leaves on a device


def exchanged(c: OptimizerConfig, abstract: TrainState, layout: Layout, platform: str) -> list[Exchange]:
    """Return what an update exchanges: stacks of matrices go to whole ones before the iterations, and back.

    abstract: of the state, whose arrays know where they lie.
    """
    narrow = c.orthogonal_dtype == "bfloat16" or (c.orthogonal_dtype == "auto" and platform != "cpu")
    mesh = layout.mesh
    auto = AbstractMesh(tuple(mesh.shape.values()), tuple(mesh.shape), axis_types=(AxisType.Auto,) * len(mesh.shape))
    stacks = list(_stacks(c, abstract, layout))
    with jax.sharding.use_abstract_mesh(auto):
        return [one for shape, axes, times in _together(stacks)
                for one in _of_stack(shape, axes, dict(mesh.shape), 2 if narrow else 4) * times]


Stack = tuple[tuple[int, int, int], frozenset[str], int]  # matrices x rows x columns, what splits them, how often


def _stacks(c: OptimizerConfig, abstract: TrainState, layout: Layout) -> Iterator[Stack]:
    """Yield the stacks that are made orthogonal at a time: those of all layers, or of each by itself."""
    states, _ = jax.tree_util.tree_flatten_with_path(abstract.opt_state)
    params, treedef = jax.tree_util.tree_flatten_with_path(abstract.params)
    for (path, leaf), names in zip(params, treedef.flatten_up_to(layout.axes), strict=True):
        own = muon_dimensions(names, c.split_heads) if names else None
        if own is None:
            continue
        momentum = next((state for at, state in states if at[-len(path):] == path and state.shape == leaf.shape), leaf)
        matrices, *sides = _sizes(leaf.shape, own)
        rows, columns = sorted(sides)
        layers = next((leaf.shape[i] for i in own.stacked if names[i] in ("layers", "every_layer")), 1)
        times = layers if layout.layerwise else 1
        yield (matrices // times, rows, columns), frozenset(
            axis for entry in momentum.sharding.spec for axis in axes_of(entry) if layout.mesh.shape[axis] > 1), times


def _sizes(shape: tuple[int, ...], own: Dimensions) -> list[int]:
    return [math.prod(shape[i] for i in side) for side in (own.stacked, own.rows, own.columns)]


def _together(stacks: list[Stack]) -> Iterator[Stack]:
    """Yield stacks, those that share rounds as one."""
    for group in newton_schulz.grouped([shape for shape, _, _ in stacks]):
        shapes, axes, times = zip(*(stacks[i] for i in group), strict=True)
        yield (sum(n for n, *_ in shapes), shapes[0][1], shapes[0][2]), frozenset().union(*axes), max(times)


def _of_stack(shape: tuple[int, int, int], split: frozenset[str], sizes: dict[str, int], width: int) -> list[Exchange]:
    """Return what one stack exchanges both ways; `width`: bytes of an element."""
    spread = {name for name, _ in newton_schulz.spread_over(shape[0])}
    here = newton_schulz.rounds(shape[0]) * shape[1] * shape[2] * width  # of a device, which may be padding
    both, gathered, again = (tuple(axis for axis in sizes if axis in some) for some in (
        split & spread, split - spread, spread - split))
    found = [("all-gather", gathered, here)] if gathered else []
    found += [("all-to-all", (axis,), here // math.prod(sizes[axis] for axis in gathered)) for axis in both] * 2
    if again:
        found += [("all-gather", again, math.prod(shape) * width // math.prod(sizes[axis] for axis in split))]
    return found
