"""Parts of other packages at work: those of docs/extend.md, one file each, and those of examples/plugin."""

import json
import os
import re
import sys

import chex
import jax
import numpy as np
import pytest
from flax import nnx

import jaxtrain as jt
from jaxtrain.hf import hf_config
from jaxtrain.hub import export
from jaxtrain.run import identity
from jaxtrain.tuning import rewards
from tests.plug_in_package import DOCUMENTED, EXAMPLE, ROOT, importable, install, install_documented, install_example
from tests.tiny import QUICKLY, virtual_devices

pytestmark = pytest.mark.usefixtures("cache")
MESH = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
PARTS = {"optimizer.name": "sign_momentum", "sign_momentum.beta": 0.5, "optimizer.schedule": "inverse_root",
         "inverse_root.timescale": 1, "train.objective": "late_tokens", "late_tokens.first": 4, "lookahead.every": 2,
         "observe.trackers": "csv_file", "csv_file.columns": "step,learning_rate"}
SMALL = {"model.num_layers": 2, "model.embed_dim": 32, "model.num_heads": 4, "model.vocab_size": 320,
         "model.max_seq_len": 32, "data.seq_len": 32, "data.global_batch_size": 8, "train.steps": 2,
         "train.precision": "float32", "train.progress": False, "train.eval_every": 0, "optimizer.weight_decay": 0.0}


@pytest.fixture
def documented(tmp_path):
    """The parts of docs/extend.md, in a folder that jaxtrain does not know."""
    with importable(site := install_documented(tmp_path / "site")):
        yield site


@pytest.fixture
def example(tmp_path):
    """examples/plugin, installed."""
    with importable(site := install_example(tmp_path / "site")):
        yield site


def config(tmp_path, **keys):
    (tmp_path / "text").mkdir(exist_ok=True)
    (tmp_path / "text" / "a.txt").write_text("".join(f"some words, number {n}, and others.\n" for n in range(500)))
    return jt.make_config({}, {"data.source": f"{tmp_path / 'text'}", **SMALL, **keys})


def took_part(workdir):
    """Check what the parts did in a run of two steps: the config, the metrics and the tracker's file."""
    kept = json.loads((workdir / "config.json").read_text())
    assert (kept["sign_momentum"], kept["lookahead"]) == ({"beta": 0.5}, {"every": 2, "rate": 0.5})
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    assert rates == pytest.approx([1e-3, 1e-3 / 2**0.5])
    rows = [row.split(",") for row in (workdir / "metrics.csv").read_text().split()]
    assert rows[0] == ["step", "learning_rate"] and [float(row[1]) for row in rows[1:]] == pytest.approx(rates)
    return lines


def test_one_file_of_each_kind_trains_on_a_mesh_and_is_published(tmp_path, documented):
    keys = {"model.name": "parallel_llama", "model.num_kv_heads": 2, "model.mlp_dim": 48}
    asked = config(tmp_path, **keys, **PARTS, **MESH)
    run = jt.build(asked)
    assert type(run.objective).__name__ == "LateTokens" and run.objective.options.first == 4
    assert not identity.has_own_parts(run)  # config.json names them all
    begun = jax.device_get(run.init().params)
    state = jt.train(run, tmp_path / "run")
    took_part(tmp_path / "run")
    params = jax.device_get(state.params)
    chex.assert_trees_all_equal(params, jax.device_get(state.extras["slow"]))
    way = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, begun)  # the sign's steps, and half of the way
    assert max(jax.tree.leaves(way)) == pytest.approx(0.5 * 1e-3 * (1 + 2**-0.5), rel=1e-3)

    export.export(tmp_path / "run", tmp_path / "published", dtype="float32")
    said = json.loads((tmp_path / "published" / "config.json").read_text())
    assert (said["model_type"], said["use_qk_norm"]) == ("parallel_llama", True)
    assert hf_config.model_section(tmp_path / "published")["num_kv_heads"] == 2
    (tmp_path / "published" / "config.json").write_text(json.dumps(
        {key: value for key, value in said.items() if key not in ("use_qk_norm", "rms_norm_eps")}))
    left_out = hf_config.model_section(tmp_path / "published")
    assert (left_out["qk_norm"], left_out["norm_eps"]) == (True, 1e-6)  # of `defaults`, and of `like`
    (tmp_path / "published" / "config.json").write_text(json.dumps(said))
    _, read = jt.load_model(tmp_path / "published", {"mesh.data": 1, "mesh.fsdp": -1})
    chex.assert_trees_all_equal(jax.device_get(read.params), params)


def test_the_objective_weighs_late_tokens_more(tmp_path, documented):
    asked = config(tmp_path, **{"train.objective": "late_tokens", "late_tokens.weight": 0.0})
    objective = jt.build(asked, devices=jax.devices()[:1]).objective
    batch = {name: np.ones((2, 32), np.float32) for name in ("weights", "tokens")} | {
        "positions": np.arange(32)[None].repeat(2, 0), "segments": np.ones((2, 32), np.int32)}
    for goal, want in ((objective, 24), (objective.evaluation, 32)):
        assert goal.prepare(goal.model.params(), batch)[1]["weights"].sum(1).tolist() == [want, want]


def test_an_environment_scores_answers(tmp_path, documented):
    keys = {"rl.prompts": "prompts.jsonl", "rl.reward": "digits", "digits.wanted": "12",
            "rl.max_new_tokens": 8}
    reward = rewards.load_reward("digits", config(tmp_path, **keys).plug_ins["digits"])
    assert rewards.rewards_of(reward, ["12", "1a", "03", ""], [{}] * 4) == [1.0, 0.5, 0.0, 0.0]
    with pytest.raises(jt.UserError, match=r"rl\.reward: there is no environment 'digit'; did you mean 'dig"):
        rewards.load_reward("digit")


@pytest.mark.parametrize("others", [("gpt2",), ("parallel_llama",)])
def test_a_model_type_belongs_to_one_family(tmp_path, documented, others, recwarn):
    """A type that jaxtrain's own family has stays its own; one that two packages claim is refused."""
    source = DOCUMENTED["parallel_llama"].replace('"parallel_llama", "Parallel', f'"{others[0]}", "Parallel')
    other = install(tmp_path / "other", "other", {"jaxtrain.families": {"other": "other_llama:FAMILY"}},
                    {"other_llama": source})
    said = {"model_type": others[0], "hidden_size": 32, "vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with importable(other, documented):
        if others == ("gpt2",):
            assert hf_config.model_section(tmp_path)["name"] == "gpt2"
            assert "model_type=gpt2 is read as model.name=gpt2; other of another pack" in f"{recwarn.list[-1].message}"
        else:
            with pytest.raises(jt.UserError, match="is the type of the models other and parallel_llama, of other pack"):
                hf_config.model_section(tmp_path)


def test_the_page_shows_the_files_of_the_example():
    for name in DOCUMENTED.keys() - {"parallel_llama"}:
        text = (EXAMPLE / "jaxtrain_plugin" / f"{name}.py").read_text()
        assert text.partition('"""\n\n')[2].strip() == DOCUMENTED[name].strip(), name
    code = {name: [line for line in text.splitlines() if line.strip() and not re.match("from |import ", line)]
            for name, text in DOCUMENTED.items()}
    assert {name: len(lines) for name, lines in code.items() if len(lines) > 30} == {}


def test_documents_in_a_row_have_states_of_their_own(tmp_path, example):
    asked = config(tmp_path, **{"model.name": "state_space", "model.num_layers": 1})
    model = jt.make_model(asked.model, rngs=nnx.Rngs(params=jax.random.key(1)))
    tokens, segments = np.random.default_rng(0).integers(0, 320, 24), np.repeat([1, 2, 3], [9, 3, 12])
    alone = [np.concatenate([tokens[segments == n], np.zeros((segments != n).sum(), int)]) for n in (1, 2, 3)]
    rows = np.stack([tokens, *alone, tokens])  # packed, each by itself, and as one document
    each = np.stack([segments, *np.ones((4, 24), int)])
    packed, *alone, joined = np.asarray(jax.jit(model)(rows, each, np.zeros_like(rows)))
    for n in (1, 2, 3):
        part = segments == n
        np.testing.assert_allclose(packed[part], alone[n - 1][:part.sum()], rtol=1e-5, atol=1e-6)
        assert n == 1 or np.abs(packed[part] - joined[part]).max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"model.name": "state_space"}, {"model.name": "parallel_llama",
                                                                  "model.num_kv_heads": 2}], ids=str)
def test_a_family_has_the_loss_and_gradients_of_one_device(tmp_path, keys):
    installed = {"state_space": install_example, "parallel_llama": install_documented}[keys["model.name"]]
    with importable(installed(tmp_path / "site")):
        def gradients(devices, **mesh):
            run = jt.build(config(tmp_path, **keys, **mesh), devices=jax.devices()[:devices])
            return jax.device_get(run.value_and_grad(run.init(), run.batch(0)))

        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), gradients(8, **MESH),
                     gradients(1))


@pytest.mark.slow
def test_the_example_is_installed_and_trains_with_all_parts_at_once(tmp_path, forked, example):
    flags = {**SMALL, **PARTS, **MESH, "data.source": f"{tmp_path / 'text'}", "model.name": "state_space"}
    config(tmp_path)  # which makes the text
    (tmp_path / "empty.py").write_text("def get_config():\n    return {}\n")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{example}", "XLA_FLAGS": f"{QUICKLY} {virtual_devices(8)}"}
    words = ["-m", "jaxtrain.cli", "train", f"--config={tmp_path}/empty.py", f"--workdir={tmp_path}/run",
             *(f"--config.{key}={value}" for key, value in flags.items())]
    done = forked(words, tmp_path, environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [line["loss"] for line in took_part(tmp_path / "run") if "loss" in line]
    one = jt.build(jt.load_config(tmp_path / "run" / "config.json", {"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 1}),
                   devices=jax.devices()[:1])
    assert losses[0] == pytest.approx(float(one.step(one.init(), one.batch(0))[1]["loss"]), rel=1e-5)
    wrong = forked([*words, "--config.model.state_dims=8"], tmp_path, environment, timeout=300)
    assert wrong.returncode == 2 and "model.state_dims: there is no such key; did you mean 'state_dim'?" in wrong.stderr


@pytest.mark.slow
def test_a_run_learns_from_an_environment(tmp_path, example):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a number:"}\n{"prompt": "another:"}\n')
    asked = config(tmp_path, **{"rl.prompts": f"{tmp_path}/prompts.jsonl", "rl.reward": "digits",
                                "digits.wanted": "abcdefgh", "rl.max_new_tokens": 6,
                                "optimizer.schedule": "inverse_root", **MESH})
    jt.train(asked, tmp_path / "run")
    answers = [json.loads(line) for path in (tmp_path / "run" / "rollouts").glob("*.jsonl")
               for line in path.read_text().splitlines()]
    assert len(answers) == 16
    for answer in answers:
        share = sum(letter in "abcdefgh" for letter in answer["text"]) / max(1, len(answer["text"]))
        assert answer["reward"] == pytest.approx(share)
    assert sys.modules["jaxtrain_plugin.digits"].__file__.startswith(f"{example}")
