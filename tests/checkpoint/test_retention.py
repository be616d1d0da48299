"""The checkpoints that are deleted, and those that never are."""

import contextlib
import json

import jax.numpy as jnp
import pytest

from jaxtrain.checkpoint import CheckpointManager, retention, step_folders, verify
from jaxtrain.checkpoint.manager import NotSaved
from jaxtrain.checkpoint.orbax.orbax_logging import innermost
from jaxtrain.checkpoint.retention import Retention, best_of, dispensable
from jaxtrain.observe.events import events
from tests.odd_files import ODD, in_time


def test_the_last_ones_stay():
    assert dispensable([10, 20, 30], [], keep=2) == [10]
    assert dispensable([10, 20, 30], [], keep=5) == []
    assert dispensable([], [], keep=1) == []


def test_only_good_ones_make_others_dispensable():
    assert dispensable([10], [20, 30, 40], keep=1) == []
    assert dispensable([10, 50], [20, 30, 60], keep=2) == []
    assert dispensable([30, 50], [20, 40, 60], keep=2) == [20]
    assert dispensable([10, 30, 50], [20, 40, 60], keep=2) == [10, 20]


def test_every_so_many_and_the_best_stay():
    good = list(range(10, 110, 10))
    assert dispensable(good, [], keep=1, keep_every=40, best=30) == [10, 20, 50, 60, 70, 90]


def test_best(tmp_path):
    lines = [{"step": 10, "loss": 1.0}, {"step": 10, "eval_loss": 3.0}, {"step": 15, "eval_loss": 0.0},
             {"step": 20, "eval_loss": None}, {"step": 30, "eval_loss": 2.0}, {"step": 100, "eval_loss": 2.0}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 30, "ev')
    assert best_of([10, 20, 30], tmp_path, "eval_loss") == 30
    assert best_of([10, 20, 30, 100], tmp_path, "eval_loss") == 100  # the newest of equals
    assert best_of([10, 20], tmp_path, "loss") == 10
    assert best_of([20], tmp_path, "eval_loss") is None
    assert best_of([10, 20, 30], tmp_path, "highest:eval_loss") == 10
    watched = tmp_path / "evaluations" / "metrics.jsonl"
    watched.parent.mkdir()
    watched.write_text('{"step": 20, "eval_choose_acc": 0.5}\n{"step": 30, "eval_choose_acc": 0.4}\n')
    assert best_of([10, 20, 30], tmp_path, "highest:eval_choose_acc") == 20
    assert best_of([10, 20, 30], tmp_path, "eval_loss") == 30


def test_a_metric_that_is_not_there_is_said_once(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "loss": 1.0}}\n' for n in range(9)))
    store = CheckpointManager(tmp_path / "c", best="accuracy")
    for step in (1, 2):
        store.save(step, {"w": jnp.ones(3)}, {})
        store.wait()
    store.close()
    assert capsys.readouterr().err.count("checkpoint.best: neither metrics.jsonl nor evaluations/metrics.jsonl ") == 1


@pytest.mark.parametrize("lines, said", [
    ([], 0), ([{"step": 3, "loss": 1.0}], 0), ([{"step": 2, "eval_loss": 1.0}], 0),  # that of step 3 is to come
    ([{"step": 3, "eval_perplexity": 1.0}], 1), ([{"step": 4, "eval_loss": 1.0}], 1),
    ([{"step": 3, "eval_loss": 1}], 0)])
def test_an_evaluation_that_is_to_come_is_not_missed(tmp_path, capsys, lines, said):
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = Retention(tmp_path / "c", 1, 0, "eval_loss")
    found.keeping([3])
    found.keeping([3, 6])
    assert capsys.readouterr().err.count("is that the name of a metric, and are checkpoints saved where") == said


def test_a_watcher_says_which_is_best(tmp_path):
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "evaluations" / "metrics.jsonl").write_text('{"step": 1, "eval_a": 2}\n{"step": 2, "eval_a": 1}\n')
    assert Retention(tmp_path / "c", 1, 0, "highest:eval_a").keeping([1, 2, 3]) == [1, 3]


def test_in_the_store(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "eval_loss": {abs(n - 3)}}}\n' for n in range(9)))
    store = CheckpointManager(tmp_path / "c", keep=1, keep_every=4, best="eval_loss")
    for step in range(1, 7):
        store.save(step, {"w": jnp.ones(3) * step}, {})
        store.wait()
    store.close()
    assert verify.steps(tmp_path / "c") == [3, 4, 6]


def test_one_that_fails_its_check_lets_nothing_go(tmp_path, monkeypatch, capfd):
    store = CheckpointManager(tmp_path / "c", keep=1)
    store.save(1, {"w": jnp.ones(3)}, {})
    store.wait()
    with monkeypatch.context() as patch:
        patch.setattr(verify, "compare_words", lambda saved, shares: ["array w has other content"])
        store.save(2, {"w": jnp.ones(3)}, {})
        with pytest.raises(NotSaved, match="array w has other content"):  # or a run would end without its last state
            store.wait()
        assert store.failed()
        patch.setattr(verify, "compare_words", lambda saved, shares: 1 / 0)
        store.save(3, {"w": jnp.ones(3)}, {})
        store.wait()
        assert not store.failed()
    assert verify.steps(tmp_path / "c") == [1, 3] and verify.good(tmp_path / "c", 1)
    assert [event["kind"] for event in events(tmp_path)] == ["checkpoint", "checkpoint_damaged",
                                                             "checkpoint_unverified"]
    assert capfd.readouterr().err.splitlines() == [
        f"checkpoint 2 is damaged (array w has other content); kept as {tmp_path}/c/2.damaged",
        "checkpoint 3 could not be read back (ZeroDivisionError: division by zero); the next start does it"]
    store.close()
    assert CheckpointManager(tmp_path / "c").newest() == 3


def test_new_good_ones_are_announced_before_old_ones_go(tmp_path):
    seen = []
    store = CheckpointManager(tmp_path / "c", keep=1)
    store.on_good.append(lambda step, path: seen.append((step, verify.steps(tmp_path / "c"), path.name)))
    for step in (1, 2):
        store.save(step, {"w": jnp.ones(3)}, {})
        store.wait()
    store.close()
    assert seen == [(1, [1], "1"), (2, [1, 2], "2")]
    assert retention.dispensable([1, 2], [], keep=1) == [1] and verify.steps(tmp_path / "c") == [2]


def test_one_that_was_taken_for_failed_and_is_whole_counts(tmp_path):
    """A network file system may rename a folder and report that it did not."""
    with CheckpointManager(tmp_path / "c") as store:
        store.save(1, {"w": jnp.ones(3)}, {})
        store.wait()
        store._failure = NotSaved(1, tmp_path / "c", "no answer")
        store.save(1, {"w": jnp.ones(3)}, {})
        assert not store.failed()


@pytest.mark.parametrize("error, said", [(TimeoutError(), "TimeoutError: no reason given"), (OSError("full"), "full"),
                                         (ValueError("one\ntwo"), "ValueError: one")])
def test_every_error_has_words(error, said):
    assert innermost(error) == said


@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
def test_without_metrics_nothing_is_the_best(tmp_path, make):
    make(tmp_path / "metrics.jsonl")
    retention = Retention(tmp_path / "checkpoints", 2, 0, "loss")
    assert in_time(lambda: retention.keeping([10, 20])) == [10, 20]


@pytest.mark.parametrize("line", ['{"step": 20, "loss": 1', '{"step": 20, ' + '"loss":[' * 100_000])
def test_a_damaged_line_names_no_best(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text('{"step": 10, "loss": 1.0}\n' + line + "\n")
    assert Retention(tmp_path / "checkpoints", 2, 0, "loss").keeping([10, 20]) == [10, 20]


def test_what_a_kill_between_renaming_and_deletion_left_is_no_checkpoint_and_is_deleted(tmp_path, monkeypatch):
    """By the next retention, and by the next start."""
    for step in (10, 20):
        (tmp_path / f"{step}").mkdir()
    with monkeypatch.context() as killed:
        killed.setattr(step_folders.shutil, "rmtree", lambda *_, **__: None)  # here the process is killed
        step_folders.delete(tmp_path / "20")
        (tmp_path / "20").mkdir()
        step_folders.delete(tmp_path / "20")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20.deleted", "20.deleted.2"]
    assert verify.steps(tmp_path) == [10]
    Retention(tmp_path, 2, 0, "").delete(lambda: [], lambda: [])
    assert [path.name for path in tmp_path.iterdir()] == ["10"]
    (tmp_path / "10").rename(tmp_path / "10.deleted")
    with contextlib.closing(CheckpointManager(tmp_path, keep=1)) as manager:
        assert manager.restore_newest({}) is None and list(tmp_path.iterdir()) == []
