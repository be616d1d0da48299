"""Early stopping: when a run ends because its evaluations find nothing better."""

import json
from types import SimpleNamespace

import pytest

from jaxtrain.errors import UserError
from jaxtrain.trainer.early_stop import Patience, _evaluations, check


def patience(tmp_path, losses, most=2, steps=100, start=None):
    """Return the patience of a run with an evaluation after every ten steps."""
    lines = [line for n, loss in enumerate(losses) for line in (
        {"step": 10 * n + 10, "loss": 0.1}, {"step": 10 * n + 10, "eval_bits_per_byte": 1.0, "eval_loss": loss})]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(patience=most, steps=steps)))
    return Patience(run, tmp_path, 10 * len(losses) if start is None else start)


@pytest.mark.parametrize("losses, over", [
    ([], False), ([3.0], False), ([3.0, 4.0], False), ([3.0, 4.0, 3.5], True), ([3.0, 4.0, 2.5], False),
    ([3.0, 3.0, 3.0], True),  # as low is not lower
    ([3.0, 2.0, 4.0], False), ([3.0, 2.0, 4.0, 2.0], True), ([None, None, None], True), ([None, 5.0, None], False),
    ([1.0, 2.0, 0.5, 0.6, 0.4, 0.41], False)])
def test_so_many_evaluations_in_a_row_without_a_lower_loss_end_a_run(tmp_path, losses, over):
    found = patience(tmp_path, losses)
    assert found.over == over
    told = patience(tmp_path, [])  # in one process, without a restart in between
    for n, loss in enumerate(losses):
        told.see(10 * n + 10, {"eval_loss": float("nan") if loss is None else loss})
    assert told.over == over


def test_what_does_not_count(tmp_path):
    worse = [3.0, 4.0, 5.0, 6.0]
    assert not patience(tmp_path, worse, most=0).over and not patience(tmp_path, worse, most=4).over
    assert not patience(tmp_path, worse, steps=40).over  # it has reached its last step
    assert not patience(tmp_path, worse, start=20).over  # the later lines are taken back
    log = tmp_path / "metrics.jsonl"
    damaged = b'{"step": 10, "eval_loss"\n\xff "eval_loss"\n{"eval_loss": 1.0}\n{"step": 10, "eval_loss": "low"}\n'
    log.write_bytes(damaged + log.read_bytes())
    assert _evaluations(tmp_path, 40) == [(10, None), *((10 * n + 10, loss) for n, loss in enumerate(worse))]
    log.unlink()
    assert _evaluations(tmp_path, 40) == []


def test_the_reason(tmp_path):
    found = patience(tmp_path, [3.0, 2.5, 4.0, 4.0])
    checkpoints = SimpleNamespace(steps=lambda: [20, 40])
    assert found.reason(checkpoints) == (
        "stopped early at step 40 of 100, by train.patience=2: 2 evaluations in a row found no lower eval_loss than "
        f"2.5000, that of step 20, whose checkpoint is {tmp_path}/checkpoints/20; to train on, add "
        "--config.train.patience=4, or 0 to train to the last step")
    assert patience(tmp_path, [3.0]).reason(checkpoints) == ""


def test_a_run_without_evaluations_is_refused():
    run = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(patience=1)), eval_batches=None)
    with pytest.raises(UserError, match=r"^train\.patience: the data have no evaluation split"):
        check(run)
