"""Best-fit packing: every token to predict is predicted once, documents that fit are whole, rows are nearly full."""

import itertools

import numpy as np
import pytest

from jaxtrain.config.schema import DataConfig
from jaxtrain.data import load_corpus
from jaxtrain.data.corpus.corpus import Shard, Tokens
from jaxtrain.data.loading.batches import eval_batches, rows, train_batches
from jaxtrain.data.packing import best_fit
from jaxtrain.data.packing.packed_rows import FittedRows
from jaxtrain.errors import UserError

EOD = 9


def split(lengths, per_shard=7):
    """Documents of so many tokens each, the last one an end; tokens tell where they are from."""
    documents = [np.append(np.arange(100 * i, 100 * i + n - 1), EOD) for i, n in enumerate(lengths, start=1)]
    shards = []
    for i in range(0, len(documents), per_shard):
        some = documents[i: i + per_shard]
        shards.append(Shard(np.concatenate(some).astype(np.uint32), np.cumsum([0, *map(len, some)])))
    return Tokens(tuple(shards), sum(lengths)), documents


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("seq_len", [1, 5, 16, 64])
def test_every_token_is_predicted_once_from_its_own_document(seed, seq_len):
    rng = np.random.default_rng(seed)
    tokens, documents = split(rng.integers(1, 90, size=int(rng.integers(2, 60))))
    made = FittedRows(tokens, plan := best_fit.plan(tokens, seq_len), seq_len)
    seen, whole = [], 0
    for i in range(len(made)):
        row = made[i]
        real = row["segments"] > 0
        assert (row["weights"] == real).all() and (np.diff(real.astype(int)) <= 0).all()
        seen += list(zip(row["tokens"][real], row["targets"][real], strict=True))
        for segment in range(1, row["segments"].max() + 1):
            mine = row["segments"] == segment
            assert row["positions"][mine].tolist() == list(range(mine.sum()))
            whole += row["targets"][mine][-1] == EOD and (row["tokens"][mine][0] % 100 == 0)
    pairs = [pair for document in documents for pair in itertools.pairwise(document.tolist())]
    assert sorted(seen) == sorted(pairs)
    assert whole == sum(0 < len(document) - 1 <= seq_len for document in documents)
    assert plan.cut == sum(len(document) - 1 > seq_len for document in documents)


def one_by_one(lengths, room) -> list[list[int]]:
    """Each piece, longest first, where it leaves the least room; the rows, each with its lengths."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        wide = [row for row in rows if room - sum(row) >= length]
        if wide:
            min(wide, key=lambda row: room - sum(row)).append(length)
        else:
            rows.append([length])
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_each_piece_goes_where_it_leaves_the_least_room(seed):
    """Groups of rows that look alike are what comes out where each piece is placed by itself."""
    rng = np.random.default_rng(seed)
    room = int(rng.integers(1, 40))
    lengths = rng.integers(1, room + 1, int(rng.integers(1, 200))) // rng.integers(1, 4)
    tokens, _ = split(np.maximum(lengths, 1) + 1)
    plan = best_fit.plan(tokens, room)
    counts, starts, of_pieces = plan.pieces(np.arange(len(plan)))
    rows = [sorted(row.tolist(), reverse=True) for row in np.split(of_pieces, np.cumsum(counts)[:-1])]
    assert sorted(map(sum, rows)) == sorted(map(sum, one_by_one(np.maximum(lengths, 1).tolist(), room)))
    assert len(set(starts.tolist())) == len(starts) == len(lengths)


def test_rows_are_nearly_full():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1.2, 20_000), 2, None).astype(int)
    tokens = Tokens((Shard(np.zeros(lengths.sum(), np.uint16), np.cumsum([0, *lengths])),), 0)
    assert best_fit.plan(tokens, 2048).fill > 0.999


def test_a_plan_is_kept_and_a_broken_one_made_again(tmp_path):
    tokens, _ = split(range(1, 40))
    first = best_fit.cached_plan(tokens, 16, tmp_path, "them")
    path, = tmp_path.iterdir()
    again = best_fit.cached_plan(None, 16, tmp_path, "them")  # without the tokens nothing can be planned
    rows = np.arange(len(first))
    assert all(map(np.array_equal, first.pieces(rows), again.pieces(rows))) and first.cut == again.cut
    assert all(map(np.array_equal, first.pieces(rows), best_fit.plan(tokens, 16).pieces(rows)))
    content = path.read_bytes()
    path.unlink()  # what is mapped stays as it was
    path.write_bytes(content[:-100])
    third = best_fit.cached_plan(tokens, 16, tmp_path, "them")
    assert np.array_equal(first.starts, third.starts) and len(list(tmp_path.iterdir())) == 1


def test_a_run_may_choose_it(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(30):
        (tmp_path / "text" / f"{i}.txt").write_text(f"document {i} " * (i + 1))
    config = DataConfig(source=str(tmp_path / "text"), cache_dir=str(tmp_path), packing="best_fit", seq_len=64,
                        global_batch_size=4, eval_fraction=0.2)
    corpus = load_corpus(config)
    assert isinstance(rows(config, corpus, "train"), FittedRows)
    batch, evaluation = train_batches(config, corpus)[3], eval_batches(config, corpus)
    assert batch["tokens"].shape == (4, 64) and batch["weights"].max() == 1
    counted = sum(evaluation[n]["weights"].sum() for n in range(evaluation.num_batches))
    assert counted == corpus.eval.num_tokens - corpus.eval.num_documents


def test_nothing_to_predict_is_refused(tmp_path):
    tokens, _ = split([1, 1])
    with pytest.raises(UserError, match="nothing to predict"):
        FittedRows(tokens, best_fit.plan(tokens, 4), 4)
    with pytest.raises(UserError, match="nothing to predict"):
        FittedRows(tokens, best_fit.cached_plan(tokens, 4, tmp_path, "them"), 4)


def test_documents_looked_at_a_few_at_a_time_make_the_same_plan(monkeypatch):
    tokens, _ = split(np.random.default_rng(0).integers(1, 90, 100), per_shard=30)
    whole = best_fit.plan(tokens, 16)
    monkeypatch.setattr(best_fit, "CHUNK", 4)
    parts = best_fit.plan(tokens, 16)
    assert all(map(np.array_equal, whole.pieces(np.arange(len(whole))), parts.pieces(np.arange(len(parts)))))


def test_a_plan_that_cannot_be_kept_is_made_all_the_same(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "no space")

    tokens, _ = split(range(1, 40))
    monkeypatch.setattr(best_fit.os, "posix_fallocate", full)
    kept_not = best_fit.cached_plan(tokens, 16, tmp_path, "them")
    assert np.array_equal(kept_not.starts, best_fit.plan(tokens, 16).starts) and not list(tmp_path.iterdir())


def test_several_rows_at_once_are_the_rows_one_by_one():
    tokens, _ = split(np.random.default_rng(0).integers(1, 90, 50))
    rows = FittedRows(tokens, best_fit.plan(tokens, 64), 64)
    numbers = [3, 0, 3, len(rows) - 1]
    for name, column in rows.take(numbers).items():
        assert column.tolist() == [rows[i][name].tolist() for i in numbers] and column.flags.c_contiguous
    for i in (-1, len(rows)):
        with pytest.raises(IndexError):
            rows.take([0, i])
