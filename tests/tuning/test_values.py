"""Values of answers: advantages over them by their definition, what rows hold, and what becomes of the value head."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.commands import export
from jaxtrain.commands import generate as generate_command
from jaxtrain.config.sections.tuning_keys import RLConfig
from jaxtrain.hub import trained_model
from jaxtrain.hub.adapters import adapter_commands
from jaxtrain.hub.generate import Generated
from jaxtrain.models.heads.scalar_head import without_heads
from jaxtrain.tuning.values import Valued, known_of
from tests.objectives.tuned import resumed
from tests.tuning.test_rollouts import config, files, on_four  # noqa: F401

pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once
KEYS = dict(prompts="a", reward="b", baseline="value")
CRITIC = dict(rl__baseline="value", rl__group_size=1)


@pytest.mark.parametrize(("gamma", "mix"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.8, 0.0)])
def test_advantages_are_means_of_what_was_found_after_any_number_of_tokens(gamma, mix):
    """An exponentially weighted mean of the errors that the value has after 1, 2 and more tokens (arXiv 1506.02438)."""
    rng = np.random.default_rng(1)
    answers = [Valued("", (), None, "stop", values=tuple(rng.normal(size=n).tolist())) for n in (5, 1, 3)]
    rewards, plain = rng.normal(size=3).tolist(), []
    for reward, answer in zip(rewards, answers, strict=True):
        v, last = answer.values, len(answer.values)
        for t in range(last):
            after = [gamma ** n * v[t + n] if t + n < last else gamma ** (last - 1 - t) * reward
                     for n in range(1, last - t + 1)]
            weights = [(1 - mix) * mix ** n for n in range(last - t - 1)] + [mix ** (last - t - 1)]
            plain.append(np.dot(weights, after) - v[t])
    plain = np.array(plain)
    values = np.concatenate([answer.values for answer in answers])
    for scale, want in (("none", plain), ("group", (plain - plain.mean()) / np.sqrt(plain.var(ddof=1) + 1e-8))):
        c = RLConfig(**KEYS, scale=scale, gamma=gamma, gae_lambda=mix)
        found = known_of(c, rewards, answers)
        assert [len(one["advantages"]) for one in found] == [5, 1, 3]
        for name, all_of_it in (("advantages", want), ("returns", plain + values), ("values", values)):
            np.testing.assert_allclose(np.concatenate([one[name] for one in found]), all_of_it, rtol=1e-9, atol=1e-12)
    alone, = known_of(RLConfig(**KEYS), [2.0], [replace(answers[1], values=(0.5,))])
    assert alone["advantages"].tolist() == [0] and alone["returns"].tolist() == [2]
    assert "returns" not in known_of(RLConfig(prompts="a", reward="b", group_size=2), [1, 2], [
        Generated("", (), None, "stop")] * 2)[0]


def with_a_head(state):
    """The state with a value head that is not zero."""
    head = state.params["value_head"]["kernel"]
    kernel = np.random.default_rng(2).normal(0, 0.1, head.shape).astype(np.float32)
    return replace(state, params={**state.params, "value_head": {"kernel": jax.device_put(kernel, head.sharding)}})


@pytest.mark.exhaustive
def test_rows_hold_the_values_of_the_state_that_made_the_answers_on_any_mesh(files):  # noqa: F811
    made = []
    for devices, mesh in ((4, dict(mesh__data=2, mesh__tensor=2)),
                          (8, dict(mesh__data=1, mesh__fsdp=2, mesh__stage=2, mesh__tensor=2))):
        run = jt.build(config(files, **mesh, **CRITIC, rl__scale="none", rl__kl=0.1),
                       devices=jax.local_devices()[:devices])
        state = run.init()
        assert not np.asarray(state.params["value_head"]["kernel"]).any()
        state = with_a_head(state)
        run.see(3, state)
        made.append(run.data[3])
        # The step's own values are those of the rows.
        _, metrics = run.step(state, run.batch(3))
        assert float(metrics["value_clipped"]) == 0 and float(metrics["kl_sampled"]) < 1e-9
        learnt = made[-1]["weights"] > 0
        value, goal = (made[-1][name][learnt] for name in ("values", "returns"))
        assert float(metrics["value_loss"]) == pytest.approx(np.square(value - goal).mean() / 2, rel=1e-4)
        assert float(metrics["explained_variance"]) == pytest.approx(1 - (goal - value).var() / goal.var(), rel=1e-3)
        if len(made) == 1:
            module = run.module(with_a_head(run.init()))
            for row in range(8):
                size, at = int(made[0]["segments"][row].sum()), made[0]["weights"][row] > 0
                want = module.value_head(module.hidden(made[0]["tokens"][row, None, :size]))[0]
                np.testing.assert_allclose(made[0]["values"][row, at], want[at[:size]], rtol=1e-4, atol=1e-5)
                assert not made[0]["values"][row, ~at].any() and not made[0]["returns"][row, ~at].any()
    for name, column in made[0].items():
        np.testing.assert_allclose(made[1][name], column, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.exhaustive
def test_a_run_that_goes_on_reads_its_values_and_others_begin_with_or_without_its_head(files, tmp_path):  # noqa: F811
    plain = dict(rl__prompts="", rl__reward="", rl__group_size=8, rl__max_new_tokens=64,
                 data__source=str(files / "reward.py"))
    base = jt.train(config(files, **plain, train__steps=2), tmp_path / "base")
    keys = dict(**CRITIC, lora__rank=2, rl__reuse=2, rl__kl=0.01, rl__gamma=0.9,
                optimizer__learning_rate=3e-3, train__init_from=str(tmp_path / "base"))
    whole = jt.train(config(files, **keys), tmp_path / "whole")
    parts = jt.train(config(files, **keys), resumed(tmp_path / "whole", tmp_path / "parts", last=6))  # from step 3
    assert jax.tree.all(jax.tree.map(np.array_equal, *map(jax.device_get, (whole, parts))))
    assert whole.params.keys() == {"blocks", "value_head"} and "value_head" not in whole.frozen["reference"]
    assert np.asarray(whole.params["value_head"]["kernel"]).any()
    kept = [json.loads(line) for line in (tmp_path / "whole/rollouts/5.jsonl").read_text().splitlines()]
    assert all(len(one["values"]) == len(one["tokens"]) + bool(one["end"]) and any(one["values"]) for one in kept)
    lines = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert {"value_loss", "value_clipped", "explained_variance", "kl"} <= lines[-1].keys()

    # Values are needed where answers are read again.
    short = tmp_path / "short"
    resumed(tmp_path / "whole", short, last=6)
    (short / "rollouts/3.jsonl").write_text("".join(json.dumps({**one, "values": None}) + "\n" for one in kept))
    with pytest.raises(jt.UserError, match=r"rl: .*3\.jsonl is not as the run wrote it"):
        jt.train(config(files, **keys), short)

    def begun(**other):
        return jt.build(config(files, **(keys | other | dict(train__init_from=str(tmp_path / "whole"))))).init()

    same = lambda a, b: jax.tree.all(jax.tree.map(np.array_equal, *map(jax.device_get, (a, b))))  # noqa: E731
    model = {key: value for key, value in whole.all_params.items() if key != "reference"}
    assert same(begun(rl__kl=0.0).all_params, model)
    without = dict(rl__baseline="mean", rl__group_size=4, rl__gamma=1.0, rl__kl=0.0)
    assert same(begun(**without).all_params, without_heads(model))

    # What is published of it is a language model, or its adapters.
    assert export.main([str(tmp_path / "whole"), f"--output={tmp_path}/out", "--dtype=float32"]) == 0
    _, state = trained_model.load_model(tmp_path / "out")
    assert "value_head" not in state.all_params and same(state.all_params["embed"], base.all_params["embed"])
    assert adapter_commands.export(tmp_path / "whole", tmp_path / "adapters", base=str(tmp_path / "out")) == 6
    published = jt.build(config(files, **(keys | dict(lora__rank=0, train__init_from=str(tmp_path / "out")))))
    assert not np.asarray(published.init().params["value_head"]["kernel"]).any()
    assert generate_command.main([str(tmp_path / "whole"), "--prompt=say", "--max_new_tokens=2"]) == 0
    shutil.rmtree(tmp_path / "short")


def test_what_a_critic_needs_is_told_in_one_line(files):  # noqa: F811
    for keys, message in (
            (dict(rl__gamma=0.9), "rl.gamma: it is read with rl.baseline=value only; set that"),
            (dict(**CRITIC, rl__gae_lambda=1.5), r"rl.gae_lambda: 1.5 is not in [0, 1]; try 0.95 or 1"),
            (dict(**CRITIC, rl__value_loss=0.0), "rl.value_loss: 0.0 is not positive; give a number abo"),
            (CRITIC | dict(rl__group_size=0), "rl.group_size: 0 answers cannot be compared with each ")):
        with pytest.raises(jt.UserError) as refusal:
            config(files, **keys)
        assert f"{refusal.value}".startswith(message)
