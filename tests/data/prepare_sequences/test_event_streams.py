"""Tables of events: one sequence a user in the order of time, whatever the order of the rows and files."""

import datetime
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxtrain import storage
from jaxtrain.data.prepare_sequences.event_streams import Events
from jaxtrain.data.prepare_sequences.prepare_sequences import prepare_sequences
from jaxtrain.errors import UserError


def random_table(seed: int, rows: int = 800, users: int = 40) -> dict:
    rng = np.random.default_rng(seed)
    return {"user": [f"u{u}" for u in rng.integers(0, users, rows)], "at": rng.integers(0, 5000, rows),
            "item": [f"i{k}" for k in rng.zipf(1.5, rows) % 50], "price": rng.normal(size=rows).astype("f4")}


def write(folder, table: dict, files: int = 3, row_group_size: int = 70) -> str:
    folder.mkdir(exist_ok=True)
    size = len(table["user"])
    for i, part in enumerate(np.array_split(np.arange(size), files)):
        columns = {name: [column[k] for k in part] for name, column in table.items()}
        pq.write_table(pa.table(columns), folder / f"{i}.parquet", row_group_size=row_group_size)
    return str(folder)


def by_hand(table: dict, ids: dict[str, int]) -> list[list[tuple]]:
    """Row by row: equal times stay in the order of the input."""
    users: dict[str, list[tuple]] = {}
    for user, at, item, price in zip(*(table[name] for name in ("user", "at", "item", "price"))):
        users.setdefault(user, []).append((int(at), ids.get(item, 0), float(price)))
    sorted_by_time = [sorted(events, key=lambda event: event[0]) for events in users.values()]
    return sorted([(item, price, float(at - before)) for (at, item, price), (before, *_) in
                   zip(events, [events[0], *events])] for events in sorted_by_time)


def rows(split) -> list[list[tuple]]:
    return [[*zip(row["item"].tolist(), row["price"].tolist(), row["elapsed"].tolist())] for row in split]


EVENTS = Events("user", "at", ("item",), ("price",), eval_fraction=0.2)


@pytest.mark.parametrize("task_bytes", [2**26, 3000])
@pytest.mark.parametrize("vocab_size", [1000, 8])
def test_users_have_their_events_in_the_order_of_time(tmp_path, task_bytes, vocab_size):
    table = random_table(0)
    source = Events("user", "at", ("item",), ("price",), vocab_size, 0.2, task_bytes)
    corpus = prepare_sequences([write(tmp_path / "in", table)], tmp_path / "out", source)
    vocabulary = corpus.manifest["vocabularies"]["item"]
    counts = {item: table["item"].count(item) for item in table["item"]}
    ranked = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[: vocab_size - 1]
    assert [*zip(vocabulary["values"], vocabulary["counts"])] == ranked
    ids = {item: id for id, (item, _) in enumerate(ranked, start=1)}
    assert sorted(rows(corpus.train) + rows(corpus.eval)) == by_hand(table, ids)
    assert (len(corpus.train.shards) > 3) == (task_bytes == 3000)
    assert 3 <= len(corpus.eval) <= 16


def test_the_order_of_rows_in_the_input_does_not_matter(tmp_path):
    table = random_table(1)
    table["at"] = np.arange(800)  # no two at once
    order = np.random.default_rng(2).permutation(800)
    turned = {name: [column[k] for k in order] for name, column in table.items()}
    one = prepare_sequences([write(tmp_path / "a", table)], tmp_path / "out", EVENTS)
    other = prepare_sequences([write(tmp_path / "b", turned, files=2)], tmp_path / "turned", EVENTS)
    assert rows(one.train) == rows(other.train) and rows(one.eval) == rows(other.eval)


def test_origins_lead_back_to_the_first_event(tmp_path):
    table = random_table(3, rows=200)
    source = Events("user", "at", ("item",), eval_fraction=0, task_bytes=2000)
    corpus = prepare_sequences([write(tmp_path / "in", table, row_group_size=30)], tmp_path / "out", source)
    pieces = [piece for task in corpus.manifest["inputs"] for piece in task]
    vocabulary = corpus.manifest["vocabularies"]["item"]["values"]
    at = 0
    for entry in corpus.manifest["splits"]["train"]["shards"]:
        for origin in np.load(corpus.path / f"{entry['name']}.origins.npy"):
            piece = pieces[origin["piece"]]
            group = pq.ParquetFile(tmp_path / "in" / piece["name"]).read_row_group(piece["start"])
            assert group["item"][int(origin["place"])].as_py() == vocabulary[corpus.train[at]["item"][0] - 1]
            at += 1
    assert at == len(corpus.train)


def test_dates_become_seconds(tmp_path):
    start = datetime.datetime(2024, 2, 28, 23, tzinfo=datetime.UTC)
    times = [start + datetime.timedelta(seconds=s) for s in (7200.25, 0, 86_400)]
    for type in (pa.timestamp("us", "UTC"), pa.timestamp("ns"), pa.timestamp("ms")):
        pq.write_table(pa.table({"user": [1, 1, 1], "at": pa.array(times, pa.timestamp("us", "UTC")).cast(type)}),
                       tmp_path / "a.parquet")
        corpus = prepare_sequences([str(tmp_path / "a.parquet")], tmp_path / str(type), Events("user", "at",
                                                                                              eval_fraction=0))
        assert corpus.train[0]["elapsed"].tolist() == [0, 7200.25, 79_199.75]


def test_missing_values(tmp_path):
    table = {"user": ["a", None, "a", "b", "a"], "at": [3.0, 1.0, float("nan"), None, 1.0],
             "item": [None, "x", "y", "y", "z"]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    corpus = prepare_sequences([str(tmp_path / "a.parquet")], tmp_path / "out",
                               Events("user", "at", ("item",), eval_fraction=0))
    assert corpus.manifest["left_out"] == {"an event without user": 1, "an event without time": 2}
    assert corpus.manifest["vocabularies"]["item"]["values"] == ["z"]  # what is dropped is not counted
    assert [row["item"].tolist() for row in corpus.train] == [[1, 0]]


def killed(at):
    """Return a `say` that raises at the first line like this."""
    def say(line):
        if re.match(at, line):
            raise ZeroDivisionError
    return say


def test_a_changed_input_is_read_again(tmp_path):
    table = random_table(4)
    with pytest.raises(ZeroDivisionError):
        prepare_sequences([write(tmp_path / "in", table)], tmp_path / "out", EVENTS,
                          say=killed(r"sequences: (\d+) of \1 "))  # before the manifest
    table["item"] = [item.replace("i", "j") for item in table["item"]]  # of the same size
    corpus = prepare_sequences([write(tmp_path / "in", table)], tmp_path / "out", EVENTS)
    assert {item[0] for item in corpus.manifest["vocabularies"]["item"]["values"]} == {"j"}
    fresh = prepare_sequences([str(tmp_path / "in")], tmp_path / "fresh", EVENTS)
    assert rows(corpus.train) == rows(fresh.train)


def test_what_was_spread_before_a_kill_is_not_read_again(tmp_path):
    source, said = write(tmp_path / "in", random_table(5)), []
    with pytest.raises(ZeroDivisionError):
        prepare_sequences([source], tmp_path / "out", EVENTS, say=killed("sequences: 0 of"))
    assert len(prepare_sequences([source], tmp_path / "out", EVENTS, say=said.append).train) > 20
    assert not [line for line in said if line.startswith("spread")]


@pytest.mark.parametrize(("options", "table", "reason"), [
    ({"user": "who"}, {}, "no column 'who'; it has user, at"), ({"time": "item"}, {}, "has a string there"),
    ({"numbers": ("item",)}, {}, "'item' of 0.parquet cannot be used"),
    ({"numbers": ("price",)}, {"price": [float("nan")] * 800}, "without a finite 'price'"),
    ({"numbers": ("price",)}, {"price": [None] * 799 + [1.0]}, "without a finite 'price'"),
    ({"categories": ("elapsed",)}, {}, "two columns"), ({"categories": ("a/b",)}, {}, "cannot be called 'a/b'"),
    ({"vocab_size": 1}, {}, "no id for any value")])
def test_mistakes_are_told(tmp_path, options, table, reason):
    source = write(tmp_path / "in", random_table(0) | table, files=1)
    with pytest.raises(UserError, match=reason) as caught:
        prepare_sequences([source], tmp_path / "out", Events(**{"user": "user", "time": "at"} | options))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_broken_is_named(tmp_path):
    path = tmp_path / "in/0.parquet"
    source = write(tmp_path / "in", random_table(0), files=1, row_group_size=800)
    content = bytearray(path.read_bytes())
    content[4: len(content) // 2] = bytes(len(content) // 2 - 4)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"0\.parquet cannot be read"):
        prepare_sequences([source], tmp_path / "out", EVENTS)


def test_times_of_two_kinds_are_refused(tmp_path):
    pq.write_table(pa.table({"user": [1], "at": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"user": [1], "at": [1.5]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"an integer in a.parquet and a number in b.parquet"):
        prepare_sequences([str(tmp_path)], tmp_path / "out", Events("user", "at"))
    (tmp_path / "none").mkdir()
    (tmp_path / "none/a.txt").write_text("text")
    with pytest.raises(UserError, match="no rows of Parquet"):
        prepare_sequences([str(tmp_path / "none")], tmp_path / "out", Events("user", "at"))


def test_tables_may_lie_behind_a_url_among_other_files(tmp_path):
    source = write(tmp_path / "in", random_table(6))
    (tmp_path / "in/rest.bin").write_bytes(b"1234")
    for path in (tmp_path / "in").iterdir():
        storage.put(path, f"memory://events/{path.name}")
    here, there = (prepare_sequences([where], tmp_path / name, EVENTS)
                   for name, where in (("here", source), ("there", "memory://events")))
    assert here.manifest_hash == there.manifest_hash and len(there.train) > 20


def test_a_table_without_a_usable_row_takes_nothing_from_the_others(tmp_path):
    source = write(tmp_path / "in", random_table(7))
    want = prepare_sequences([source], tmp_path / "want", EVENTS)
    empty = pa.table({"user": pa.array([], pa.string()), "at": pa.array([], pa.int64()),
                      "item": pa.array([], pa.string()), "price": pa.array([], pa.float32())})
    nobody = pa.table({"user": pa.array([None, None], pa.string()), "at": [1, 2], "item": ["a", "b"],
                       "price": pa.array([1, 2], pa.float32())})
    for i, table in enumerate((empty, nobody)):
        pq.write_table(table, tmp_path / f"in/more{i}.parquet")
    corpus = prepare_sequences([source], tmp_path / "out", EVENTS)
    assert rows(corpus.train) == rows(want.train) and rows(corpus.eval) == rows(want.eval)
    assert corpus.manifest["left_out"] == {"an event without user": 2}
