"""Conversations with environments: which tokens they are of, what is learnt of them, and that they can be repeated."""

import json
import os
import signal
from dataclasses import replace
from itertools import pairwise

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.config.sections.tuning_keys import RLConfig
from jaxtrain.data.chat.templates import Chat
from jaxtrain.data.tokenizers import tokenizer_folder
from jaxtrain.data.tokenizers.tokenizer import ByteTokenizer
from jaxtrain.hub.generate import Generated
from jaxtrain.tuning import own_answers, rollouts
from jaxtrain.tuning.answers import own_mesh
from jaxtrain.tuning.environments import turn_tokens
from jaxtrain.tuning.environments.conversation import Conversation
from jaxtrain.tuning.environments.turn_credit import turn_advantages
from jaxtrain.tuning.values import known_of
from tests.numerics import reference
from tests.objectives import plain_policy_gradient as plain
from tests.objectives import tuned
from tests.plug_in_package import importable, install
from tests.tuning.test_rollouts import on_four  # noqa: F401

pytestmark = pytest.mark.usefixtures("cache")
# Says how often it was answered, gives a reward for each answer, and ends after as many as the record says.
COUNTS = '''
class Counts:
    def reset(self, record, seed):
        self.said, self.turns = [], record["turns"]
        return f"begin {seed % 7}"

    def step(self, answer):
        self.said.append(answer)
        return f"heard {len(self.said)}", len(answer) / 4, len(self.said) == self.turns
'''
END = ByteTokenizer.eod


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environments")
    (folder / "counts.py").write_text(COUNTS)
    lines = [{"prompt": f"task {n}", "turns": 1 + n % 3} for n in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def chat(monkeypatch):
    """The model has a chat template."""
    found = Chat(ByteTokenizer(), "plain")
    monkeypatch.setattr(own_answers, "_words", lambda *_: (ByteTokenizer(), found))
    return found


@pytest.fixture
def answers(monkeypatch):
    """Answers that depend on the state, the seed and the place; every third has no end."""
    asked = []

    def generate(run, state, prompts, seed, drawn, **_):
        asked.append((state, [*prompts]))
        found = []
        for place, _ in drawn:
            rng = np.random.default_rng([seed, place])
            tokens = tuple(rng.integers(97, 122, rng.integers(0, 4)).tolist())
            cut = place % 3 == 2
            tokens = (*tokens, *[110] * (4 - len(tokens))) if cut else tokens
            logprobs = tuple((-rng.random(len(tokens))).tolist())
            found.append(Generated(bytes(tokens).decode(), tokens, logprobs, "length" if cut else "stop",
                                   None if cut else (END, -0.5)))
        return found
    monkeypatch.setattr(own_mesh, "generate", generate)
    return asked


def config(files, **keys):
    return reference.tiny("llama", **(dict(
        model__vocab_size=264, model__max_seq_len=128, data__seq_len=128, data__global_batch_size=8, train__steps=6,
        train__progress=False, rl__prompts=str(files / "prompts.jsonl"), rl__group_size=4, rl__max_new_tokens=4,
        rl__environment=f"{files / 'counts.py'}:Counts", rl__scale="none") | keys))


def made(files, step=0, folder=None, **keys):
    run = jt.build(config(files, **keys), devices=jax.devices()[:1])
    data = run.data
    if folder is not None:
        data = own_answers.on_answers(run, folder)
    data.see(step, step)
    return run, data, data[step]


def test_nothing_but_sampled_tokens_has_weight(files, chat, answers):
    _, data, batch = made(files, data__global_batch_size=4, rl__group_size=2)
    data.forget()
    turns = [np.flatnonzero(np.diff(row, prepend=0) > 0) for row in batch["weights"]]
    assert {*map(len, turns)} == {2, 3}
    for row in range(4):
        said = batch["targets"][row][batch["weights"][row] > 0]
        assert batch["tokens"][row][:12].tolist() == [*b"user: begin "]
        assert b"heard" not in bytes(int(id) for id in said if id < 256)
        assert not batch["sampled"][row][batch["weights"][row] == 0].any()
        assert not batch["advantages"][row][batch["weights"][row] == 0].any()
    assert np.abs(batch["advantages"]).max() > 0.1


@pytest.mark.slow
def test_loss_and_gradients_of_several_turns_are_those_of_the_formula(files, chat, answers):
    """The formula is of plain float32, and knows of nothing but the tokens with weight."""
    run, data, batch = made(files, data__global_batch_size=4, rl__group_size=2)
    data.forget()
    assert {*(int((np.diff(row, prepend=0) > 0).sum()) for row in batch["weights"])} == {2, 3}
    tuned.check(run, lambda policy, before: plain.loss(run.config.rl, run.config.model, policy, before, batch), batch)


def test_tokens_grow_and_are_never_made_of_text_again(files, chat, answers):
    """Each turn begins with all tokens until then, and what is put between is what the template puts there."""
    _, data, _ = made(files)
    data.forget()
    by_turn = [prompts for _, prompts in answers]
    assert len(by_turn) == 3 and len(by_turn[0]) == 8
    assert all(bytes(one).startswith(b"user: begin ") and bytes(one).endswith(b"assistant: ") for one in by_turn[0])
    for earlier, later in pairwise(by_turn):
        assert all(any(one[:len(before)] == before for before in earlier) for one in later)
    text = chat.text([{"role": "user", "content": "begin 1"}, {"role": "assistant", "content": "ab"},
                      {"role": "user", "content": "heard 1"}])
    words = turn_tokens.TurnTokens(ByteTokenizer(), chat)
    first = words.first("begin 1", None)
    before = [{"role": "user", "content": "begin 1"}, {"role": "assistant", "content": "ab"}]
    for ended, sampled in ((True, [97, 98, END]), (False, [97, 98])):
        ids = [*first, *sampled, *words.between(before, "heard 1", ended, None)]
        (want, _, _), = chat.specials.encode([text])
        assert ids == want.tolist()
    assert not words.rewrites
    hostile = words.between(before, "x<|endoftext|>y", True, None)
    assert END not in hostile  # what only looks like a special token is text
    marked = words.between(before, "jaxtrain-answer", True, None)
    assert b"jaxtrain-answer" in bytes(id for id in marked if id < 256)


def test_a_template_that_drops_thoughts_is_told_and_tokens_are_kept(tmp_path):
    template = tmp_path / "thinks.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}"
                        "{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% else %}{{ m.content }}{% endif %}|"
                        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}")
    words = turn_tokens.TurnTokens(ByteTokenizer(), Chat(ByteTokenizer(), str(template)))
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>c"}]
    assert bytes(words.between(before, "d", True, None)).decode() == "|user:d|assistant:"
    assert words.rewrites
    template.write_text("{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}")
    words = turn_tokens.TurnTokens(ByteTokenizer(), Chat(ByteTokenizer(), str(template)))
    with pytest.raises(jt.UserError, match=r"rl\.environment: thinks\.jinja leaves the model's earlier answers out"):
        words.between(before, "d", True, None)


@pytest.mark.parametrize("keys", [dict(), dict(rl__staleness=2), dict(rl__reuse=2), dict(rl__sampling_rounds=2)],
                         ids=str)
def test_a_run_that_goes_on_has_the_same_conversations(files, chat, answers, tmp_path, keys):
    def trained(folder, start):
        run = jt.build(config(files, **keys), devices=jax.devices()[:1])
        data, found = own_answers.on_answers(run, folder), []
        for step in range(start, 4):
            data.see(step, step)
            found.append(data[step])
        data.forget()
        return found
    whole = trained(tmp_path, 0)
    for path in (tmp_path / "rollouts").iterdir():
        assert all(json.loads(line)["turns"] for line in path.read_text().splitlines())
    again = trained(tmp_path, 2)
    for batch, wanted in zip(again, whole[2:], strict=True):
        for name, column in wanted.items():
            np.testing.assert_array_equal(batch[name], column, err_msg=name)


def test_a_worker_that_is_killed_costs_nothing_but_time(files, chat, answers):
    """Its conversations are played again by another, in the middle of them."""
    _, calm, batch = made(files)
    calm.forget()
    data = jt.build(config(files), devices=jax.devices()[:1]).data
    turns = data.environment.turns

    def killed(asked):
        if asked[0].answers:
            for worker in filter(None, data.environment._workers):
                os.kill(worker.process.pid, signal.SIGKILL)
                worker.process.wait()
        return turns(asked)
    data.environment.turns = killed
    data.see(0, 0)
    for name, column in data[0].items():
        np.testing.assert_array_equal(batch[name], column, err_msg=name)
    data.forget()


def test_room_and_turns_end_conversations(files, chat, answers):
    _, data, batch = made(files, rl__max_turns=2, rl__mask_truncated=True)
    found = [one.finish_reason for one in data._rounds[0].answers]
    assert {*found} == {"stop", "length"}
    assert all((batch["weights"][row].sum() > 0) == (why == "stop") for row, why in enumerate(found))
    fields = data.pop_fields()
    assert fields["cut_off"] == found.count("length") / 8 and fields["turns"] <= 2 and fields["answer_tokens"] > 0
    data.forget()
    _, data, batch = made(files, data__seq_len=48)
    assert batch["tokens"].shape == (8, 48) and data.pop_fields()["cut_off"] > 0
    data.forget()


def talk(*turns, values=()):
    """A conversation of answers (tokens, reward), with two tokens said after each but the last."""
    said, tokens = [], []
    for number, (size, reward) in enumerate(turns):
        said.append({"role": "assistant", "content": "", "tokens": size, "reward": reward, "finish_reason": "stop"})
        tokens += [1] * size
        if number < len(turns) - 1:
            said.append({"role": "user", "content": "", "tokens": 2})
            tokens += [2, 2]
    return Conversation("", tuple(tokens), (0.0,) * len(tokens), "stop", values=tuple(values), turns=tuple(said))


def test_credit_by_turn():
    talks = [talk((2, 1.0), (1, 0.0)), talk((1, 0.0), (2, 3.0)), talk((1, 0.5)), talk((3, 0.5))]
    c = RLConfig(prompts="a", environment="b", group_size=2, credit="turn", scale="none")
    found = [one["advantages"].tolist() for one in known_of(c, np.array([[1.0], [3.0], [0.5], [0.5]]), talks)]
    assert found == [[-1, -1, 0, 0, -1.5], [1, 0, 0, 1.5, 1.5], [0], [0, 0, 0]]
    episode = known_of(replace(c, credit="episode"), np.array([[1.0], [3.0], [0.5], [0.5]]), talks)
    assert [float(one["advantages"]) for one in episode] == [-1, 1, 0, 0]
    others = turn_advantages([[1.0, 0.0], [0.0, 3.0]], 2, "others", "group")
    spread = np.std([1, 3], ddof=1) + 1e-4
    np.testing.assert_allclose(others[0], [-2 / spread, -3 / (np.std([0, 3], ddof=1) + 1e-4)])


@pytest.mark.parametrize("credit", ["episode", "turn"])
def test_values_of_conversations(credit):
    """Advantages are those of a text of the sampled tokens alone, with rewards where turns end."""
    c = RLConfig(prompts="a", environment="b", group_size=1, credit=credit, scale="none", baseline="value", gamma=0.9,
                 gae_lambda=0.8)
    values = [0.1, 0.2, 9.0, 9.0, 0.3]
    found, = known_of(c, np.array([[4.0]]), [talk((2, 1.0), (1, 3.0), values=values)])
    rewards, v, later, want = [0, credit == "turn", 4 - (credit == "turn")], [0.1, 0.2, 0.3, 0.0], 0.0, []
    for t in (2, 1, 0):
        later = rewards[t] + 0.9 * v[t + 1] - v[t] + 0.9 * 0.8 * later
        want.insert(0, later)
    np.testing.assert_allclose(found["advantages"], [*want[:2], 0, 0, want[2]])
    np.testing.assert_allclose(found["returns"], [want[0] + 0.1, want[1] + 0.2, 0, 0, want[2] + 0.3])


@pytest.mark.parametrize(("keys", "message"), [
    (dict(rl__environment="x.py:A"), "rl.environment: there is no file x.py; check the name"),
    (dict(rl__environment="x:A"), "rl.environment: 'x:A' names no class of a file; write FILE.py:CLASS, a URL"),
    (dict(rl__environment="verifiers:"), "rl.environment: 'verifiers:' names no environment; write verifiers:NAME"),
    (dict(rl__environment="nothing"), "rl.environment: there is no environment 'nothing'; "),
    (dict(environment="Odd"), "rl.environment: FILES/counts.py has no class 'Odd'; check the name"),
    (dict(rl__environment="http://"), "rl.environment: http:// is not the URL of a server of environments"),
    (dict(rl__max_turns=0), "rl.max_turns: 0 is not positive"),
    (dict(rl__environment="", rl__reward="a.py:b", rl__max_turns=3), "rl.max_turns: it is read with rl.environment"),
    (dict(rl__overlong_buffer=2), "rl.overlong_buffer: conversations with rl.environment end by rl.max_turns"),
    (dict(rl__exact=True), "rl.exact: the answers of a step are drawn as the rows of its batch, and conversations "),
    (dict(data__seq_len=16), "rl.environment: FILES/counts.py:Counts begins with 25 tokens, and with rl."),
])
def test_mistakes_are_told_in_one_line(files, chat, answers, keys, message):
    if name := keys.pop("environment", ""):
        keys["rl__environment"] = f"{files / 'counts.py'}:{name}"
    with pytest.raises(jt.UserError) as refusal:
        made(files, **keys)
    assert f"{refusal.value}".replace(str(files), "FILES").startswith(message)


def test_a_reward_beside_the_environment_scores_the_last_answer(files, chat, answers, tmp_path):
    (tmp_path / "reward.py").write_text("def size(answer, record):\n    return len(answer) * record['turns']\n")
    _, data, batch = made(files, rl__reward=f"{tmp_path / 'reward.py'}:size", rl__reward_weights=[1.0, 0.1],
                          rl__credit="turn")
    found = data._rounds[0]
    for number, answer, scores, reward in zip(found.numbers, found.answers, found.scores, batch["rewards"],
                                              strict=True):
        record = data.records[number]
        assert answer.text == [turn["content"] for turn in answer.turns if "reward" in turn][-1]
        assert scores == [sum(answer.rewards), len(answer.text) * record["turns"]]
        assert reward.sum() == pytest.approx(scores[0] + 0.1 * scores[1])
    fields = data.pop_fields()
    assert {"score_environment", "score_size", "equal_groups", "environment_s"} <= fields.keys()
    data.forget()


def test_a_teacher_reads_what_was_said_and_counts_for_sampled_tokens(files, chat, answers):
    run = jt.build(config(files), devices=jax.devices()[:1])

    class Teacher:
        checkpoint: dict = {}  # noqa: RUF012

        def __call__(self, prompts, answers):
            assert all(bytes(one).endswith(b"assistant: ") for one in prompts)
            return [(np.array(answer.logprobs) + 0.25).tolist() for answer in answers]
    plain_data, data = run.data, None
    plain_data.see(0, 0)
    without = plain_data[0]
    plain_data.forget()
    data = rollouts.Rollouts(run, plain_data.records, plain_data.scorers, plain_data.tokenizer, None, chat, (),
                             Teacher(), plain_data.environment)
    data.see(0, 0)
    ahead = data[0]["advantages"] - without["advantages"]
    np.testing.assert_allclose(ahead, 0.25 * without["weights"], atol=1e-6)
    assert data.pop_fields()["reverse_kl"] == pytest.approx(-0.25)
    data.forget()


def test_preferences_among_conversations(files, chat, answers):
    _, data, batch = made(files, preference__loss="dpo", data__global_batch_size=2, rl__scale="group",
                          data__seq_len=128, model__max_seq_len=128)
    found = data._rounds[0]
    totals = np.array([sum(answer.rewards) for answer in found.answers]).reshape(2, 4)
    for row, group in enumerate(totals):
        for segment, at in ((1, group.argmax()), (2, group.argmin())):
            mine = (batch["segments"][row] == segment) & (batch["weights"][row] > 0)
            answer = found.answers[4 * row + at]
            want = np.array(answer.tokens)[answer.numbers >= 0]
            assert batch["targets"][row][mine].tolist() == want.tolist()
    data.forget()


@pytest.mark.exhaustive
def test_any_mesh_makes_the_same_conversations_and_values(files, chat):
    """With the real sampler and a value head, whose values are those of a pass over each row."""
    def batch_of(**mesh):
        run = jt.build(config(files, rl__baseline="value", rl__scale="group", rl__temperature=0.5, **mesh))
        run.see(0, state := run.init())
        found = run.data[0]
        _, metrics = run.step(state, run.batch(0))
        run.data.forget()
        return found, jax.device_get(metrics)
    one, metrics = batch_of(mesh__data=4)
    assert float(metrics["kl_sampled"]) < 1e-9 and float(metrics["clipped"]) == 0
    assert (one["values"][one["weights"] == 0] == 0).all() and one["weights"].sum(1).min() > 0
    other, others = batch_of(mesh__data=1, mesh__fsdp=2, mesh__tensor=2)
    for name, column in one.items():
        np.testing.assert_allclose(other[name], column, rtol=1e-3, atol=1e-4, err_msg=name)
    assert float(others["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-4, abs=1e-5)


def test_an_environment_of_another_package(files, chat, answers, tmp_path):
    """Its options are a section of the config, and reach the workers."""
    source = '''
from dataclasses import dataclass

@dataclass
class Echoes:
    """Says it again."""

    times: int = 2  # how often

    def reset(self, record, seed):
        return "begin"

    def step(self, answer):
        return answer * self.times + ".", 1.0, True
'''
    site = install(tmp_path, "echoing", {"jaxtrain.environments": {"echoes": "echoing_part:Echoes"}},
                   {"echoing_part": source})
    with importable(site):
        run = jt.build(config(files, rl__environment="echoes", echoes__times=3), devices=jax.devices()[:1])
        run.data.see(0, 0)
        assert run.data[0]["weights"].sum()
        talk = run.data._rounds[0].answers[0]
        assert talk.turns[-1]["content"] == talk.text * 3 + "."
        run.data.forget()
        with pytest.raises(jt.UserError, match=r"rl\.reward: the environment 'echoes' is one of several turns; set rl"):
            jt.build(config(files, rl__environment="", rl__reward="echoes"), devices=jax.devices()[:1])


@pytest.mark.slow  # each of the twelve is a new process, whose conversations are played again
def test_a_storm_of_kills_gives_the_conversations_of_a_calm_run(files, chat, answers):
    """Workers are killed at random moments, also while they are asked: nothing is lost or counted twice."""
    _, calm, batch = made(files)
    calm.forget()
    data = jt.build(config(files), devices=jax.devices()[:1]).data
    rng, killed, kept = np.random.default_rng(0), [], data.environment._hand_out

    def storm(waiting, ends):
        kept(waiting, ends)
        busy = [worker for worker in data.environment._workers if worker and worker.asked]
        pid = busy[0].process.pid if busy else 0
        if busy and len(killed) < 12 and pid not in killed and busy[0].asked.tries < 2 and rng.random() < 0.9:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    data.environment._hand_out = storm
    data.see(0, 0)
    for name, column in data[0].items():
        np.testing.assert_array_equal(batch[name], column, err_msg=name)
    assert len(killed) == 12
    data.forget()


def test_conversations_whose_environment_fails_can_be_left_out(files, chat, answers, tmp_path):
    """They are not trained on, count as the mean of their group, and are told with the reason."""
    (tmp_path / "fails.py").write_text(COUNTS.replace(
        "        self.said.append(answer)", "        self.said.append(answer)\n        1 / (len(answer) != 4)"))
    named = dict(rl__environment=f"{tmp_path / 'fails.py'}:Counts")
    with pytest.raises(jt.UserError, match=r"at the answer '\w{4}', .*:Counts fails \(ZeroDivisionError: division by"):
        made(files, **named)
    _, data, batch = made(files, folder=tmp_path, **named, rl__environment_errors="mask")
    found = data._rounds[0]
    failed = np.array([answer.finish_reason == "error" for answer in found.answers])
    assert 2 <= failed.sum() <= 6
    assert all((batch["weights"][row].sum() == 0) == failed[row] for row in range(8))
    given = np.array([sum(answer.rewards) for answer in found.answers])
    for group in (slice(0, 4), slice(4, 8)):
        mean = given[group][~failed[group]].mean()
        rewards = np.where(failed[group], mean, given[group])
        np.testing.assert_allclose(batch["rewards"][group].sum(1), rewards, rtol=1e-6)
        for row, reward in enumerate(rewards, start=group.start):
            learnt = batch["advantages"][row][batch["weights"][row] > 0]
            np.testing.assert_allclose(learnt, reward - mean, atol=1e-6)
    assert data.pop_fields()["environment_errors"] == failed.mean()
    lines = [json.loads(line) for line in (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()]
    assert ["ZeroDivisionError" in line["turns"][-1].get("error", "") for line in lines] == failed.tolist()
    data.forget()
    _, data, _ = made(files, **named, rl__environment_errors="mask", rl__credit="turn")
    data.forget()


def test_a_run_without_a_template_goes_on_without_one(files, tmp_path, answers):
    """Bytes have a template of their own, for who asks: a run that has begun without one does not."""
    run, data, batch = made(files, folder=tmp_path / "rollouts")
    data.forget()
    tokenizer_folder.save(data.tokenizer, tmp_path / "tokenizer", data.chat)
    data = own_answers.on_answers(run, tmp_path)
    data.see(1, 1)
    assert data.chat is None and data[1]["tokens"][0][:6].tolist() == batch["tokens"][0][:6].tolist() == [*b"begin "]
    data.forget()
