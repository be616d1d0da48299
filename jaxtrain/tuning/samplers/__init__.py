"""Samplers in other processes: servers that answer the prompts of a run with the weights that it sends them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jaxtrain.hub.generate import Generated
from jaxtrain.tuning.samplers.completions import Answering

if TYPE_CHECKING:
    from jaxtrain.data.tokenizers.tokenizer import Tokenizer
    from jaxtrain.run import Run
    from jaxtrain.train_step.state import TrainState
    from jaxtrain.tuning.samplers.sent_weights import Weights


class Sampler(Protocol):
    """The protocol of what answers in place of the run. Every process calls all methods, in the same order."""

    def written(self, step: int, state: "TrainState") -> "Weights":
        """Return the weights after this step, ready to be sent."""
        ...

    def kept(self, step: int) -> "Weights | None":
        """Return the weights after this step that an earlier start of the run left."""
        ...

    def ask(self, many: int, asking: Callable[[Answering], list[Generated]], weights: "Weights",
            record: Callable[[list[Generated]], None]) -> Sequence[Generated]:
        """Return at once a sequence of so many answers by these weights, which waits when it is read.

        Args:
            many: the number of answers.
            asking: makes the answers by what it is given; called in the first process, on a thread beside the steps.
            weights: those that answer.
            record: called in the first process when all answers are there, before they can be read.
        """
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
    """Return the sampler that `rl.sampler` names; None: the run answers itself."""
    if not run.config.rl.sampler:
        return None
    from jaxtrain.tuning.samplers import remote_answers

    return remote_answers.RemoteAnswers.of(run, tokenizer, ends, workdir)
