"""Pairs of the model's own answers, the best and the worst of each group, for preference losses (online DPO).

Guo et al. (arXiv 2402.04792), with a reward in place of their annotator. A row holds a pair as `data.packing=pairs`
makes rows: segment 1 is the chosen answer behind its prompt, segment 2 the rejected one.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxtrain.tuning.environments.conversation import measured
from jaxtrain.tuning.rewards import ROUNDING, totals_of
from jaxtrain.tuning.rollout_files import Round
from jaxtrain.tuning.rollouts import Rollouts, size_of

NAMES = ("tokens", "targets", "segments", "positions", "weights")


class AnswerPairs(Rollouts):
    """The answers of a run that learns from preferences: a row for each group."""

    answers_in_a_row = 2

    def _batch(self, one: Round) -> dict[str, np.ndarray]:
        scores = self._with_lengths(one)
        self._measure(scores)
        self._fields |= measured(one.answers)
        totals, size = totals_of(self.settings, scores), self.settings.group_size
        self._fields |= {"reward": float(totals.mean()),
                         "answer_tokens": float(np.mean([size_of(answer) for answer in one.answers]))}
        rows = [self._pair(one, totals, range(first, first + size)) for first in range(0, self.count, size)]
        return {name: np.stack([row[name] for row in rows]) for name in NAMES}

    def _pair(self, one: Round, totals: np.ndarray, group: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the best and the worst of these answers, of those that are trained on; an empty row if none differ."""
        row = {name: np.zeros(self.seq_len, np.float32 if name == "weights" else np.int32) for name in NAMES}
        group = [n for n in group if not self.is_left_out(one.answers[n])]
        if not group or np.ptp(totals[group]) <= ROUNDING * max(1, np.abs(totals[group]).max()):
            return row
        begin = 0
        for segment, at in enumerate((group[totals[group].argmax()], group[totals[group].argmin()]), start=1):
            prompt = self._prompt(one.numbers[at], one.answers[at])
            begin = _add(row, self._row(prompt, one.answers[at], 0.0, {}), segment, begin)
        return row


def _add(row: Mapping[str, np.ndarray], answer: Mapping[str, np.ndarray], segment: int, begin: int) -> int:
    """Write an answer's own row into a row of several, from this place on; return where it ends."""
    size = int(answer["segments"].sum())
    for name in NAMES:
        row[name][begin:begin + size] = answer[name][:size]
    row["segments"][begin:begin + size] = segment
    return begin + size
