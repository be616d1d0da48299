"""Answers of earlier states, rewarded beside the steps: which state answers, what a run that goes on reads, and errors.

The quick tests give `Rollouts` a generator that writes the step of the state into the answers.
"""

import json
import shutil
import threading

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.hub.generate import Generated
from jaxtrain.main import main
from jaxtrain.tuning import pending_rewards, rollouts
from jaxtrain.tuning.answers import own_mesh
from jaxtrain.tuning.pending_rewards import PendingRewards
from jaxtrain.tuning.scorers import Scorers
from tests.tiers import exhaustive, slow
from tests.trainer.test_multiprocess import ROOT, ended, two_processes
from tests.tuning.test_rollouts import config, files, on_four  # noqa: F401

pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once

@pytest.fixture(scope="module")
def built(files):  # noqa: F811
    """Runs by their keys: building one takes longer than what is tested of it."""
    found = {}

    def build(**keys):
        name = json.dumps(keys)
        if name not in found:
            found[name] = jt.build(config(files, **keys))
        return found[name]

    return build


@pytest.fixture
def answers(monkeypatch):
    """Have states be numbers: each answer is the number of the state and of the call, and its reward the first."""
    made = []

    def generate(run, state, prompts, *, seed, **_):
        made.append((state, seed))
        return [Generated(f"{state}", (97 + state, 98 + n % 2), (-1.0, -2.0), "length") for n in range(len(prompts))]

    monkeypatch.setattr(own_mesh, "generate", generate)
    return made


def begun(run, folder=None, score=lambda answer, record: float(answer) + record["number"] / 8):
    """The data of a run that begins, with this reward."""
    data = run.data
    return rollouts.Rollouts(run, data.records, Scorers(("score",), (score,)), data.tokenizer, folder)


def trained(data, start, stop):
    """The batches of these steps, and the state that answered for each."""
    found = []
    for step in range(start, stop):
        data.see(step, step)
        batch = data[step]
        found.append((int(batch["targets"][0][np.flatnonzero(batch["weights"][0])[0]]) - 97, batch))
        assert data.pop_fields()["staleness"] == step - found[-1][0]
    return found


@pytest.mark.parametrize(("staleness", "reuse", "states"), [
    (0, 1, [0, 1, 2, 3, 4, 5]), (2, 1, [0, 0, 0, 1, 2, 3]), (3, 2, [0, 0, 0, 0, 1, 1]),
    *slow((1, 2, [0, 0, 1, 1, 3, 3])), *exhaustive((1, 1, [0, 0, 1, 2, 3, 4]), (0, 2, [0, 0, 2, 2, 4, 4]))])
def test_the_state_before_so_many_steps_answers(built, answers, staleness, reuse, states):
    found = trained(begun(built(rl__staleness=staleness, rl__reuse=reuse)), 0, 6)
    assert [state for state, _ in found] == states
    plain = begun(built(rl__reuse=reuse))  # the answers to the prompts of the same steps, at once
    for step, (state, batch) in enumerate(found):
        plain.forget()
        plain.see(step - step % reuse, state)
        for name, column in plain[step - step % reuse].items():
            np.testing.assert_array_equal(batch[name], column, err_msg=name)


# What a run of staleness 2 that was killed after the save of step 3 may have left of the answers after that step.
@pytest.mark.parametrize("left", ["read", "scored", "answered", "nothing of later states", "all of a longer run"])
@pytest.mark.parametrize("reuse", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_run_that_goes_on_reads_what_earlier_states_answered(built, answers, tmp_path, left, reuse):
    run = built(rl__staleness=2, rl__reuse=reuse)
    whole = trained(begun(run, tmp_path), 0, 6)
    kept = {path: path.read_text() for path in sorted(tmp_path.iterdir())}
    for path in [] if left.startswith("all") else kept:
        begin = int(path.stem) - 1
        if left.startswith("nothing") and begin >= 5:
            path.unlink()
        elif (left == "answered" and begin >= 3) or (left == "scored" and begin > 3):
            path.write_text("".join(json.dumps({key: value for key, value in json.loads(line).items()
                                                if key != "reward"}) + "\n" for line in kept[path].splitlines()))
    answers.clear()
    again = trained(begun(run, tmp_path), 3, 6)
    assert not [state for state, _ in answers if state < 3]
    for (state, batch), (_, wanted) in zip(again, whole[3:], strict=True):
        for name, column in wanted.items():
            np.testing.assert_array_equal(batch[name], column, err_msg=f"{name} of state {state}")
    assert {path: path.read_text() for path in tmp_path.iterdir()} == kept


def test_what_is_missing_or_damaged(built, answers, tmp_path, capsys):
    run, folder = built(rl__staleness=2), tmp_path / "rollouts"
    trained(begun(run, folder), 0, 4)
    text = (folder / "6.jsonl").read_text()
    for content, message in (("{\n", "is not as the run wrote it ("),
                             ("\n".join(text.split("\n")[1:]), "has 7 answers"),
                             (text.replace('"say', '"tell', 1), "has answers to other prompts")):
        (folder / "6.jsonl").write_text(content)
        with pytest.raises(jt.UserError, match=r"rl: .*/6\.jsonl") as refusal:
            trained(begun(run, folder), 4, 5)
        assert message in str(refusal.value) and "bring it back, or delete it: the model that goes on answers" in str(
            refusal.value)
    assert capsys.readouterr().err == ""
    shutil.rmtree(folder)
    assert [state for state, _ in trained(begun(run, folder), 4, 8)] == [4, 4, 4, 5]
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in told] == ["rollouts_missing"] * 2
    assert "5.jsonl is missing: the model of step 4 answers in place of that of step 2" in capsys.readouterr().err
    with pytest.raises(jt.UserError, match=r"batch: that of step 4 is made of the model's answers at step 2; call"):
        trained(begun(run), 4, 5)


def test_steps_go_on_while_a_reward_is_outstanding(built, answers):
    """The scorer returns nothing before two steps more were made than without staleness."""
    run, may, asked = built(rl__staleness=2), threading.Event(), []

    def score(answer, record):
        asked.append(threading.current_thread().name)
        assert answer != "1" or may.wait(60)
        return float(answer)

    data = begun(run, score=score)
    trained(data, 0, 3)  # those of state 1 are for step 3
    assert not may.is_set() and {state for state, _ in answers} == {0, 1, 2}
    may.set()
    data.see(3, 3)
    assert data[3]["rewards"].max() == 1 and {*asked} == {"rewards"}
    assert {"reward_s", "scorer_s", "rollout_s", "rollout_tokens_per_s"} <= data.pop_fields().keys()


def test_an_error_of_the_reward_comes_at_the_step_that_needs_it(built, answers):
    data = begun(built(rl__staleness=1), score=lambda answer, record: {"0": 1.0}[answer])
    trained(data, 0, 2)
    data.see(2, 2)
    with pytest.raises(jt.UserError, match=r"rl.reward: it fails on the answer '1' \(KeyError: '1'\); let it"):
        data[2]
    quits = PendingRewards(lambda answers, records: exit(3))
    quits.ask(0, [], [])
    with pytest.raises(SystemExit):
        quits.collect(0, [], [])


def test_forgetting_drops_what_waits_and_leaves_a_scorer_that_does_not_return(monkeypatch):
    monkeypatch.setattr(pending_rewards, "PATIENCE_S", 0.01)
    began, may, scored = threading.Event(), threading.Event(), []

    def score(answers, records):
        began.set()
        assert may.wait(60)
        scored.append(answers)
        return [1.0]

    pending = PendingRewards(score)
    pending.ask(0, ["a"], [{}])
    pending.ask(1, ["b"], [{}])
    left, = pending._threads
    assert left.daemon and began.wait(60)
    pending.forget()
    may.set()
    left.join(60)
    assert scored == [["a"]] and not left.is_alive()
    assert pending.collect(1, ["c"], [{}])[0] == [1.0] and scored == [["a"], ["c"]]  # asked anew, on this thread


def test_a_function_is_not_called_while_a_thread_that_was_left_behind_is_in_it(monkeypatch):
    monkeypatch.setattr(pending_rewards, "PATIENCE_S", 0.01)
    began, may, scored = threading.Event(), threading.Event(), []

    def reward(answer, record):
        began.set()
        assert answer == "new" or may.wait(60)
        scored.append(answer)
        return 1.0

    pending = PendingRewards(Scorers(("reward",), (reward,)).asked)
    pending.ask(0, ["old", "old too"], [{}, {}])
    assert began.wait(60)
    pending.forget()
    pending.ask(1, ["new"], [{}])
    threading.Timer(0.05, may.set).start()
    assert pending.collect(1, [], [])[0] == [[1.0]] and scored == ["old", "old too", "new"]


def test_answers_behind_the_last_step_are_kept_and_not_scored(built, answers, tmp_path):
    """A run that is given more steps reads them."""
    trained(begun(built(rl__staleness=2, train__steps=4), tmp_path), 0, 4)
    rewarded = {int(path.stem): '"reward"' in path.read_text() for path in tmp_path.iterdir()}
    assert rewarded == {1: True, 2: True, 3: True, 4: True, 5: False, 6: False}
    trained(begun(built(rl__staleness=2), tmp_path), 4, 6)
    assert '"reward"' in (tmp_path / "6.jsonl").read_text()


def test_several_threads_score_the_answers_of_several_steps_at_once():
    together = threading.Barrier(2, timeout=60)
    pending = PendingRewards(lambda answers, records: [float(together.wait() >= 0)], 2)
    pending.ask(0, [], [])
    pending.ask(1, [], [])
    assert pending.collect(0, [], [])[0] == pending.collect(1, [], [])[0] == [1.0]
    pending.forget()


@pytest.mark.slow
def test_training_equals_steps_on_answers_of_earlier_states_and_goes_on(files, tmp_path):  # noqa: F811
    keys = dict(train__steps=6, checkpoint__every=3, optimizer__learning_rate=3e-3, rl__kl=0.01)
    run = jt.build(config(files, **keys))  # makes answers without staleness, and is told them by hand
    state, batches = run.init(), {}
    for step in range(6):
        for later in [0, 1, 2] if step == 0 else [step + 2]:
            run.data.forget()
            run.see(later, state)
            batches[later] = run.data[later]
        state, metrics = run.step(state, batches[step])
    whole = jt.train(config(files, **keys, rl__staleness=2), tmp_path / "whole")
    assert jax.tree.all(jax.tree.map(np.array_equal, *map(jax.device_get, (whole, state))))
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [line["staleness"] for line in lines] == [0, 1, 2, 2, 2, 2]
    assert [line["kl_sampled"] > 1e-9 for line in lines] == [False] + [True] * 5
    assert lines[-1]["kl_sampled"] == float(metrics["kl_sampled"])
    assert {"rollout_s", "reward_s", "scorer_s", "rollout_tokens_per_s"} <= lines[-1].keys()
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "6")
    for path in (tmp_path / "parts" / "rollouts").iterdir():
        if int(path.stem) > 5:  # of states after step 3
            path.unlink()
    parts = jt.train(config(files, **keys, rl__staleness=2), tmp_path / "parts")
    assert jax.tree.all(jax.tree.map(np.array_equal, *map(jax.device_get, (whole, parts))))
    with pytest.raises(jt.UserError, match=r"--workdir: .* holds a run with rl.staleness=2, this config has 1"):
        jt.train(config(files, **keys, rl__staleness=1), tmp_path / "parts")


@pytest.mark.parametrize("begins", [*exhaustive("with one process", "with two")])
def test_two_processes_go_on_as_one_does_and_one_of_them_asks(files, tmp_path, begins):  # noqa: F811
    (tmp_path / "reward.py").write_text(f"""
import os
def of(answer, record):
    with open({str(tmp_path / "asked")!r}, "a") as file:
        print(os.getpid(), file=file)
    return len(answer) % 3 + 0.1 * record["number"]
""")
    keys = {"model.num_layers": 1, "model.embed_dim": 32, "model.max_seq_len": 32, "data.seq_len": 20, "train.steps": 4,
            "data.global_batch_size": 8, "train.eval_every": 0, "checkpoint.every": 2, "mesh.data": 1, "mesh.fsdp": 2,
            "mesh.tensor": 2, "rl.group_size": 4, "rl.max_new_tokens": 6, "rl.staleness": 1,
            "rl.gather_weights": True, "rl.prompts": files / "prompts.jsonl",
            "rl.reward": f"{tmp_path / 'reward.py'}:of"}
    flags = [f"--config={ROOT}/configs/gpt.py:tiny", *(f"--config.{key}={value}" for key, value in keys.items())]
    assert main([*flags, f"--workdir={tmp_path / 'one'}"]) == 0

    def both(asked):
        """Start them; so many answers were scored since they were asked first, by one process in each start."""
        with two_processes(flags, tmp_path / "two", devices=2) as started:
            said = ended(started)
        assert [process.returncode for process in started] == [0, 0], said
        lines = (tmp_path / "asked").read_text().split()
        assert len(lines) == asked and len({*lines}) == (1 if asked == 32 else 2)
        for path in (tmp_path / "one" / "rollouts").iterdir():
            ours, theirs = ([json.loads(line) for line in file.read_text().splitlines()]
                            for file in (tmp_path / "two" / "rollouts" / path.name, path))
            assert [(line["tokens"], line.get("reward")) for line in ours] == [
                (line["tokens"], line.get("reward")) for line in theirs]

    if begins == "with two":
        (tmp_path / "asked").unlink()
        both(asked=32)
    else:
        shutil.copytree(tmp_path / "one", tmp_path / "two")
    # From step 2 on, whose answers are kept without rewards.
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "4")
    path = tmp_path / "two" / "rollouts" / "3.jsonl"
    path.write_text("".join(json.dumps({key: value for key, value in json.loads(line).items() if key != "reward"})
                            + "\n" for line in path.read_text().splitlines()))
    both(asked=32 + 16)
