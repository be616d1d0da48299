"""The metric of `checkpoint.best`, which lines of the run's metrics.jsonl or of a watcher's have."""

from jaxtrain.checkpoint.retention import HIGHEST
from jaxtrain.errors import UserError, nearest
from jaxtrain.run import Run

_EVALUATION = ("eval_loss", "eval_perplexity", "eval_bits_per_byte")


def check(run: Run) -> None:
    """Refuse a `checkpoint.best` that steps of the run and its evaluations lack, and that no watcher would have."""
    asked = run.config.checkpoint.best
    best = asked.removeprefix(HIGHEST)
    evaluations = () if run.eval_batches is None else ("eval_loss",) if run.own_model else _EVALUATION
    if own := run.objective.evaluation_metrics:
        evaluations = ("eval_loss", *(f"eval_{name}" for name in own))
    if evaluations and run.config.train.ema_decay:
        evaluations = (*evaluations, "eval_loss_ema")
    if "reward" in best and asked == best:
        raise UserError("checkpoint.best", f"a higher {best} is better, and the lowest is kept",
                        f"write {HIGHEST}{best}, or use a loss")
    if best in evaluations or (best.startswith("eval_") and run.config.evaluation.tasks):  # which the harness names
        return
    known = [name for name in (*evaluations, *sorted(run.trace().out_info[1])) if "reward" not in name or best != asked]
    ours = best in _EVALUATION or not best.startswith("eval_") or nearest(best, known).startswith("did")
    if best not in known and ours:  # others may come from `jaxtrain evaluate --watch`
        raise UserError("checkpoint.best", f"there is no metric {best!r}", f"known: {', '.join(known)}")
