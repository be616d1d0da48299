"""Rewards of answers by a reward model that was trained before (`preference.loss=reward`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.errors import UserError
from jaxtrain.hub import scoring, trained_model
from jaxtrain.hub.initial_params import source_and_step
from jaxtrain.hub.trained_tokenizer import tokenizer_of
from jaxtrain.run import Run
from jaxtrain.tuning.rewards import KEY

PREFIX = "model:"  # of a `rl.reward` that names a workdir


def reward_model(named: str, count: int = 0, platform: str = "") -> tuple[Run, Path, int | None]:
    """Return the reward model that model:WORKDIR or model:WORKDIR@STEP names, its workdir and the step.

    It is on all devices, or for this many of a platform that are not here.
    """
    folder, step = source_and_step(named.removeprefix(PREFIX))
    if not (folder / "checkpoints").is_dir():
        raise UserError(KEY, f"{folder} is not the workdir of a run with checkpoints", "check the name")
    run = trained_model.spread_model(trained_model.sections_of(folder), count, platform)
    if not run.config.preference.reward_head:
        raise UserError(KEY, f"{folder} has no reward model", "give a run of preference.loss=reward")
    return run, folder, step


@dataclass(frozen=True)
class RewardScores:
    """A trained reward model, on all devices. Every process calls it."""

    run: Run
    params: Any
    checkpoint: dict[str, Any]  # its step and fingerprint

    @classmethod
    def of(cls, named: str, tokenizer: Tokenizer, recorded: JsonMapping | None = None) -> "RewardScores":
        """Load the reward model of this name, for texts of this tokenizer.

        `recorded`: the checkpoint that the run began with; it keeps that one, whatever was trained since.
        """
        run, folder, step = reward_model(named)
        step = recorded["step"] if recorded else step
        if tokenizer_of(folder).fingerprint != tokenizer.fingerprint:
            raise UserError(KEY, f"the reward model in {folder} has another tokenizer", "train one with this tokenizer")
        params, found = trained_model.load(folder, run, step)
        assert found  # it has checkpoints
        return cls(run, params, {"step": found[0], "fingerprint": found[1]})

    def __call__(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the reward of each text, an answer behind its prompt without the token that ends it."""
        return scoring.rewards(self.run, self.params, texts)
