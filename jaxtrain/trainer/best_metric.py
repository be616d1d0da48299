"""The metric of `checkpoint.best`, which the lines of metrics.jsonl must have."""

from jaxtrain.errors import UserError
from jaxtrain.run import Run

_EVALUATION = ("eval_loss", "eval_perplexity", "eval_bits_per_byte")


def check(run: Run) -> None:
    """Refuse a `checkpoint.best` that neither the steps of the run have, nor its evaluations."""
    best, evaluations = run.config.checkpoint.best, _EVALUATION if run.eval_batches is not None else ()
    if own := run.objective.evaluation_metrics:
        evaluations = ("eval_loss", *(f"eval_{name}" for name in own))
    if evaluations and run.config.train.ema_decay:
        evaluations = (*evaluations, "eval_loss_ema")
    if "reward" in best:
        raise UserError("checkpoint.best", f"a higher {best} is better, and the lowest is kept", "use a loss")
    if best in evaluations:
        return
    known = [name for name in (*evaluations, *sorted(run.trace().out_info[1])) if "reward" not in name]
    if best not in known:
        raise UserError("checkpoint.best", f"there is no metric {best!r}", f"known: {', '.join(known)}")
