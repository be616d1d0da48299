"""Runs that train on their own answers: what makes one is imported only where a config asks for it."""

from pathlib import Path

from jaxtrain.run import Run


def with_rollouts(run: Run, workdir: str | Path | None = None) -> Run:
    """Return a run that trains on its own answers, if its config asks for it.

    `workdir`: where the answers of each step are kept.
    """
    if not run.config.reinforce.prompts:
        return run
    from jaxtrain.tuning.rollouts import on_answers

    return on_answers(run, workdir)
