"""What a sweep has spent, and what it would cost at most."""

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
        dollars = dollars_an_hour(sweep.job) / 3600 * sum(trial.seconds() for trial in trials)
        if dollars >= sweep.dollars:
            return f"${dollars:,.2f} of ${sweep.dollars:,.2f} are spent"
    if sweep.seconds and time.time() - began >= sweep.seconds:
        return f"the time of the sweep ({sweep.content['budget']['time']}) is over"
    return ""


def at_most(sweep: Sweep) -> list[str]:
    """Return what the sweep costs if nothing is stopped or fails, a sentence each."""
    points, seconds = size(sweep.ranges), sweep.job.seconds
    trials = min(points * sweep.runs, sweep.trials or float("inf"))
    tokens = min(trials * tokens_of(sweep.config_of(sweep.example())), sweep.tokens or float("inf"))
    dollars = trials * dollars_an_hour(sweep.job) * seconds / 3600 if seconds and dollars_an_hour(sweep.job) else 0
    lines = [f"{trials:,} trials" + (f" of {points:,} points" if points < float("inf") else "")
             if trials < float("inf") else "any number of trials"]
    lines += [f"about {tokens:,.0f} tokens at most"] if tokens < float("inf") else []
    if dollars or sweep.dollars:
        lines.append(f"about ${min(dollars or sweep.dollars, sweep.dollars or dollars):,.2f} at most")
    return lines


def tokens_of(config: Config) -> int:
    """Return the tokens of a whole run."""
    found, end = stages(config.data), config.train.steps
    ends = [*(stage.start for stage in found[1:]), end]
    return sum(max(0, min(end, after) - stage.start) * stage.seq_len * stage.batch
               for stage, after in zip(found, ends, strict=True))
