"""The log-probabilities that a teacher gives to the tokens of a run's own answers (on-policy distillation).

The gradient of the reverse divergence KL(policy, teacher) is a policy gradient whose advantage at each token is the
teacher's log-probability less the policy's: Agarwal et al. (GKD, arXiv 2306.13649) and Gu et al. (MiniLLM, 2306.08543).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.errors import UserError
from jaxtrain.hub import scoring, trained_model
from jaxtrain.hub.generate import Generated
from jaxtrain.hub.initial_params import source_and_step
from jaxtrain.hub.trained_tokenizer import tokenizer_of
from jaxtrain.run import Run
from jaxtrain.train_step.state import Params

KEY = "rl.teacher"


def teacher_model(named: str, count: int = 0, platform: str = "") -> tuple[Run, Path, int | None]:
    """Return the teacher that WORKDIR, WORKDIR@STEP or a published folder names, its folder and the step.

    It is on all devices, or for this many of a platform that are not here.
    """
    folder, step = source_and_step(named)
    run = trained_model.spread_model(trained_model.sections_of(folder), count, platform)
    if run.config.preference.reward_head:
        raise UserError(KEY, f"{folder} has a reward model", "name it in rl.reward, as model:WORKDIR")
    return run, folder, step


@dataclass(frozen=True)
class TeacherScores:
    """A teacher, on all devices. Every process calls it."""

    run: Run
    params: Params
    checkpoint: JsonObject  # its step and fingerprint; {}: a published folder

    @classmethod
    def of(cls, run: Run, tokenizer: Tokenizer, recorded: JsonMapping) -> "TeacherScores | None":
        """Load the teacher that a run's config names; None: it names none.

        `recorded`: the checkpoint that the run began with; it keeps that one, whatever was trained since.
        """
        if not run.config.rl.teacher:
            return None
        teacher, folder, step = teacher_model(run.config.rl.teacher)
        if tokenizer_of(folder).fingerprint != tokenizer.fingerprint:
            raise UserError(KEY, f"the teacher in {folder} has another tokenizer", "give one with the same tokenizer")
        if teacher.config.model.max_seq_len < run.config.data.seq_len:
            raise UserError("data.seq_len", f"{run.config.data.seq_len} tokens exceed the teacher's model.max_seq_len="
                            f"{teacher.config.model.max_seq_len}", "use shorter rows or another teacher")
        params, found = trained_model.load(folder, teacher, recorded["step"] if recorded else step)
        return cls(teacher, params, {"step": found[0], "fingerprint": found[1]} if found else {})

    def __call__(self, prompts: Sequence[Sequence[int]], answers: Sequence[Generated]) -> list[list[float]]:
        """Return the log-probability of each token of each answer behind its prompt, its end included."""
        pairs = [(prompt, [*answer.tokens, *(answer.end or ())[:1]])
                 for prompt, answer in zip(prompts, answers, strict=True)]
        return [one.logprobs.tolist() for one in scoring.score(self.run, self.params, pairs)]


def sampled_of(answer: Generated) -> np.ndarray:
    """Return the log-probability with which each token of an answer was sampled, its end included."""
    return np.array([*(answer.logprobs or ()), *(answer.end or ())[1:]])
