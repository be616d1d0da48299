"""Samplers in other processes or on other devices, which answer the prompts of a run with the weights that they get."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jaxtrain.hub.generate import Generated
from jaxtrain.tuning.samplers.asked_in_turn import AnyWeights
from jaxtrain.tuning.samplers.completions import Answering

if TYPE_CHECKING:
    from jaxtrain.data.tokenizers.tokenizer import Tokenizer
    from jaxtrain.run import Run
    from jaxtrain.train_step.state import TrainState


class Sampler(Protocol):
    """The protocol of what answers in place of the run. Every process calls all methods, in the same order.

    Weights are its own: it gets those that it has returned.
    """

    def written(self, step: int, state: "TrainState") -> AnyWeights:
        """Return the weights after this step, ready to be sent."""
        ...

    def kept(self, step: int) -> AnyWeights | None:
        """Return the weights after this step that an earlier start of the run left."""
        ...

    def ask(self, many: int, asking: Callable[[Answering], list[Generated]], weights: AnyWeights,
            record: Callable[[list[Generated]], None]) -> Sequence[Generated]:
        """Return at once a sequence of so many answers by these weights, which waits when it is read.

        Args:
            many: the number of answers.
            asking: makes the answers by what it is given; called in the first process, on a thread beside the steps.
            weights: those that answer.
            record: called in the first process when all answers are there, before they can be read.
        """
        ...

    def before_save(self) -> None:
        """See that a run that is killed after a save can go on with the same answers."""
        ...

    def stop(self) -> None:
        """Cancel outstanding requests; return at once."""
        ...

    def forget(self) -> None:
        """Forget what was asked for and written."""
        ...

    def pop_fields(self) -> dict[str, float]:
        """Return what was measured since the last call."""
        ...


def sampler_of(run: "Run", tokenizer: "Tokenizer", ends: Sequence[int], workdir: Path | None) -> Sampler | None:
    """Return the sampler that `rl.sampler` names or `rl.sampler_devices` are; None: the mesh that trains answers."""
    if run.config.rl.sampler_devices:
        from jaxtrain.tuning.samplers import device_sampler

        return device_sampler.DeviceSampler(run, tokenizer, ends)
    if not run.config.rl.sampler:
        return None
    from jaxtrain.tuning.samplers import remote_answers

    return remote_answers.RemoteAnswers.of(run, tokenizer, ends, workdir)
