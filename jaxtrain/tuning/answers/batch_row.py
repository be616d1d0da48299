"""An answer as a row of a batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.hub.generate import Generated
from jaxtrain.tuning.environments.conversation import sampled_tokens


def row_of(seq_len: int, prompt: Sequence[int], answer: Generated, reward: float, known: Mapping[str, np.ndarray],
           learnt: bool) -> dict[str, np.ndarray]:
    """Return an answer behind its prompt, as targets of weight 1, with the ends that the model chose.

    What others said in a conversation has no weight.

    Args:
        seq_len: the length of the row.
        prompt: the tokens before the answer.
        answer: the answer.
        reward: its reward.
        known: further arrays of its tokens.
        learnt: it is trained on.
    """
    end, logprob = answer.end or (None, None)
    ids = [*prompt, *answer.tokens, *([] if end is None else [end])]
    said = [*(answer.logprobs or ()), *([] if end is None else [logprob])]
    size, first, ours = len(ids) - 1, len(prompt) - 1, sampled_tokens(answer)
    row: dict[str, Any] = {name: np.zeros(seq_len, np.int32)
                           for name in ("tokens", "targets", "segments", "positions")}
    row |= {name: np.zeros(seq_len, np.float32) for name in ("weights", "sampled", "rewards", "answers", *known)}
    row["tokens"][:size], row["targets"][:size] = ids[:-1], ids[1:]
    row["segments"][:size], row["positions"][:size] = 1, np.arange(size)
    row["weights"][first:size], row["sampled"][first:size] = ours & learnt, said
    for name, each in known.items():
        row[name][first:size] = ours * each
    row["rewards"][first], row["answers"][first] = reward, 1
    return row
