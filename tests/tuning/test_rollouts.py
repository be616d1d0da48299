"""Answers as batches: what rows hold, that the sampler's probabilities are the trainer's, and runs that go on."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.hub.generate import Generated
from jaxtrain.tuning import own_answers, rollouts
from jaxtrain.tuning.answers import own_mesh
from tests.numerics import reference
from tests.tiers import exhaustive, slow
from tests.tiny import devices

pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once
REWARD = '''
def even(answer, record):
    assert record["prompt"].startswith("say")
    return sum(map(ord, answer)) % 2 + 0.1 * record["number"]

def nan(answer, record):
    return float("nan")

def big(answer, record):
    return 1e300

def fails(answer, record):
    return {}[answer]
'''


@pytest.fixture(scope="module", autouse=True)
def on_four():
    """All runs of a module's own process have four devices, with which they take less time than with eight."""
    with devices(4):
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "reward.py").write_text(REWARD)
    lines = [{"prompt": f"say {'x' * (n % 3)}{n}:", "number": n} for n in range(5)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def config(files, reward="even", **keys):
    return reference.tiny("llama", **(dict(
        model__vocab_size=264, model__max_seq_len=32, data__seq_len=20, data__global_batch_size=8, mesh__data=2,
        mesh__tensor=2, train__steps=6, train__progress=False, optimizer__warmup_steps=0, checkpoint__every=3,
        rl__prompts=str(files / "prompts.jsonl"), rl__reward=f"{files / 'reward.py'}:{reward}",
        rl__group_size=4, rl__max_new_tokens=6) | keys))


@pytest.mark.slow
def test_rows_hold_answers_behind_their_prompts_as_the_policy_sampled_them(files):
    run = jt.build(config(files, rl__temperature=0.7))
    state = run.init()
    with pytest.raises(jt.UserError, match=r"batch: that of step 3 is made of the model's answers at step 3; call"):
        run.data[3]
    run.see(3, state)
    batch = run.data[3]
    assert all(column.shape == (8, 20) for column in batch.values())
    module, scores = run.module(state), []
    for row in range(8):
        one = {name: column[row] for name, column in batch.items()}
        learnt, size = np.flatnonzero(one["weights"]), int(one["segments"].sum())
        first = learnt[0]
        prompt, answer = one["tokens"][:first + 1].tolist(), one["targets"][learnt].tolist()
        text = bytes(prompt).decode()
        assert text == run.data.records[int(text.strip("say: x"))]["prompt"]
        assert learnt.tolist() == list(range(first, size)) and one["tokens"][:size].tolist() == (prompt + answer)[:-1]
        assert len(answer) == 6 or answer[-1] == run.data.tokenizer.eod
        logits = np.asarray(jax.nn.log_softmax(module(one["tokens"][None, :size])[0] / 0.7))
        np.testing.assert_allclose(one["sampled"][learnt], logits[learnt, answer], rtol=1e-4, atol=1e-5)
        assert np.flatnonzero(one["answers"]).tolist() == [first] and not one["sampled"][one["weights"] == 0].any()
        said = run.data.tokenizer.decode([id for id in answer if id != run.data.tokenizer.eod])
        reward = sum(map(ord, said)) % 2 + 0.1 * int(text.strip("say: x"))
        assert one["rewards"][first] == pytest.approx(reward)
        assert len(set(one["advantages"][learnt].tolist())) == 1
        scores.append((reward, one["advantages"][first]))
    for group in (scores[:4], scores[4:]):
        rewards = np.array([reward for reward, _ in group])
        want = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        np.testing.assert_allclose([advantage for _, advantage in group], want, rtol=1e-5, atol=1e-6)
    assert any(advantage for _, advantage in scores)
    # The ratio of the policy that sampled is 1.
    _, metrics = run.step(state, run.batch(3))
    assert float(metrics["kl_sampled"]) < 1e-9 and float(metrics["clipped"]) == 0


def test_the_config_of_fine_tuning_is_one_of_rollouts(files):
    """Its packing and its evaluations, which are of a corpus, stop nothing: there are none."""
    keys = {f"rl.{name}": f"{files}/{of}" for name, of in (("prompts", "prompts.jsonl"),
                                                                  ("reward", "reward.py:even"))}
    keys["rl.max_new_tokens"] = 4
    run = jt.build(jt.load_config(Path(__file__).parents[2] / "configs/finetune.py", keys))
    assert run.config.data.packing == "best_fit" and run.config.train.eval_every and run.eval_batches is None


@pytest.mark.parametrize(("masks", "reason", "learns"), [
    (True, "length", False), (True, "stop", True), (False, "length", True)])
def test_answers_that_are_cut_off_can_be_left_out_of_the_loss(masks, reason, learns):
    own = SimpleNamespace(mask_truncated=masks, seq_len=8)
    own.is_left_out = partial(rollouts.Rollouts.is_left_out, own)
    row = rollouts.Rollouts._row(own, [5, 6], Generated(
        "", (7, 8), (-1.0, -2.0), reason), 0.5, {"advantages": np.float32([2, 2])})
    assert row["weights"].tolist() == [0, learns, learns, 0, 0, 0, 0, 0]
    assert row["rewards"].tolist() == [0, 0.5, 0, 0, 0, 0, 0, 0] and row["answers"].sum() == 1


def made(files, **keys):
    """The first batch."""
    run = jt.build(config(files, **keys), devices=jax.local_devices()[:keys.get("mesh__stage", 1) * 4])
    run.see(0, state := run.init())
    found = run.data[0]
    held = sum(w.nbytes // (2 if "tensor" in f"{w.sharding.spec}" else 1) for w in jax.tree.leaves(state.params))
    assert run.data.pop_fields().get("layout_bytes") == (held if run.config.rl.gather_weights else None)
    return found


@pytest.fixture(scope="module")
def made_by_rows_alone(files):
    """The files made on a mesh that splits rows and nothing else."""
    return made(files, mesh__data=4, mesh__tensor=1)


@pytest.mark.parametrize("keys", [
    *slow(dict(mesh__data=1, mesh__fsdp=2, mesh__stage=2, mesh__tensor=2, rl__gather_weights=True)),
    # test_values.py has all three axes without a layout for decoding.
    *exhaustive(dict(mesh__data=1, mesh__fsdp=2), dict(mesh__data=2, mesh__stage=2))], ids=str)
def test_any_mesh_makes_the_same_batch(files, made_by_rows_alone, keys):
    """Weights that are laid out for decoding give it too: whole over all axes but `tensor`."""
    other = made(files, **keys)
    for name, column in made_by_rows_alone.items():
        np.testing.assert_allclose(other[name], column, rtol=1e-4, atol=1e-5, err_msg=name)


def read(workdir):
    """All answers of a run, as tokens."""
    return [json.loads(line)["tokens"] for path in sorted((workdir / "rollouts").iterdir())
            for line in path.read_text().splitlines()]


@pytest.mark.exhaustive  # test_values.py and test_staleness.py go on from answers, the one with reuse
@pytest.mark.parametrize("reuse", [1, 2])
def test_a_run_that_goes_on_makes_the_same_answers_and_learns(files, tmp_path, reuse):
    keys = dict(rl__reuse=reuse, rl__kl=0.01, train__steps=8, optimizer__learning_rate=3e-3)
    whole = jt.train(config(files, **keys), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for step in (6, 8):  # 3 is within the two steps that share answers
        shutil.rmtree(tmp_path / "parts" / "checkpoints" / f"{step}", ignore_errors=True)
    for path in (tmp_path / "parts" / "rollouts").iterdir():
        if int(path.stem) > 4:
            path.unlink()
    shutil.copytree(tmp_path / "parts", tmp_path / "elsewhere")
    parts = jt.train(config(files, **keys), tmp_path / "parts")
    half = jt.build(config(files, **keys, mesh__data=1, mesh__fsdp=2))
    elsewhere = jt.train(half, tmp_path / "elsewhere")
    assert [read(tmp_path / name) for name in ("parts", "elsewhere")] == 2 * [read(tmp_path / "whole")]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
                 *map(jax.device_get, (whole.params, elsewhere.params)))
    assert jax.tree.all(jax.tree.map(np.array_equal, *map(jax.device_get, (whole, parts))))
    lines = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert {"reward", "answer_tokens", "kl", "kl_sampled", "clipped"} <= lines[-1].keys()
    assert (max(line["kl_sampled"] for line in lines) > 1e-9) == (reuse > 1)
    kept = sorted(int(path.stem) for path in (tmp_path / "parts" / "rollouts").iterdir())
    assert kept == list(range(1, 9, reuse))
    found = [json.loads(line) for line in (tmp_path / "parts" / "rollouts" / "1.jsonl").read_text().splitlines()]
    assert len(found) == 8 and {"prompt", "text", "tokens", "reward"} <= found[0].keys()


def test_advantages():
    from jaxtrain.config.sections.tuning_keys import RLConfig
    from jaxtrain.tuning.rewards import advantages_of

    keys = dict(prompts="a", reward="b", group_size=3)
    rewards = [0, 1, 2, 5, 5, 5]
    plain = advantages_of(RLConfig(**keys, scale="none"), rewards)
    np.testing.assert_allclose(plain, [-1, 0, 1, 0, 0, 0])
    others = advantages_of(RLConfig(**keys, scale="none", baseline="others"), rewards)
    np.testing.assert_allclose(others, [-1.5, 0, 1.5, 0, 0, 0])
    batch = advantages_of(RLConfig(**keys, scale="batch"), rewards)
    np.testing.assert_allclose(batch, plain / (np.std(rewards, ddof=1) + 1e-4))


@pytest.mark.parametrize(("keys", "message"), [
    (dict(rl__reward=""), "rl.reward: it is missing, and reinforcement learning needs both; give FILE"),
    (dict(rl__reward="x.py"), "rl.reward: 'x.py' names no function of a file; write FILE.py:FUNC"),
    (dict(rl__reward="model:none"), "rl.reward: none is not the workdir of a run with checkpoints; "),
    (dict(rl__reward="x.py:f"), "rl.reward: there is no file x.py; check the name"),
    (dict(reward="odd"), "rl.reward: FILES/reward.py has no function 'odd'; check the name"),
    (dict(rl__prompts="none.jsonl"), "rl.prompts: none.jsonl cannot be read "),
    (dict(rl__group_size=3), "data.global_batch_size: 8 answers are not whole groups of rl.group_size"),
    (dict(rl__group_size=1), "rl.group_size: 1 answers cannot be compared with each other; give 2 or"),
    (dict(rl__staleness=-1), "rl.staleness: -1 is negative; give 0 or more"),
    (dict(rl__max_new_tokens=20), "rl.max_new_tokens: 20 leaves no room for a prompt in data.seq_len=20"),
    (dict(rl__max_new_tokens=14), "rl.prompts: 'say x1:' has 7 tokens, and data.seq_len less "),
    (dict(data__packing="bucket"), "data.packing: batches are made of the model's own answers; leave it out"),
    (dict(train__epochs=2, train__steps=0), "train.epochs: a run on its own answers to rl.prompts makes its "
     "data as it goes, so that they have no length; give train.steps"),
    (dict(preference__loss="dpo", data__packing="pairs"), "data.packing: batches are made of the model's own answers"),
])
def test_mistakes_are_told_in_one_line(files, keys, message):
    with pytest.raises(jt.UserError) as refusal:
        run = jt.build(config(files, **keys))
        run.see(0, run.init())
        run.data[0]
    assert f"{refusal.value}".replace(str(files), "FILES").startswith(message)


@pytest.mark.parametrize(("reward", "message"), [
    ("nan", "it gives nan for the answer "), ("big", "it gives 1e+300 for the answer "),
    ("fails", "it fails on the answer ")])
def test_rewards_that_are_none_are_told_in_one_line(files, monkeypatch, reward, message):
    monkeypatch.setattr(own_mesh, "generate", lambda run, state, prompts, **_: [
        Generated("a", (97,), (-1.0,), "length") for _ in prompts])
    data = jt.build(config(files, reward=reward)).data
    data.see(0, None)
    with pytest.raises(jt.UserError) as refusal:
        data[0]
    assert f"{refusal.value}".startswith(f"rl.reward: {message}")


def test_lines_without_a_prompt_are_refused(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"promt": "b"}\n')
    with pytest.raises(jt.UserError, match=r"rl\.prompts: line 3 of .* has no prompt; write lines such as"):
        own_answers.read_prompts(str(path))
    path.write_text("\n")
    with pytest.raises(jt.UserError, match=r"rl\.prompts: .* has no prompts; write lines such as"):
        own_answers.read_prompts(str(path))


@pytest.mark.exhaustive
def test_a_model_that_answers_through_a_template_ends_with_its_turn_and_keeps_it(files, tmp_path):
    """Special tokens in prompts are such, answers are trained up to the token that ends the turn, and the source of
    tokenizer and template may go once the run has begun."""
    from jaxtrain.commands import prepare, train_tokenizer
    from jaxtrain.hub.trained_tokenizer import prompt_ids

    (tmp_path / "text.txt").write_text("say 1: It is a text of some words.\n" * 50)
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert train_tokenizer.main([f"--input={tmp_path}/text.txt", "--vocab_size=280", "--special_tokens", *words,
                                 f"--output={tmp_path}/tokenizer.json"]) == 0
    records = [{"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "It"}]}
               for n in range(40)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert prepare.main([f"--input={tmp_path}/chat.jsonl", f"--tokenizer={tmp_path}/tokenizer.json",
                         "--chat_template=chatml", f"--output={tmp_path}/corpus"]) == 0
    base = dict(rl__prompts="", rl__reward="", rl__group_size=8, rl__max_new_tokens=64,
                model__vocab_size=280, data__source=str(tmp_path / "corpus"), data__packing="best_fit",
                model__max_seq_len=64, data__seq_len=64, data__eval_fraction=0.1)
    jt.train(config(files, **base), tmp_path / "base")
    text = "<|im_start|>user\nsay 1<|im_end|>\n<|im_start|>assistant\n"
    prompts = [{"prompt": text, "number": 1}, {"prompt": [{"role": "user", "content": "say 1"}], "number": 1}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    (tmp_path / "reward.py").write_text("def any(answer, record):\n    return len(answer)\n")
    keys = dict(rl__prompts=str(tmp_path / "prompts.jsonl"), model__max_seq_len=64, data__seq_len=64,
                rl__reward=f"{tmp_path / 'reward.py'}:any", train__init_from=str(tmp_path / "base"),
                rl__max_new_tokens=24, train__steps=2, model__vocab_size=280,
                checkpoint__every=1)
    run = jt.build(config(files, **keys))
    assert run.data.prompts[0] == run.data.prompts[1] == prompt_ids(run.data.tokenizer, text)
    end = run.data.tokenizer.specials["<|im_end|>"]
    assert run.data.prompts[0].count(end) == 1 and set(run.data.ends) == {end, run.data.tokenizer.eod}
    run.see(0, run.init())
    ended = 0
    for step_row in range(8):
        one = {name: column[step_row] for name, column in run.data[0].items()}
        answer = one["targets"][one["weights"] > 0].tolist()
        assert end not in answer[:-1] and run.data.tokenizer.eod not in answer[:-1]
        ended += answer[-1] in run.data.ends
    assert ended, "no answer ends, so the test says nothing"
    jt.train(config(files, **keys), tmp_path / "work")
    kept = json.loads((tmp_path / "work" / "tokenizer" / "chat.json").read_text())
    assert kept["template"] == run.data.chat["template"]
    (tmp_path / "base").rename(tmp_path / "gone")
    shutil.rmtree(tmp_path / "work" / "checkpoints" / "2")
    jt.train(config(files, **keys), tmp_path / "work")  # with the tokenizer and the template that it has kept
