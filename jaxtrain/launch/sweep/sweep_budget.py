"""The budget of a sweep: what it has spent, and what it would cost at most."""

import time
from collections.abc import Sequence

from jaxtrain.config.data_stages import stages
from jaxtrain.config.schema import Config
from jaxtrain.launch.cost import dollars_an_hour
from jaxtrain.launch.sweep.search_space import size
from jaxtrain.launch.sweep.sweep_file import Sweep
from jaxtrain.launch.sweep.trials import Trial


def spent(sweep: Sweep, trials: Sequence[Trial], began: float) -> str:
    """Return which part of the budget is spent, as a sentence; "": none is. Trials that run count as far as they are.
    """
    if sweep.tokens and (tokens := sum(trial.tokens() for trial in trials)) >= sweep.tokens:
        return f"{tokens:,} tokens of {sweep.tokens:,.0f} are spent"
    if sweep.dollars:
        dollars = dollars_an_hour(sweep.job) / 3600 * sum(
            trial.ended["seconds"] if trial.ended else trial.seconds() for trial in trials)
        if dollars >= sweep.dollars:
            return f"${dollars:,.2f} of ${sweep.dollars:,.2f} are spent"
    if sweep.seconds and time.time() - began >= sweep.seconds:
        return f"the time of the sweep ({sweep.content['budget']['time']}) is over"
    return ""


def at_most(sweep: Sweep) -> list[str]:
    """Return what the sweep costs if nothing is stopped or fails, a sentence each.

    The trials that run when a budget is spent go on to their end.
    """
    points, each = size(sweep.ranges), max(tokens_of(sweep.config_of(point)) for point in sweep.examples())
    trials = min(points * sweep.runs, sweep.trials or float("inf"))
    tokens = min(trials * each, sweep.tokens + sweep.parallel * each if sweep.tokens else float("inf"))
    lines = [f"{trials:,} trials" + (f" of {points:,} points" if points < float("inf") else "")
             if trials < float("inf") else "any number of trials"]
    lines += [f"about {tokens:,.0f} tokens at most"] if tokens < float("inf") else []
    if each := dollars_an_hour(sweep.job) * sweep.job.seconds / 3600:
        dollars = min(trials * each, sweep.dollars + sweep.parallel * each if sweep.dollars else float("inf"))
        lines += [f"about ${dollars:,.2f} at most, if no trial takes longer than {sweep.job.time}"] * (
            dollars < float("inf"))
    elif sweep.dollars:
        lines.append(f"about ${sweep.dollars:,.2f}, and what the trials that run by then take to their end")
    return lines


def tokens_of(config: Config) -> int:
    """Return the tokens of a whole run."""
    found, end = stages(config.data), config.train.steps
    ends = [*(stage.start for stage in found[1:]), end]
    return sum(max(0, min(end, after) - stage.start) * stage.seq_len * stage.batch
               for stage, after in zip(found, ends, strict=True))
