"""Estimate the time of a collective along mesh axes, from the links between the devices that it joins.

Devices are numbered with the last axis of the mesh varying fastest, so that neighbours along it share the nearest link.
"""

import math
from collections.abc import Mapping

from jaxtrain.plan.targets import Link, Target
from jaxtrain.plan.trace.program import Axes, Collective

EXCHANGES = ("all-to-all", "ragged-all-to-all")


def seconds(collective: Collective, target: Target, sizes: Mapping[str, int]) -> float:
    """Return the seconds of one collective at the bandwidth of its slowest link.

    It assumes rings, which NCCL and TPUs use for large arrays, TPUs along all dimensions of a torus that the group
    fills at once (jax-ml.github.io/scaling-book/sharding). In an exchange each pair of devices has parts of its own
    instead: what goes beyond a neighbourhood crosses its border once for each receiver, through the sender's own link.
    """
    n = math.prod(sizes[axis] for axis in collective.axes)
    if n <= 1:
        return 0.0
    link, bandwidth = _link(collective.axes, target, sizes)
    whole = collective.sent * (n if collective.kind == "reduce-scatter" else 1)  # before a scatter, or after a gather
    others = whole * (n - 1) / n
    moved = {"all-reduce": 2 * others, "collective-permute": whole}.get(collective.kind, others)
    if collective.kind in EXCHANGES:
        moved, bandwidth = whole * (n - _nearer(collective.axes, link, target, sizes)) / n, link.bandwidth
    steps = {"all-reduce": 2 * (n - 1), "collective-permute": 1}.get(collective.kind, n - 1)
    # Beyond some devices latency grows with the logarithm: small arrays use trees instead of rings.
    return moved / (bandwidth * target.efficiency["links"]) + link.latency * min(steps, 4 * math.log2(n) + 2)


def crossed(axes: Axes, target: Target, sizes: Mapping[str, int]) -> Link:
    """Return the slowest link that a collective along these axes uses."""
    return _link(axes, target, sizes)[0]


def _link(axes: Axes, target: Target, sizes: Mapping[str, int]) -> tuple[Link, float]:
    """Return the slowest link for these axes, and the bytes per second that each device gets through it."""
    span, inner, nearer = _span(axes, sizes), 1, math.inf
    for link in target.links:
        if span <= link.devices or link is target.links[-1]:
            # Several members of one neighbourhood share the work of crossing its border.
            within = link.bandwidth * _dimensions(link, axes, sizes)
            return link, min(within * _members(axes, sizes, inner), nearer)
        inner, nearer = link.devices, min(nearer, link.bandwidth)
    raise AssertionError


def _dimensions(link: Link, axes: Axes, sizes: Mapping[str, int]) -> int:
    """Return how many dimensions of a torus a group fills; 1 where it is none, or where their ends are not joined."""
    slice_ = min(math.prod(sizes.values()), link.devices)
    if link.dimensions == 1 or slice_ < link.closed:
        return 1
    members = math.prod(sizes[axis] for axis in axes)
    return max(1, min(link.dimensions, math.floor(link.dimensions * math.log(members, slice_) + 1e-6)))


def _nearer(axes: Axes, slowest: Link, target: Target, sizes: Mapping[str, int]) -> int:
    """Return how many members of a group a device reaches without its slowest link, itself among them."""
    at = target.links.index(slowest)
    return _members(axes, sizes, target.links[at - 1].devices) if at else 1


def _span(axes: Axes, sizes: Mapping[str, int]) -> int:
    """Return how many consecutive devices a group spans."""
    span, stride = 1, 1
    for axis in reversed(list(sizes)):
        if axis in axes:
            span = stride * sizes[axis]
        stride *= sizes[axis]
    return span


def _members(axes: Axes, sizes: Mapping[str, int], devices: int) -> int:
    """Return how many members of a group are among the first `devices` consecutive devices."""
    members, stride = 1, 1
    for axis in reversed(list(sizes)):
        if axis in axes:
            members *= max(1, min(sizes[axis], devices // stride)) if stride < devices else 1
        stride *= sizes[axis]
    return members
