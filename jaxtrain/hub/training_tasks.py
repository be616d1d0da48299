"""`evaluation.tasks`: tasks of lm-evaluation-harness that a run is asked while it trains, with each evaluation."""

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.hub.chat_messages import chat_of
from jaxtrain.hub.evaluate_tasks import Settings, Tasks, numbers_of
from jaxtrain.hub.folders import task_names
from jaxtrain.run import Run
from jaxtrain.train_step.state import TrainState

SECTION = "evaluation"


def asked(run: Run, workdir: str | Path) -> Callable[[TrainState], dict[str, float]]:
    """Return what asks a state on the mesh of its run, and returns the results as `eval_TASK_METRIC`.

    Every process calls it, and gets the same numbers.
    """
    config = run.config
    if run.eval_batches is None:
        raise UserError(f"{SECTION}.tasks", "they run with each evaluation, and the data has no evaluation split",
                        "prepare them with a larger --eval_fraction, or use jaxtrain evaluate --watch")
    c = config.evaluation
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness's bars, between the lines of the run
    with _named_as_keys():
        task_names.check(c.tasks, c.include or None)
        tasks = Tasks.of(Settings(
            tasks=",".join(c.tasks), include=c.include or None, limit=c.limit or None, chat=c.chat,
            num_fewshot=None if c.num_fewshot < 0 else c.num_fewshot))

    def ask(state: TrainState) -> dict[str, float]:
        from jaxtrain.hub.harness_model import HarnessModel

        words = run.corpus.tokenizer
        with _named_as_keys(), _own_random_numbers():
            chat = chat_of(workdir, config.to_dict(), words, "") if c.chat else None
            model = HarnessModel(run, state, words, chat=chat, batch_size=c.batch_size, folder=workdir)
            return numbers_of(tasks.ask(model)["results"])

    return ask


@contextlib.contextmanager
def _named_as_keys() -> Iterator[None]:
    """Let errors about flags of `jaxtrain evaluate` name the keys of the config instead."""
    try:
        yield
    except UserError as error:
        raise UserError(error.key.replace("--", f"{SECTION}."), error.reason,
                        error.fix.replace("--", f"{SECTION}.")) from error


@contextlib.contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Leave the generators that the harness seeds as they were."""
    ours, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)
