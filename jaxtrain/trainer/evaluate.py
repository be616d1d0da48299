"""Evaluations: after which steps, and the one that a stop left out."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import jax

from jaxtrain.distributed import processes
from jaxtrain.distributed.coordination import exchange
from jaxtrain.files.bounded_files import whole_lines
from jaxtrain.observe import MetricsWriter
from jaxtrain.run import Run, shapes_of
from jaxtrain.train_step.state import TrainState
from jaxtrain.trainer.early_stop import Patience
from jaxtrain.trainer.session import Session


class Evaluator:
    """Evaluates a run's state and writes the result."""

    def __init__(self, run: Run, session: Session, writer: MetricsWriter, patience: Patience,
                 ask: Callable[[TrainState], dict[str, float]] | None = None):
        """`patience`: is told of each evaluation. `ask`: returns further fields of the line."""
        self._run, self._session, self._writer, self._patience, self._ask = run, session, writer, patience, ask

    def due(self, step: int) -> bool:
        """Whether an evaluation follows this step."""
        t = self._run.config.train
        return self._run.eval_batches is not None and (
            step == t.steps or bool(t.eval_every and step % t.eval_every == 0))

    def missing(self, step: int) -> bool:
        """Whether a stop came between the save of this step and its evaluation; all processes get one answer."""
        # The first process decides, since files may arrive late on other machines.
        return bool(step) and self.due(step) and not exchange(_evaluated(self._session.workdir, step))[0]

    def evaluate(self, step: int, state: TrainState) -> None:
        """Evaluate, and write the line."""
        run, session = self._run, self._session
        with jax.transfer_guard("allow"):  # it waits for its numbers anyway, and places its batches on this thread
            with session.phase("compile"):
                run.sharded.compiled_evaluation(shapes_of(run).abstract(run.eval_batches))  # at the first evaluation
                processes.meet("evaluation", run.config.resilience.start_limit)
            with session.phase("eval"):
                fields = run.evaluate(state, run.config.train.eval_batches) | (self._ask(state) if self._ask else {})
        self._writer.write_eval(step, fields)
        self._patience.see(step, fields)


def evaluation_tasks(run: Run, workdir: Path) -> Callable[[TrainState], dict[str, float]] | None:
    """Return what asks a state the tasks of the config, once they are found; None: there are none."""
    if run.own or not run.config.evaluation.tasks:
        return None
    from jaxtrain.hub import training_tasks  # imports the harness

    return training_tasks.asked(run, workdir)


def _evaluated(workdir: Path, step: int) -> bool:
    with contextlib.suppress(OSError):
        return any(line.startswith(f'{{"step": {step}, '.encode()) and b'"eval_loss"' in line
                   for line in whole_lines(workdir / "metrics.jsonl"))
    return False
