"""The number of steps in so many epochs of a batch source, for `train.epochs`."""

from typing import Any

from jaxtrain.errors import UserError

_KEY, _FIX = "train.epochs", "give train.steps"
_ROUNDING = 1e-9  # of an epoch: a step that ends there by exact arithmetic must not need another one


def passes(batches: Any, step: int) -> float:
    """Return the number of passes over all the data before this step."""
    if hasattr(batches, "passes"):  # several sources
        return batches.passes(step)
    if not (found := batches.epochs(step)):
        if batches.num_batches:
            return step / batches.num_batches
        raise UserError(_KEY, "the batches given by data= have no known length", f"{_FIX}, or give data= num_batches")
    if len(found) > 1:
        raise UserError(_KEY, f"the batches given by data= count epochs over {', '.join(found)}, each on its own", _FIX)
    return next(iter(found.values()))


def steps_in(batches: Any, epochs: float) -> int:
    """Return the number of steps after which so many passes over all the data are complete."""
    end, wanted = batches.num_batches, epochs - _ROUNDING

    def complete(step: int) -> bool:
        return passes(batches, step) >= wanted

    high = 1
    while not complete(high if end is None else min(high, end)):
        if end is not None and high >= end:
            raise UserError(_KEY, f"the data end at step {end}, after {passes(batches, end):.3g} epochs", "give fewer"
                            + ", or raise the epochs of the sources in data.mixture" * hasattr(batches, "passes"))
        if high > 2**40:
            raise UserError(_KEY, f"{epochs:g} epochs take more than {high:,} steps", "give fewer")
        high *= 2
    low, high = high // 2, high if end is None else min(high, end)
    while high - low > 1:  # not complete after `low` steps, complete after `high`
        middle = (low + high) // 2
        low, high = (low, middle) if complete(middle) else (middle, high)
    return high
