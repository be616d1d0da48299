"""The files that runs write are as their schemas say, and the schemas name every key."""

import json

import jsonschema
import pytest

import jaxtrain as jt
from jaxtrain.commands.runs import main
from jaxtrain.config.load import load_config
from jaxtrain.observe.schemas import FILES, schema
from tests.tiny import ROOT, devices

pytestmark = pytest.mark.usefixtures("cache")
SMALL = {"model.num_layers": 1, "model.embed_dim": 32, "model.max_seq_len": 48, "data.seq_len": 48,
         "data.global_batch_size": 4, "train.steps": 3, "train.eval_every": 2, "train.eval_batches": 1,
         "checkpoint.every": 2, "train.sample_tokens": 0, "train.progress": False, "optimizer.warmup_steps": 0}
CHAT = [{"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n} and {n + 1}"}]}
        for n in range(200)]
REWARD = "def even(answer, record):\n    return sum(map(ord, answer)) % 2 + 0.1 * record['number']\n"


@pytest.fixture(scope="module", autouse=True)
def on_two():
    with devices(2):
        yield


def plain(folder):
    (folder / "text").write_text("a line of a text that is long enough\n" * 300)
    return {"data.source": f"{folder / 'text'}", "train.ema_decay": 0.9}


def tuned(folder):
    """On answers, with adapters, from a chat corpus: the optimizer has other metrics, and rows are packed otherwise."""
    from jaxtrain.commands.prepare import main as prepare

    (folder / "chat.jsonl").write_text("".join(json.dumps(one) + "\n" for one in CHAT))
    assert prepare([f"--input={folder / 'chat.jsonl'}", f"--output={folder / 'corpus'}", "--eval_fraction=0.2",
                    "--chat_template=plain", "--workers=1"]) == 0
    return {"data.source": f"{folder / 'corpus'}", "data.packing": "best_fit"}


def rewarded(folder):
    (folder / "reward.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}:", "number": n}) + "\n"
                                                  for n in range(5)))
    return {"rl.prompts": f"{folder / 'prompts.jsonl'}", "rl.reward": f"{folder / 'reward.py'}:even",
            "rl.group_size": 2, "rl.max_new_tokens": 4, "train.eval_every": 0, "data.source": "bytes"}


RUNS = {make.__name__: make for make in (plain, tuned, rewarded)}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=() if name == "plain" else pytest.mark.slow)
                                        for name in RUNS])
def workdir(request, tmp_path_factory):
    """The workdir of a run of each kind."""
    folder = tmp_path_factory.mktemp(request.param)
    config = load_config(f"{ROOT}/configs/gpt.py:tiny", SMALL | RUNS[request.param](folder))
    jt.train(config, folder / "run")
    return folder / "run"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def unnamed(name, content):
    return content.keys() - schema(name)["properties"].keys()


@pytest.mark.parametrize("name", FILES)
def test_a_schema_is_one_and_describes_each_key(name):
    jsonschema.Draft202012Validator.check_schema(schema(name))
    assert all(one.get("description") for one in schema(name)["properties"].values())


def test_the_supervisors_events_are_as_the_schema_says():
    event = {"time": 1.0, "kind": "restart", "process": "supervisor", "host": "one"}
    validator = jsonschema.Draft202012Validator(schema("events"))
    assert validator.is_valid(event) and not validator.is_valid(event | {"process": "another"})


def test_a_run_writes_what_they_say(workdir):
    found = {"metrics": lines(workdir / "metrics.jsonl"), "events": lines(workdir / "events.jsonl"),
             "run": [json.loads((workdir / "run.json").read_text())]}
    for name, contents in found.items():
        validator = jsonschema.Draft202012Validator(schema(name))
        assert contents
        for content in contents:
            assert [error.message for error in validator.iter_errors(content)] == [], content
    assert unnamed("run", found["run"][0]) == set()
    if workdir.parent.name.startswith("plain"):
        assert set().union(*(unnamed("metrics", line) for line in found["metrics"])) == set()
        assert any("eval_loss" in line for line in found["metrics"])


@pytest.mark.parametrize(("name", "change"), [
    ("metrics", {"step": -1}), ("metrics", {"step": None}), ("metrics", {"loss": "low"}), ("metrics", {"own": [1]}),
    ("metrics", {"tokens": 1.5}), ("metrics", {"goodput": 1.5}), ("run", {"run": "x"}), ("run", {"mesh": {"data": 0}}),
    ("run", {"packages": None}), ("run", {"config_changes": [{"key": "x"}]})])
def test_what_is_wrong_is_refused(name, change):
    right = {"metrics": {"step": 1, "loss": 1.0, "step_time_s": None, "idle_s": None, "tokens": 2,
                         "tokens_per_s": None},
             "run": {"run": "0" * 16, "adopted": [["1" * 16, 3]], "config_hash": "a", "git_commit": None,
                     "packages": {"jax": "1"}, "python": "3", "platform": "x", "mesh": {"data": 1},
                     "device_kind": "cpu", "process_count": 1, "data_manifest_hash": None, "data_manifests": {},
                     "own_parts": {}, "compiler_options": {}}}[name]
    validator = jsonschema.Draft202012Validator(schema(name))
    assert validator.is_valid(right) and not validator.is_valid(right | change)
    assert not any(validator.is_valid({key: value for key, value in right.items() if key != gone}) for gone in right)


def test_lines_of_steps_and_of_evaluations_are_told_apart():
    validator = jsonschema.Draft202012Validator(schema("metrics"))
    assert validator.is_valid({"step": 2, "eval_loss": None, "eval_mine": 3})
    assert not validator.is_valid({"step": 2}) and not validator.is_valid({"step": 2, "loss": 1.0})


@pytest.mark.parametrize("name", FILES)
def test_the_command_prints_it(name, capsys):
    assert main(["schema", name]) == 0
    assert json.loads(capsys.readouterr().out) == schema(name)
