import itertools

import numpy as np
import pytest

from jaxtrain.data import PackedRows, Tokens
from jaxtrain.data.corpus.corpus import Shard
from jaxtrain.errors import UserError

EOD = 256


def tokens_of(documents: list[list[int]]) -> Tokens:
    """`documents` without their end-of-document ids."""
    closed = [[*document, EOD] for document in documents]
    offsets = np.cumsum([0] + [len(document) for document in closed])
    # In shards of two documents each, so that rows cross them.
    ids = np.array(list(itertools.chain(*closed)), np.uint16)
    cuts = [*range(0, len(documents), 2), len(documents)]
    shards = [Shard(ids[offsets[a]: offsets[b]], offsets[a: b + 1] - offsets[a]) for a, b in itertools.pairwise(cuts)]
    return Tokens(tuple(shards), sum(map(len, documents)))


def random_documents(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    lengths = rng.choice([0, 0, 1, 2, 5, 6, 7, 13, 40], size=rng.integers(2, 40))
    return [rng.integers(0, 256, length).tolist() for length in lengths]


def reference(documents: list[list[int]], T: int, pad_last: bool) -> list[dict]:
    """Token by token, with no arithmetic on offsets."""
    stream = [(token, d) for d, document in enumerate(documents) for token in [*document, EOD]]
    rows = []
    for start in range(0, len(stream) - 1, T):
        row = {"tokens": [], "targets": [], "segments": [], "positions": [], "weights": []}
        segment, position, before = 0, 0, None
        for (token, d), (target, target_d) in zip(stream[start : start + T], stream[start + 1 : start + T + 1]):
            segment, position = (segment, position + 1) if d == before else (segment + 1, 0)
            before = d
            for name, value in zip(row, (token, target, segment, position, float(d == target_d))):
                row[name].append(value)
        missing = T - len(row["tokens"])
        if missing and not pad_last:
            continue
        for name, column in row.items():
            column += missing * [EOD if name in ("tokens", "targets") else 0]
        rows.append(row)
    return rows


@pytest.mark.parametrize("T", [2, 7, *(pytest.param(T, marks=pytest.mark.slow) for T in (1, 6, 16))])
@pytest.mark.parametrize("pad_last", [False, True])
def test_rows_are_those_of_the_reference(T, pad_last):
    for seed in range(30):
        documents = [*random_documents(seed), [1] * T]
        rows, expected = PackedRows(tokens_of(documents), T, pad_last), reference(documents, T, pad_last)
        assert len(rows) == len(expected)
        for i, row in enumerate(expected):
            assert {name: column.tolist() for name, column in rows[i].items()} == row
            assert all(column.shape == (T,) for column in rows[i].values())
            assert [column.dtype for column in rows[i].values()] == [np.int32] * 4 + [np.float32]


def test_a_row_that_can_be_read_by_eye():
    row = PackedRows(tokens_of([[1, 2], [], [3, 4, 5]]), 6)[0]
    assert row["tokens"].tolist() == [1, 2, EOD, EOD, 3, 4]
    assert row["targets"].tolist() == [2, EOD, EOD, 3, 4, 5]
    assert row["segments"].tolist() == [1, 1, 1, 2, 3, 3]
    assert row["positions"].tolist() == [0, 1, 2, 0, 0, 1]
    assert row["weights"].tolist() == [1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("T", [1, 3, 8, 50, 10_000])
def test_every_eval_token_counts_exactly_once(T):
    for seed in range(10):
        documents = [list(range(100)), *random_documents(seed)]
        rows = PackedRows(tokens_of(documents), T, pad_last=True)
        chosen = [row["targets"][row["weights"] == 1] for row in map(rows.__getitem__, range(len(rows)))]
        assert np.concatenate(chosen).tolist() == [token for document in documents for token in [*document, EOD][1:]]


def test_rows_own_their_memory():
    tokens = tokens_of([[1, 2, 3, 4]])
    PackedRows(tokens, 2)[0]["tokens"][:] = 9
    assert tokens.read(0, 1)[0] == 1


def test_too_little_text_is_told():
    with pytest.raises(UserError, match="too short") as caught:
        PackedRows(tokens_of([[1, 2]]), 3)
    assert caught.value.key == "data.source"
    assert len(PackedRows(tokens_of([[1, 2]]), 3, pad_last=True)) == len(PackedRows(tokens_of([[1, 2]]), 2)) == 1
    with pytest.raises(UserError, match="too short"):
        PackedRows(tokens_of([[]]), 3, pad_last=True)


def test_there_is_no_row_behind_the_last():
    rows = PackedRows(tokens_of([[1] * 9]), 3)
    for i in (len(rows), -1):
        with pytest.raises(IndexError):
            rows[i]


@pytest.mark.parametrize("T", [1, 6, 16])
def test_several_rows_at_once_are_the_rows_one_by_one(T):
    for seed in range(10):
        rows = PackedRows(tokens_of([*random_documents(seed), [1] * T]), T, pad_last=True)
        numbers = np.random.default_rng(seed).integers(0, len(rows), 9).tolist() + [len(rows) - 1] * 2
        batch = rows.take(numbers)
        for name, column in batch.items():
            assert column.tolist() == [rows[i][name].tolist() for i in numbers] and column.flags.c_contiguous
        batch["tokens"][:] = -1  # an array is nobody else's memory
        assert (batch["targets"] != -1).all()
