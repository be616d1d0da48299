"""The best evaluation: what `checkpoint.best` names, and early stopping (`train.patience`) where none is better."""

import contextlib
import math
from pathlib import Path

import jax

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.checkpoint import CheckpointManager
from jaxtrain.checkpoint.retention import HIGHEST
from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import UserError, nearest
from jaxtrain.files.bounded_files import parsed, whole_lines
from jaxtrain.observe import events
from jaxtrain.run import Run, shapes_of

METRIC = "eval_loss"
_EVALUATION = (METRIC, "eval_perplexity", "eval_bits_per_byte")
KIND = "early_stop"  # of the event


def check(run: Run) -> None:
    """Refuse `train.patience` where nothing is evaluated."""
    if run.config.train.patience and run.eval_batches is None:
        raise UserError("train.patience", "the data have no evaluation split, so that there are no evaluations",
                        "prepare them with a larger --eval_fraction, or leave it out")


class Patience:
    """The evaluations of a run so far, which all processes know alike, and whether the run ends because of them.

    Nothing of it is saved: after a restart the lines of metrics.jsonl say what the evaluations before found.
    """

    def __init__(self, run: Run, workdir: Path, start: int):
        """Read the evaluations up to step `start`; every process makes this call."""
        self._most, self._steps, self._workdir = run.config.train.patience, run.config.train.steps, workdir
        self._found: list[tuple[int, float]] = []
        if self._most:  # the first process decides, since files may arrive late on other machines
            self._found = [(step, _number(loss)) for step, loss in exchange(_evaluations(workdir, start))[0]]

    @property
    def watches(self) -> bool:
        """Whether evaluations may end the run: what they see is saved, so that it can go on from there."""
        return self._most > 0

    def see(self, step: int, fields: JsonMapping) -> None:
        """Take the result of an evaluation."""
        self._found.append((step, _number(fields[METRIC])))

    @property
    def over(self) -> bool:
        """Whether the run ends after the newest evaluation, before its last step."""
        return self.watches and self._since >= self._most and self._found[-1][0] < self._steps

    @property
    def _since(self) -> int:
        """The number of evaluations after the one that found the lowest loss first."""
        losses = [loss for _, loss in self._found]
        return len(losses) - 1 - losses.index(min(losses)) if losses else 0

    def reason(self, checkpoints: CheckpointManager) -> str:
        """Return where and why the run ended early, and how it goes on; "" if it did not."""
        if not self.over:
            return ""
        (step, loss), many = self._lowest, self._since
        kept = f", whose checkpoint is {self._workdir / 'checkpoints' / str(step)}" * (step in checkpoints.steps())
        return (f"stopped early at step {self._found[-1][0]} of {self._steps}, by train.patience={self._most}: "
                f"{many} evaluation{'s in a row' * (many > 1)} found no lower {METRIC} than {loss:.4f}, that of step "
                f"{step}{kept}; to train on, add --config.train.patience={2 * many}, or 0 to train to the last step")

    def record(self) -> None:
        """Write the event of an early stop, in the first process."""
        if jax.process_index() == 0:
            step, loss = self._lowest
            events.record(self._workdir, KIND, step=self._found[-1][0], best_step=step, patience=self._most,
                          **{METRIC: loss})

    @property
    def _lowest(self) -> tuple[int, float]:
        return self._found[len(self._found) - 1 - self._since]


def _number(loss: float | None) -> float:
    """Return the loss, or infinity for one that is not finite, which metrics.jsonl has as null."""
    return loss if loss is not None and math.isfinite(loss) else math.inf


def _evaluations(workdir: Path, start: int) -> list[tuple[int, float | None]]:
    """Return the step and loss of each evaluation up to a step that metrics.jsonl has."""
    found = []
    with contextlib.suppress(OSError):
        for line in whole_lines(workdir / "metrics.jsonl"):
            with contextlib.suppress(ValueError):  # damaged
                if f'"{METRIC}"'.encode() in line and (told := parsed(line, {"step": int}))["step"] <= start:
                    found.append((told["step"], told[METRIC] if isinstance(told[METRIC], int | float) else None))
    return found


def check_best(run: Run) -> None:
    """Refuse a `checkpoint.best` that steps of the run and its evaluations lack, and that no watcher would have."""
    asked = run.config.checkpoint.best
    best = asked.removeprefix(HIGHEST)
    evaluations = () if run.eval_batches is None else ("eval_loss",) if run.own else _EVALUATION
    if own := run.objective.evaluation_metrics:
        evaluations = ("eval_loss", *(f"eval_{name}" for name in own))
    if evaluations and run.config.train.ema_decay:
        evaluations = (*evaluations, "eval_loss_ema")
    if "reward" in best and asked == best:
        raise UserError("checkpoint.best", f"a higher {best} is better, and the lowest is kept",
                        f"write {HIGHEST}{best}, or use a loss")
    if best in evaluations or (best.startswith("eval_") and run.config.evaluation.tasks):  # which the harness names
        return
    traced = run.sharded.trace(shapes_of(run).abstract())
    known = [name for name in (*evaluations, *sorted(traced.out_info[1])) if "reward" not in name or best != asked]
    ours = best in _EVALUATION or not best.startswith("eval_") or nearest(best, known).startswith("did")
    if best not in known and ours:  # others may come from `jaxtrain evaluate --watch`
        raise UserError("checkpoint.best", f"there is no metric {best!r}", f"known: {', '.join(known)}")
