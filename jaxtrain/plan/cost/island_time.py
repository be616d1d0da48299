"""The time of a step when islands are joined by a slow link: by synchronous training, and by each mode of islands.

A closed form. An island's link carries its bytes a second in each direction at once; every exchange also waits for a
few ways there and back. Steps that overlap hide an island's own offer and what comes after it. Where islands meet at a
coordinator's port, its link carries what all of them send and receive: of a round at once, of asynchronous islands
whenever one comes. Synchronous training sums float32 gradients in a ring in every step, beside at most the backward
pass, two thirds of the step. With a straggler, whatever waits for all islands goes at its pace; asynchronous islands
make on average as many steps as each can.
"""

import math
from dataclasses import dataclass, replace

import jax

from jaxtrain.base.annotations import PyTree
from jaxtrain.config.sections.diloco_keys import DilocoConfig
from jaxtrain.parallel.compression import codecs
from jaxtrain.sharding.axis_rules import Axes

BYTES = {"none": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / 256, "int4": 0.5 + 4 / 64, "top_k": 0.01 * 6,
         "random_k": 0.01 * 4}  # of a parameter
BACKWARD = 2 / 3  # of a step: what the sum of gradients can hide behind
TRIPS = 3  # offer, entry, contents: ways there and back that an exchange waits for


@dataclass(frozen=True)
class Mode:
    """A way to join the islands, and what a step of it takes."""

    name: str
    seconds: float  # of a step, on average
    sent: float  # bytes an island sends in a step, on average
    received: float


def progress_bytes(diloco: DilocoConfig, params: PyTree, axes: Axes) -> float:
    """Return the bytes of an island's progress as it is compressed, without headers.

    Args:
        params: the shapes of the trained parameters.
        axes: their logical names.
    """
    leaves, structure = jax.tree.flatten(params)
    if diloco.compression != codecs.PowerSGD.name:
        return BYTES[diloco.compression] * sum(leaf.size for leaf in leaves)
    names = [None] * len(leaves) if axes is None else structure.flatten_up_to(axes)
    return sum(codecs.for_parameter(diloco.compression, {"rank": diloco.rank}, name, leaf.shape).size(leaf.shape)
               for name, leaf in zip(names, leaves, strict=True))


def modes(diloco: DilocoConfig, step: float, parameters: int, link: float, *, progress: float | None = None,
          port: float = math.inf, latency: float = 0.05, slowest: float = 1.0) -> list[Mode]:
    """Return what a step takes in each mode, the fastest first.

    Args:
        diloco: the config's section: how many there are, how often they talk, and how what they send is compressed.
        step: seconds of an island's step by itself.
        parameters: that are trained.
        link: bytes a second, each way, of an island to the others.
        progress: the bytes of an island's progress as it is compressed, for `power_sgd`, whose depend on shapes.
        port: bytes a second, each way, of the coordinator to all islands; infinity where they meet at a store.
        latency: seconds of a way there and back.
        slowest: how many times as long the slowest island takes for a step.
    """
    others, apart = diloco.count - 1, replace(diloco, mode="sync", overlap=0, blend=DilocoConfig.blend, fragments=1,
                                               age_decay=DilocoConfig.age_decay, pull=DilocoConfig.pull)
    ring = 2 * others / diloco.count * 4 * parameters
    talk = ring / link + 2 * others * latency / 2
    found = [Mode("synchronous", step * slowest + max(0.0, talk - BACKWARD * step), ring, ring)]

    size = BYTES[diloco.compression] * parameters if progress is None else progress

    def add(name: str, section: DilocoConfig, pace: float) -> None:
        found.append(_exchanging(name, section, step * pace, size, 4 * parameters, link, port, latency))

    add("DiLoCo", apart, slowest)
    if others:
        add("gossip", replace(apart, mode="gossip", overlap=diloco.overlap), slowest)
    if diloco.overlap or diloco.fragments > 1:
        add("streaming", replace(apart, overlap=diloco.overlap, fragments=diloco.fragments), slowest)
    pace = diloco.count / (others + 1 / slowest)  # harmonic mean of the islands' steps
    add("asynchronous", replace(apart, mode="async"), pace)
    return sorted(found, key=lambda mode: mode.seconds)


def _exchanging(name: str, diloco: DilocoConfig, step: float, size: float, whole: float, link: float, port: float,
                latency: float) -> Mode:
    received = size * (diloco.count - 1)
    if diloco.mode == "gossip":  # one partner's, and the outer parameters in float32 with it
        received = size = size + whole
    crowd = 1 if diloco.mode == "async" else diloco.count  # so many at the port at once
    byte_s = max(1 / link, crowd / port)
    offered, answered = (part / diloco.fragments * byte_s for part in (size, received))
    exposed = max(0.0, offered + answered + TRIPS * latency - diloco.overlap * step)
    seconds = max(step + exposed / diloco.interval, diloco.count * max(size, received) / port / diloco.every)
    return Mode(name, seconds, size / diloco.every, received / diloco.every)


def table(found: list[Mode], at_port: list[Mode], link: float) -> str:
    """Return the modes as text, the fastest first: at a store, and at a coordinator's port with a link of this rate."""
    port = {mode.name: mode.seconds for mode in at_port}
    lines = [f"by links of {link * 8 / 1e9:g} Gbit/s a step takes, where islands meet at a store and at the port of a "
             "coordinator with such a link:"]
    for mode in found:
        lines.append(f"  {mode.name:<14}{mode.seconds:10.4g} s and {port[mode.name]:.4g} s, {mode.sent / 1e6:10.4g} MB "
                     f"sent and {mode.received / 1e6:.4g} MB received")
    return "\n".join(lines)
