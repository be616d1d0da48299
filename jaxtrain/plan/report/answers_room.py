"""Say what makes room for the answers of a run that learns from them, where they do not fit."""

from jaxtrain.plan.cost.memory_parts import CACHE, LOGITS
from jaxtrain.plan.estimate import Estimate, change, estimate
from jaxtrain.plan.targets import gigabytes

GATHER = "rl.gather_weights"


def answers_at_once(e: Estimate) -> str:
    """Return how many answers a step could have, as the key and its value; "" if they fit, or a few would not either.

    What grows with the answers is halved until it fits, since the rows of a device are a power of two.
    """
    phase, parts = e.worst
    group, whole = e.config.rl.group_size, e.devices // e.mesh["tensor"]
    rest = parts.total() - (grows := parts[CACHE] + parts[LOGITS])
    rows = 1 << max(0, -(-e.config.data.global_batch_size // whole) - 1).bit_length()
    while phase and rows > 1 and e.bytes > e.target.room:
        rows, grows = rows // 2, grows / 2
        if rest + grows <= e.target.room and whole * rows % group == 0:
            return f"data.global_batch_size={whole * rows}"
    return ""


def room_for_answers(e: Estimate) -> str:
    """Return what to change where answers do not fit but the step does."""
    if e.config.rl.gather_weights:
        other = estimate(change(e.config, {GATHER: False}), e.target, e.devices)
        if other.fits:
            return f"use {GATHER}=False, with which it takes {gigabytes(other.bytes)} GB"
    if fewer := answers_at_once(e):
        return f"use {fewer}, for fewer answers at once"
    return "use more devices, a smaller model or a smaller rl.max_new_tokens"
