"""Uses of a trained or published model: generation, evaluation, adapters, merging and export."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from jaxtrain.errors import UserError

if TYPE_CHECKING:  # published folders are read without JAX
    from jaxtrain.run import Run


def with_initial_params(run: Run) -> Run:
    """Return a run whose `init` does as its `train.init_from` says."""
    if run.config.lora.init == "pissa" and not run.config.train.init_from:
        raise UserError("lora.init", "pissa begins with the principal components of trained weights, and the run "
                        "begins with random ones", "set train.init_from, or leave it out")
    if not (run.config.train.init_from or run.config.train.init_encoder_from):
        return run
    from jaxtrain.hub.initial_params import initial_params

    return replace(run, load_initial=initial_params(run.config))
