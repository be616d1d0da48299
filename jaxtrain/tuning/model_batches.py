"""Runs whose batches their model makes, or adds to: what does so is imported only where a config asks for it."""

from dataclasses import replace
from pathlib import Path

from jaxtrain.run import Run


def with_model_batches(run: Run, workdir: str | Path | None = None) -> Run:
    """Return a run that trains on its own answers, or on batches with the reference's numbers, if its config asks.

    `workdir`: where the answers of each step are kept, or the numbers.
    """
    if getattr(run.objective, "precomputed", False):
        from jaxtrain.tuning.reference_sums import ReferenceSums

        return replace(run, joined=ReferenceSums(run, workdir))
    if not run.config.reinforce.prompts:
        return run
    from jaxtrain.tuning.rollouts import on_answers

    return on_answers(run, workdir)
