"""How long a step takes when islands are joined by a slow link: by synchronous training, and by each mode of islands.

A closed form. An island's link carries its bytes a second in each direction at once; every exchange also waits for a
few ways there and back. Synchronous training sums float32 gradients in a ring in every step, beside at most the
backward pass, two thirds of the step. With a straggler, whatever waits for all islands goes at its pace; asynchronous
islands make on average as many steps as each can.
"""

from dataclasses import dataclass, replace

from jaxtrain.config.sections.island_keys import IslandsConfig

BYTES = {"none": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / 256, "int4": 0.5 + 4 / 64, "top_k": 0.01 * 6}  # of a parameter
BACKWARD = 2 / 3  # of a step: what the sum of gradients can hide behind
TRIPS = 3  # offer, entry, contents: ways there and back that an exchange waits for


@dataclass(frozen=True)
class Mode:
    """A way to join the islands, and what a step of it takes."""

    name: str
    seconds: float  # of a step, on average
    sent: float  # bytes an island sends in a step, on average
    received: float


def modes(islands: IslandsConfig, step: float, parameters: int, link: float, *, latency: float = 0.05,
          slowest: float = 1.0) -> list[Mode]:
    """Return what a step takes in each mode, the fastest first.

    Args:
        islands: the config's section: how many there are, how often they talk, and how what they send is compressed.
        step: seconds of an island's step by itself.
        parameters: that are trained.
        link: bytes a second, each way, of an island to the others.
        latency: seconds of a way there and back.
        slowest: how many times as long the slowest island takes for a step.
    """
    others, apart = islands.count - 1, replace(islands, mode="sync", overlap=0, blend=IslandsConfig.blend, fragments=1,
                                               age_decay=IslandsConfig.age_decay, pull=IslandsConfig.pull)
    ring = 2 * others / islands.count * 4 * parameters
    talk = ring / link + 2 * others * latency / 2
    found = [Mode("synchronous", step * slowest + max(0.0, talk - BACKWARD * step), ring, ring),
             _exchanging("DiLoCo", apart, step * slowest, parameters, link, latency)]
    if others:
        pairs = replace(apart, mode="gossip", overlap=islands.overlap)
        found.append(_exchanging("gossip", pairs, step * slowest, parameters, link, latency))
    if islands.overlap or islands.fragments > 1:
        parts = replace(apart, overlap=islands.overlap, fragments=islands.fragments)
        found.append(_exchanging("streaming", parts, step * slowest, parameters, link, latency))
    pace = islands.count / (others + 1 / slowest)  # harmonic mean of the islands' steps
    found.append(_exchanging("asynchronous", apart, step * pace, parameters, link, latency))
    return sorted(found, key=lambda mode: mode.seconds)


def _exchanging(name: str, islands: IslandsConfig, step: float, parameters: int, link: float, latency: float) -> Mode:
    size = BYTES[islands.compression] * parameters
    received = size * (islands.count - 1)
    if islands.mode == "gossip":  # one partner's, and the outer parameters in float32 with it
        received = size = size + 4 * parameters
    exchange = (size + received) / islands.fragments / link + TRIPS * latency  # its own go first, then the others' come
    exposed = max(0.0, exchange - islands.overlap * step)
    return Mode(name, step + exposed / islands.interval, size / islands.every, received / islands.every)


def table(found: list[Mode], link: float) -> str:
    """Return the modes as text, the fastest first."""
    lines = [f"by a link of {link * 8 / 1e9:g} Gbit/s between islands, a step takes:"]
    for mode in found:
        lines.append(f"  {mode.name:<14}{mode.seconds:10.4g} s, {mode.sent / 1e6:10.4g} MB sent and "
                     f"{mode.received / 1e6:.4g} MB received")
    return "\n".join(lines)
