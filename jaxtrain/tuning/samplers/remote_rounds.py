"""The answers of a step from a sampler in another process: those on record, or those that it is asked for."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxtrain.hub.generate import Generated
from jaxtrain.tuning.rollout_files import Round
from jaxtrain.tuning.samplers import Sampler
from jaxtrain.tuning.samplers.completions import Answering

if TYPE_CHECKING:
    from jaxtrain.train_step.state import TrainState


@dataclass(frozen=True)
class Wanted:
    """The answers of a round that are wanted before a step, of the weights that were `made` by this one or earlier."""

    made: int
    step: int
    numbers: list[int]  # of prompts
    asking: Callable[[Answering], list[Generated]]  # has them answered


def round_of(sampler: Sampler, wanted: Wanted, kept: Round | None, state: "Callable[[], TrainState]",
             record: Callable[[Round], None]) -> Round:
    """Return `kept`, the round on record, where it is of these weights; otherwise one that waits for its answers.

    A server's answers cannot be made again to the bit: those of the newest weights are taken from the record too.
    `state`: gives the newest weights. `record`: is called in the first process when answers are there.
    """
    earlier = wanted.made < wanted.step
    weights = sampler.kept(wanted.made) if kept is None and earlier else None
    if weights is None and (kept is None or not earlier):
        weights = sampler.written(wanted.step, state())
    if kept is not None and (weights is None or kept.weights == weights.version):
        return kept
    assert weights is not None
    one = Round(wanted.numbers, [], weights.step, weights=weights.version)

    def recorded(answers: list[Generated]) -> None:
        record(replace(one, answers=answers))

    one.answers = sampler.ask(len(wanted.numbers), wanted.asking, weights, recorded)
    return one
