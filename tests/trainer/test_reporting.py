"""The report of a run when it begins and ends."""

import json
from types import SimpleNamespace

import jax
import pytest

from jaxtrain.observe.goodput import Incarnation, account
from jaxtrain.trainer.reporting import end_of_run, many_epochs


def make_run(steps=10, own=False, text=True, epochs=None, warmup=0, data=None, reward_head=False):
    return SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(steps=steps, sample_tokens=0), model=SimpleNamespace(text=text),
                               optimizer=SimpleNamespace(warmup_steps=warmup),
                               preference=SimpleNamespace(reward_head=reward_head)),
        mesh=SimpleNamespace(size=16), own=own, data=data,
        batch_source=SimpleNamespace(epochs=lambda step: epochs or {}))


@pytest.fixture
def session(tmp_path):
    life = account([Incarnation(0.0, {"init": 600.0, "step": 3000.0}, "", 0, (10, 3000.0), 10)])
    lines = [{"step": 9, "loss": 9.0}, {"step": 9, "eval_loss": 9.5}, {"step": 10, "loss": 1.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return SimpleNamespace(ledger=SimpleNamespace(account=lambda: life), workdir=tmp_path, epochs=0)


@pytest.mark.parametrize(("kind", "cost"), [
    ("NVIDIA H100 80GB HBM3", ["the run has cost about $48.00 for 1.00 h at $48.00 an hour"]), ("cpu", [])])
def test_the_end_says_losses_checkpoint_and_commands_and_on_devices_that_have_a_price_the_cost(
        monkeypatch, session, kind, cost):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
    workdir = session.workdir
    done = [*cost, f"done: step 10, loss 1.2500, evaluation loss 9.5000; checkpoint {workdir}/checkpoints/10",
            f"next: jaxtrain report {workdir}"]
    assert end_of_run(make_run(own=True), session, None, (5, 10), {}).splitlines() == done
    assert end_of_run(make_run(text=False), session, None, (5, 10), {}).splitlines() == done
    assert end_of_run(make_run(), session, None, (5, 10), {}).splitlines() == [
        *done, f"      jaxtrain generate {workdir} --prompt=...", f"      jaxtrain export {workdir} --output=FOLDER"]


def test_the_end_of_a_reward_model_suggests_no_command_that_generates(session):
    said = end_of_run(make_run(reward_head=True), session, None, (5, 10), {})
    assert "jaxtrain export" in said and "generate" not in said


def test_a_last_loss_that_is_not_finite_is_said_to_be_so(session):
    with (session.workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "loss": null}\n')
    said = end_of_run(make_run(), session, None, (5, 10), {})
    assert "done: step 10, loss not finite, evaluation loss 9.5000;" in said


def test_a_finished_run_says_how_to_train_longer(session):
    assert end_of_run(make_run(), session, None, (10, 10), {}) == (
        f"nothing to do: {session.workdir} has all 10 steps; to train longer, add --config.train.steps=20 "
        "--may_change=train.steps")
    said = end_of_run(make_run(warmup=1), session, None, (10, 10), {})  # which may have been given as a fraction
    assert said.endswith(" --config.train.steps=20 --may_change=train.steps,optimizer.warmup_steps")
    session.epochs = 1.5
    assert end_of_run(make_run(), session, None, (10, 10), {}).endswith(
        "; to train longer, give --config.train.epochs=3 in place of 1.5, with --may_change=train.steps")


def test_the_end_of_a_run_that_stopped_early_says_where_and_why(monkeypatch, session):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="cpu")])
    said = end_of_run(make_run(own=True), session, None, (5, 8), {}, "stopped early, so").splitlines()
    assert said[0] == "stopped early, so" and said[1].endswith(f"; checkpoint {session.workdir}/checkpoints/8")
    assert end_of_run(make_run(), session, None, (8, 8), {}, "stopped early, so") == (
        f"nothing to do: {session.workdir} stopped early, so")


@pytest.mark.parametrize(("epochs", "sources"), [
    ({}, []), ({"": 20.0}, []), ({"": 126.4}, ["126 epochs over the data;"]),
    ({"a": 3.0, "b": 21.5}, ["22 epochs over b;"])])
def test_many_epochs_are_warned_of(epochs, sources):
    said = many_epochs(make_run(epochs=epochs))
    assert len(said) == len(sources) and all(
        line.startswith(f"warning: 10 steps are {source}") for line, source in zip(said, sources, strict=True))


@pytest.mark.parametrize("run", [{"data": "answers to prompts"}, {"text": False}])
def test_many_epochs_of_prompts_or_images_are_usual(run):
    assert many_epochs(make_run(epochs={"": 90.0}, **run)) == []
