"""Rows of labelled answers, each with its prompt in front; and beside them the same prompts with each other's answers.

From the latter KTO estimates how far the policy is from the reference (arXiv 2402.01306). The answer that stands behind
a prompt there is that of the row's next document, and the first one's behind the last, so that they fit into a row too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxtrain.data.corpus.corpus import Corpus, Tokens
from jaxtrain.data.corpus.shard_writer import UNDESIRABLE
from jaxtrain.data.packing.best_fit import Plan
from jaxtrain.data.packing.packed_rows import FittedRows
from jaxtrain.data.packing.pair_rows import PairRows, paired
from jaxtrain.errors import UserError

MISMATCHED = "kl_"  # in front of the names of columns of prompts with another's answer
COLUMNS = {"labels": np.float32, **{f"{MISMATCHED}{name}": np.int32 for name in (
    "tokens", "targets", "segments", "positions")}, f"{MISMATCHED}weights": np.float32}


@dataclass(frozen=True, eq=False)
class Answers(Tokens):
    """The tokens of a split in which each document is an answer behind its prompt."""

    whole: ClassVar[bool] = True
    pairs: bool = False  # every second one is undesirable; else those say so whose trained tokens are marked

    def desirable(self, start: int, learnt: int) -> bool:
        """Return the label of the document that begins at `start`; the token at `learnt` is trained on."""
        if self.pairs:
            return self.document(start)[1] % 2 == 0
        (shard, a, b, _), = self._between(learnt, learnt + 1)
        return int(shard.trained[a:b][0]) != UNDESIRABLE


def answers(tokens: Tokens, pairs: bool, labelled: bool) -> Answers:
    """Return the split as answers; `pairs`, `labelled`: what the corpus says that it holds."""
    if not (pairs or labelled):
        raise UserError("data.packing", "the corpus holds no labelled answers",
                        "prepare records with a label (--format=labelled), or with chosen and rejected answers")
    return Answers(tokens.shards, tokens.num_bytes, pairs)


def whole_rows(packing: str, tokens: Tokens, corpus: Corpus) -> tuple[Tokens, type[FittedRows]]:
    """Return the split as what `data.packing` keeps whole, "pairs" or "answers", and the class of its rows."""
    if packing == "pairs":
        return paired(tokens, corpus.pairs), PairRows
    return answers(tokens, corpus.pairs, corpus.labelled), AnswerRows


class AnswerRows(FittedRows):
    """Rows of a best-fit plan of answers, with `labels`, 1 where a target is of a desirable one, and `kl_` columns.

    In these a prompt is dropped whose answer would be its own: of the row's only document, or of an equal prompt.
    """

    columns = COLUMNS

    def __init__(self, tokens: Answers, plan: Plan, seq_len: int):
        if not len(plan):
            raise UserError("data.seq_len", f"none of the {plan.cut:,} answers fits into a row of {seq_len} tokens",
                            "raise data.seq_len, and model.max_seq_len with it")
        super().__init__(tokens, plan, seq_len)
        self._answers = tokens

    def take(self, numbers: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Return several rows at once as [n, T] arrays."""
        columns = super().take(numbers)
        columns |= {name: np.zeros((len(numbers), self.seq_len), dtype) for name, dtype in COLUMNS.items()}
        for row, number in enumerate(numbers):
            one = {name: column[row] for name, column in columns.items()}
            for segment, start in enumerate(self.places(int(number)), start=1):
                here = one["segments"] == segment
                learnt = int(one["weights"][here].argmax()) + 1
                one["labels"][here] = one["weights"][here] * self._answers.desirable(start, start + learnt)
            _mismatch(one)
        return columns


def _mismatch(row: dict[str, np.ndarray]) -> None:
    """Fill the columns of a row's prompts with the answers of the documents that follow."""
    documents, size, filled = [], 0, 0
    for segment in range(1, int(row["segments"].max()) + 1):
        here = row["segments"] == segment
        tokens, targets, weights = (row[name][here] for name in ("tokens", "targets", "weights"))
        first = int(weights.argmax()) + 1  # the place of the answer's first token
        documents.append((tokens[:first], np.append(tokens, targets[-1])[first:], weights[first - 1:]))
    for n, (prompt, *_) in enumerate(documents):
        other, answer, weights = documents[(n + 1) % len(documents)]
        if np.array_equal(prompt, other):
            continue
        ids, filled = np.concatenate([prompt, answer]), filled + 1
        at = slice(size, size := size + len(ids) - 1)
        made = {"tokens": ids[:-1], "targets": ids[1:], "segments": filled, "positions": np.arange(len(ids) - 1),
                "weights": np.append(np.zeros(len(prompt) - 1), weights)}
        for name, values in made.items():
            row[f"{MISMATCHED}{name}"][at] = values
