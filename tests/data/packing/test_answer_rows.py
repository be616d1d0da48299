"""Rows of labelled answers, and beside them the same prompts with the answers of others; long answers are dropped."""

import numpy as np
import pytest

from jaxtrain.config.schema import DataConfig
from jaxtrain.data.corpus.corpus import Corpus, Shard, Tokens
from jaxtrain.data.corpus.corruption import SparedRows
from jaxtrain.data.loading.batches import train_batches
from jaxtrain.data.packing import best_fit
from jaxtrain.data.packing.answer_rows import COLUMNS, AnswerRows, answers
from jaxtrain.errors import UserError

EOD = 9


def split(sizes, per_shard=4):
    """Answers: document i has a prompt and an answer of so many tokens, with an end; every third one is undesirable."""
    shards = []
    for first in range(0, len(sizes), per_shard):
        documents, trained = [], []
        for i, (prompt, answer) in enumerate(sizes[first:first + per_shard], start=first):
            documents.append(np.concatenate([1000 * (i + 1) + np.arange(prompt), 1000 * (i + 1) + 500 + np.arange(
                answer - 1), [EOD]]))
            trained.append(np.repeat([0, 1 if i % 3 else 2], (prompt, answer)))
        shards.append(Shard(np.concatenate(documents).astype(np.uint32), np.cumsum([0, *map(len, documents)]),
                            np.concatenate(trained).astype(np.uint8)))
    return Tokens(tuple(shards), 0)


def made(tokens, seq_len):
    plan = best_fit.plan(tokens, seq_len)
    return AnswerRows(tokens, plan, seq_len), plan


@pytest.mark.parametrize("pairs", [False, True], ids=["labels", "pairs"])
def test_rows_hold_answers_their_labels_and_prompts_with_the_answers_of_others(pairs):
    sizes, seq_len, seen = [*np.random.default_rng(0).integers(1, 7, (40, 2)).tolist(), [15, 9]], 20, []
    tokens = answers(split(sizes), pairs, not pairs)
    rows, plan = made(tokens, seq_len)
    mismatched = 0
    for number in range(len(rows)):
        row = rows[number]
        texts = []
        for segment in range(1, row["segments"].max() + 1):
            here = row["segments"] == segment
            i = int(row["tokens"][here][0]) // 1000 - 1
            prompt, answer = sizes[i]
            label = i % 2 == 0 if pairs else i % 3 > 0
            want = np.repeat([0, 1], (prompt - 1, answer))
            assert row["weights"][here].tolist() == want.tolist()
            assert row["labels"][here].tolist() == (want * label).tolist()
            text = np.append(row["tokens"][here], EOD)
            texts.append((text[:prompt], text[prompt:]))
            seen.append(i)
        want = [(prompt, texts[(n + 1) % len(texts)][1]) for n, (prompt, _) in enumerate(texts)]
        want = [] if len(texts) == 1 else want  # none is another's
        assert row["kl_segments"].max() == len(want)
        for segment, (prompt, answer) in enumerate(want, start=1):
            here = row["kl_segments"] == segment
            text = np.append(row["kl_tokens"][here], row["kl_targets"][here][-1])
            assert text.tolist() == [*prompt, *answer] and row["kl_targets"][here].tolist() == text[1:].tolist()
            assert row["kl_positions"][here].tolist() == list(range(len(text) - 1))
            assert row["kl_weights"][here].tolist() == [0] * (len(prompt) - 1) + [1] * len(answer)
            mismatched += 1
        assert not row["kl_weights"][row["kl_segments"] == 0].any()
    fits = [i for i, size in enumerate(sizes) if sum(size) - 1 <= seq_len]
    assert sorted(seen) == fits and plan.cut == len(sizes) - len(fits) > 0 and mismatched > 30


def test_an_equal_prompt_is_not_anothers():
    """Both answers of a pair may share a row."""
    ids = np.array([5, 6, 1, EOD, 5, 6, 2, EOD], np.uint32)
    tokens = Tokens((Shard(ids, np.array([0, 4, 8]), np.array([0, 0, 1, 1] * 2, np.uint8)),), 0)
    row = made(answers(tokens, True, False), 8)[0][0]
    assert row["segments"].max() == 2 and row["kl_segments"].max() == 0


def test_rows_that_are_lost_have_every_column():
    rows = made(answers(split([(2, 3)] * 4), False, True), 10)[0]
    assert SparedRows(rows, 10, EOD)._empty.keys() == rows[0].keys() >= COLUMNS.keys()


def test_answers_are_not_learnt_as_documents(tmp_path):
    """Undesirable ones would be, too."""
    corpus = Corpus(split([(3, 4), (5, 6)]), split([]), None, "", tmp_path, labelled=True)
    for packing in ("concat", "best_fit", "bucket"):
        with pytest.raises(UserError, match=rf"data\.packing: .* and {packing} would have rejected answers learnt too"):
            train_batches(DataConfig(packing=packing, seq_len=20), corpus)


def test_what_holds_no_labels_is_refused():
    tokens = split([(3, 4)])
    with pytest.raises(UserError, match=r"data\.packing: the corpus holds no labelled answers; prepare records with a"):
        answers(tokens, False, False)
    with pytest.raises(UserError, match=r"data\.seq_len: none of the 1 answers fits into a row of 5 tokens; raise"):
        made(answers(tokens, False, True), 5)
