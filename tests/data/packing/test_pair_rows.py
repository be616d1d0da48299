"""Rows of preference pairs: both answers of a pair in one row, each as its own document; long pairs are dropped."""

import numpy as np
import pytest

from jaxtrain.config.schema import DataConfig
from jaxtrain.data.corpus.corpus import Corpus, Shard, Tokens
from jaxtrain.data.loading.batches import train_batches
from jaxtrain.data.packing import best_fit
from jaxtrain.data.packing.pair_rows import PairRows, paired
from jaxtrain.errors import UserError

EOD = 9


def split(sizes, per_shard=3):
    """Pairs of two documents of so many tokens, each with an end; without a prompt: every token is trained on."""
    shards = []
    for first in range(0, len(sizes), per_shard):
        documents = [np.append(100 * (2 * i + second) + np.arange(size - 1), EOD)
                     for i, pair in enumerate(sizes[first:first + per_shard], start=first + 1)
                     for second, size in enumerate(pair)]
        shards.append(Shard(np.concatenate(documents).astype(np.uint32), np.cumsum([0, *map(len, documents)]),
                            np.concatenate([np.ones(len(each), np.uint8) for each in documents])))
    return Tokens(tuple(shards), 0)


@pytest.mark.parametrize("seed", range(5))
def test_both_answers_of_a_pair_share_a_row(seed):
    rng = np.random.default_rng(seed)
    sizes, seq_len = rng.integers(2, 14, (20, 2)).tolist(), 20
    tokens = paired(split(sizes), pairs=True)
    plan = best_fit.plan(tokens, seq_len)
    made, seen = PairRows(tokens, plan, seq_len), []
    for i, row in enumerate(made[n] for n in range(len(made))):
        segments = row["segments"]
        assert segments.max() % 2 == 0 and len(made.places(i)) == segments.max()
        for chosen in range(1, segments.max(), 2):
            first, second = (segments == chosen, segments == chosen + 1)
            pair = int(row["tokens"][first][0]) // 200
            for mine, number in ((first, 0), (second, 1)):
                size = sizes[pair - 1][number]
                text = 100 * (2 * pair + number) + np.arange(size - 1)
                # The chosen answer's end stands in front of the rejected one; nothing follows from it.
                shown = [*text, EOD] if number == 0 else text
                assert row["tokens"][mine].tolist() == list(shown)
                assert row["positions"][mine].tolist() == list(range(len(shown)))
                assert row["targets"][mine][: size - 1].tolist() == [*text[1:], EOD]
                assert row["weights"][mine].tolist() == [1] * (size - 1) + [0] * (number == 0)
            seen.append(pair)
        assert not row["weights"][segments == 0].any()
    fits = [n for n, (a, b) in enumerate(sizes, start=1) if a + b - 1 <= seq_len]
    assert sorted(seen) == fits and plan.cut == len(sizes) - len(fits) > 0


def test_pairs_are_not_learnt_as_documents(tmp_path):
    """Rejected answers would be, too."""
    corpus = Corpus(split([(3, 4), (5, 6)]), split([]), None, "", tmp_path, pairs=True)
    for packing in ("concat", "best_fit", "bucket"):
        with pytest.raises(UserError, match=rf"data\.packing: .* and {packing} would have rejected answers learnt too"):
            train_batches(DataConfig(packing=packing, seq_len=20), corpus)


def test_what_holds_no_pairs_is_refused():
    tokens = split([(3, 4)])
    with pytest.raises(UserError, match=r"data\.packing: the corpus does not hold preference pairs; prepare records"):
        paired(tokens, pairs=False)
    with pytest.raises(UserError, match=r"data\.seq_len: none of the 1 pairs fits into a row of 5 tokens; raise"):
        PairRows(both := paired(tokens, pairs=True), best_fit.plan(both, 5), 5)
