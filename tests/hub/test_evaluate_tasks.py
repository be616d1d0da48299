"""`jaxtrain evaluate`: local tasks of the harness on a run, what is kept of the results, and a watcher.

`tools/release/compare_evaluation.py` compares with the harness's own model, which needs torch.
"""

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxtrain as jt
from tests.numerics import reference

pytest.importorskip("lm_eval")

import lm_eval.tasks

from jaxtrain.commands import evaluate as evaluate_command
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.distributed.run_lock import locked
from jaxtrain.hub import chat_messages, evaluate_tasks, harness_model, training_tasks
from jaxtrain.hub.adapters import adapter_files
from jaxtrain.hub.harness_model import HarnessModel
from jaxtrain.hub.trained_tokenizer import tokenizer_of
from jaxtrain.models import lora
from jaxtrain.observe import trackers
from jaxtrain.run import abstract_model
from tests.observe.trackers.test_tracking import Backend, Fake
from tests.tiers import exhaustive, slow
from tests.trainer.test_multiprocess import ended, two_of

TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {records}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{target}"
metric_list: [{{metric: {metric}, aggregation: {mean}, higher_is_better: true}}]
{more}
"""
pytestmark = pytest.mark.usefixtures("cache", "only_our_tasks")  # programs are compiled once
LONG = "It was the best of times, it was the worst of times, it was the age of wisdom, it was {{n}}"


@pytest.fixture(scope="module")
def only_our_tasks():
    """The harness reads thousands of tasks of its own each time, in seconds; the command of docs/evaluate.md does."""
    class OurTasks(lm_eval.tasks.TaskManager):
        def __init__(self, **keys):
            super().__init__(include_defaults=False, **keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval.tasks, "TaskManager", OurTasks)
        yield


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    records = folder / "records.jsonl"
    records.write_text("".join(json.dumps({"n": n, "options": [" best", " xyzzy"]}) + "\n" for n in range(5)))
    for name, kind, text, target, metric, mean, more in (
            ("choose", "multiple_choice", "{{n}} It was the", "0", "acc", "mean",
             'doc_to_choice: "{{options}}"\ntarget_delimiter: ""'),
            ("go_on", "generate_until", "{{n}} It was", "the", "exact_match", "mean",
             'generation_kwargs: {until: ["e"], max_gen_toks: 6}'),
            ("roll", "loglikelihood_rolling", "", LONG, "bits_per_byte", "bits_per_byte", "")):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, kind=kind, records=records, text=text,
                                                         target=target, metric=metric, mean=mean, more=more))
    (folder / "moved.yaml").write_text(TASK.format(name="moved", kind="generate_until", records="moved.jsonl", text="a",
                                                   target="b", metric="exact_match", mean="mean", more=""))
    return folder


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times.\n" * 200)
    config = reference.tiny("llama", model__vocab_size=264, model__max_seq_len=64, data__seq_len=32,
                            data__global_batch_size=8, train__steps=20, optimizer__warmup_steps=1,
                            checkpoint__every=10, train__progress=False, data__source=str(folder / "text.txt"),
                            mesh__data=8)
    jt.train(config, folder / "work")
    return folder / "work"


EVALUATE = """
import functools, sys
import lm_eval.tasks
from jaxtrain.commands.evaluate import main

lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
sys.exit(main())
"""


def begun(words, cwd, environment):
    """A process of its own and no fork, as a user starts it."""
    return subprocess.Popen([sys.executable, *words], cwd=cwd, env=environment, text=True, stderr=subprocess.PIPE)


@pytest.mark.exhaustive
def test_two_processes_give_the_results_of_one(workdir, tasks, tmp_path):
    words = [f"{workdir}", "--tasks=choose,go_on", f"--include={tasks}", "--log_samples", "--limit=2"]
    where = ["--config.mesh.data=2", f"--output={tmp_path / 'two.json'}"]
    with two_of(["-c", EVALUATE, *words, *where], devices=1, start=begun) as both:
        first, second = ended(both)
    assert [process.returncode for process in both] == [0, 0], first + second
    assert evaluate_command.main([*words, f"--output={tmp_path / 'one.json'}"]) == 0
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert two["hashes"] == one["hashes"] and two["results"] == one["results"]
    for ours, theirs in zip(two["samples"]["choose"], one["samples"]["choose"], strict=True):
        np.testing.assert_allclose(*([float(found) for ((found, _),) in one["resps"]] for one in (ours, theirs)), 1e-4)
    assert [each["resps"] for each in two["samples"]["go_on"]] == [each["resps"] for each in one["samples"]["go_on"]]


@pytest.mark.slow
def test_every_kind_of_task_gives_what_the_logits_say(workdir, tasks, capsys):
    words = [f"{workdir}", "--tasks=choose,go_on,roll", f"--include={tasks}", "--log_samples", "--limit=3",
             "--config.mesh.tensor=4", "--config.mesh.data=2"]
    assert evaluate_command.main(words) == 0
    assert "bits_per_byte" in capsys.readouterr().out
    kept = json.loads((workdir / "evaluations" / "20.json").read_text())
    assert kept["step"] == 20 and kept["packages"]["lm_eval"] and len(kept["hashes"]["choose"]) == 3
    assert kept["results"]["choose"]["acc,none"] == 1.0

    run, state = jt.load_model(workdir)
    module, words = jax.jit(lambda ids: run.module(state)(ids)), tokenizer_of(workdir)

    def logprob(given, scored):
        ids = np.array([*given, *scored])
        row = np.pad(ids[:-1], (0, 65 - len(ids)))[None]  # of one length, to be compiled once
        logits = np.asarray(module(row)[0], np.float64)[len(given) - 1:len(ids) - 1]
        said = logits - logits.max(-1, keepdims=True)
        said -= np.log(np.exp(said).sum(-1, keepdims=True))
        return said[np.arange(len(scored)), list(scored)].sum()

    sample = kept["samples"]["choose"][1]
    for option, ((found, _),) in zip((" best", " xyzzy"), sample["resps"], strict=True):
        assert float(found) == pytest.approx(logprob(b"1 It was the", option.encode()), abs=1e-4)
    text = LONG.replace("{{n}}", "2").encode()
    assert len(text) > 64
    ((found,),) = kept["samples"]["roll"][2]["resps"]
    first, rest = text[:64], text[64:]  # of windows that overlap by a token, and see as far back as fits
    want = logprob([words.eod], first) + logprob(text[len(text) - 65:64], rest)
    assert float(found) == pytest.approx(want, abs=1e-4)
    ((said,),) = kept["samples"]["go_on"][0]["resps"]
    one, = jt.generate(run, state, ["0 It was"], max_new_tokens=6, temperature=0, stop=["e"], tokenizer=words)
    assert said == one.text and "e" not in said


@pytest.mark.slow
def test_a_watcher_evaluates_what_is_there_and_ends_with_the_last_step(workdir, tasks, tmp_path, capsys, monkeypatch):
    """The run's trackers get each result once."""
    backend, copy = Backend(), tmp_path / "copy"
    monkeypatch.setattr(trackers, "made", lambda name, options: Fake(backend))
    monkeypatch.setattr(trackers, "check", lambda names: None)
    shutil.copytree(workdir, copy, ignore=shutil.ignore_patterns("evaluations"))
    folder, run = copy / "evaluations", json.loads((copy / "run.json").read_text())["run"]
    words = [f"{copy}", f"--include={tasks}", "--watch", "--limit=2", "--config.observe.trackers=wandb"]
    assert evaluate_command.main([*words, "--tasks=choose"]) == 0
    assert sorted(path.name for path in folder.glob("*.json")) == ["10.json", "20.json"]
    first, newest = folder / "10.json", folder / "20.json"
    seen, kept = first.stat().st_mtime_ns, json.loads(newest.read_text())
    newest.write_text(json.dumps(kept | {"parameters": "others"}))  # the run has come to this step again
    capsys.readouterr()
    assert evaluate_command.main([*words, "--tasks=choose", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(newest.read_text()), "of the step that is done again"
    assert seen == first.stat().st_mtime_ns, "done again"
    assert json.loads(newest.read_text())["parameters"] == kept["parameters"], "of a checkpoint that is gone"
    told = [{"step": step, "eval_choose_acc": json.loads((folder / f"{step}.json").read_text())["results"]["choose"][
        "acc,none"]} for step in (10, 20)]
    assert [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] == told
    shown = backend.runs[f"{run}-evaluations"]
    assert [{key: line[key] for key in told[0]} for line in shown] == told
    assert not any("choose" in line for line in (copy / "metrics.jsonl").read_text().splitlines())
    with locked(folder, 0.0):
        assert evaluate_command.main([*words, "--tasks=choose"]) == 2
    assert "--watch: another process watches" in capsys.readouterr().err

    def asked(flags, overrides, tasks, step, evaluate=evaluate_tasks.evaluate):
        if step == 10:  # it is deleted in this moment
            shutil.rmtree(copy / "checkpoints" / "10")
        evaluate(flags, overrides, tasks, step)

    monkeypatch.setattr(evaluate_tasks, "evaluate", asked)
    assert evaluate_command.main([*words, "--tasks=go_on"]) == 0
    assert "the checkpoint of step 10 was deleted before it was read" in capsys.readouterr().err
    assert "go_on" in json.loads(newest.read_text())["results"], "others' results count as done"
    assert [line["step"] for line in backend.runs[f"{run}-evaluations-2"]] == [20]


@pytest.mark.slow
def test_a_run_is_asked_while_it_trains_and_keeps_the_best_checkpoint(workdir, tasks, tmp_path):
    """The evaluation uses the run's own mesh and has the command's numbers; it does not change the steps."""
    config = jt.load_config(workdir / "config.json", {
        "evaluation.tasks": ["choose", "go_on", "roll"], "evaluation.include": f"{tasks}", "evaluation.limit": 4,
        "train.steps": 15, "train.eval_every": 5, "train.precision": "float32", "mesh.data": 2, "mesh.fsdp": 2,
        "mesh.tensor": 2, "checkpoint.every": 5, "checkpoint.keep": 1, "checkpoint.best": "highest:eval_choose_acc"})
    random.seed(3)
    expected, folder = random.Random(3).random(), tmp_path / "work"
    jt.train(config, folder)
    assert random.random() == expected, "the harness seeds generators of others"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line for line in lines if "eval_loss" in line}
    assert sorted(found) == [5, 10, 15]
    best, before = (max(steps, key=lambda step: (found[step]["eval_choose_acc"], step))
                    for steps in ((5, 10, 15), (5, 10)))
    kept = {int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal()}
    assert kept in ({best, 15}, {before, 15})  # nothing is deleted again for the results of the last step
    assert evaluate_command.main([f"{folder}", "--tasks=choose,go_on,roll", f"--include={tasks}", "--limit=4"]) == 0
    said = json.loads((folder / "evaluations" / "15.json").read_text())["results"]
    wanted = {f"eval_{task}_{metric}": said[task][f"{metric},none"]
              for task, metric in (("choose", "acc"), ("go_on", "exact_match"), ("roll", "bits_per_byte"))}
    assert {key: found[15][key] for key in wanted} == pytest.approx(wanted, rel=1e-4)
    assert found[5]["eval_roll_bits_per_byte"] > found[15]["eval_roll_bits_per_byte"], "it did not learn meanwhile"
    assert not any("stderr" in key for key in found[15])


@pytest.mark.slow
def test_a_run_asks_as_its_config_says(workdir, tasks, monkeypatch):
    """Each key reaches the harness or the model that it asks; the harness seeds nobody else's generators."""
    results = {"choose": {"alias": "choose", "sample_len": 3, "acc,none": 0.5, "acc_stderr,none": 0.1, "acc,strict": 1}}
    config = jt.load_config(workdir / "config.json", {
        "evaluation.tasks": ["choose", "roll"], "evaluation.include": f"{tasks}", "evaluation.limit": 3,
        "evaluation.num_fewshot": 2, "evaluation.chat": True, "evaluation.batch_size": 7})

    def answers(self, model):
        assert self.names == ["choose", "roll"]
        assert evaluate_tasks._asked(self.settings) == {
            "tasks": "choose,roll", "num_fewshot": 2, "limit": 3, "gen_kwargs": None, "chat": True, "seed": 0}
        assert model == ((run, "state", "words"), {"chat": ("run", config.to_dict(), "words", ""), "batch_size": 7,
                                                        "folder": "run"})
        random.seed(1)
        np.random.seed(1)
        return {"results": results}

    run = SimpleNamespace(config=config, eval_batches=[], corpus=SimpleNamespace(tokenizer="words"))
    monkeypatch.setattr(training_tasks, "chat_of", lambda *arguments: arguments)
    monkeypatch.setattr(harness_model, "HarnessModel", lambda *arguments, **keys: (arguments, keys))
    monkeypatch.setattr(evaluate_tasks.Tasks, "ask", answers)
    before = random.getstate(), np.random.get_state()[1].tolist()
    ask = training_tasks.asked(run, "run")
    assert ask("state") == {"eval_choose_acc": 0.5, "eval_choose_acc_strict": 1.0}
    assert before == (random.getstate(), np.random.get_state()[1].tolist())
    run.eval_batches = None
    with pytest.raises(jt.UserError, match=r"evaluation\.tasks: they run with each evaluation, and the data has no"):
        training_tasks.asked(run, "run")


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "message"), [
    ({"tasks": ["nothing"]}, "evaluation.tasks: there is no task 'nothing'"),
    ({"tasks": ["choose"], "include": "nowhere"}, "evaluation.include: nowhere is not a folder"),
    ({"limit": 3}, "evaluation.limit: it is read with evaluation.tasks only"),
    ({"tasks": ["choose"], "batch_size": 0}, "evaluation.batch_size: "),
])
def test_tasks_that_cannot_be_asked_are_refused_before_a_run_begins(keys, message, workdir, tmp_path):
    with pytest.raises(jt.UserError) as refusal:
        jt.train(jt.load_config(workdir / "config.json", {f"evaluation.{key}": value for key, value in keys.items()}),
                 tmp_path / "work")
    assert message in f"{refusal.value}" and not (tmp_path / "work" / "checkpoints").exists()


@pytest.mark.parametrize("names", [*slow("choose"), *exhaustive("choose,go_on")])
def test_a_model_is_asked_with_each_of_several_adapters_alone(workdir, tasks, tmp_path, capsys, names):
    run, _ = jt.load_model(workdir)
    adapted = jt.build(replace(run.config, lora=LoraConfig(rank=2)))
    for name, size in (("nothing", 0.0), ("other", 0.3)):
        rng = np.random.default_rng(0)
        (tmp_path / name).mkdir()
        adapter_files.save(jax.tree.map(lambda leaf, rng=rng, size=size: jax.device_put(
            size * rng.standard_normal(leaf.shape, np.float32), leaf.sharding), lora.adapters(abstract_model(adapted))),
            run.config.model, adapted.config.lora, tmp_path / name, "", np.dtype("float32"))
    asked = [f"{workdir}", f"--tasks={names}", f"--include={tasks}", "--log_samples", "--limit=2",
             f"--output={tmp_path}/out.json"]
    assert evaluate_command.main(asked) == 0
    assert evaluate_command.main([*asked, f"--adapters=nothing={tmp_path}/nothing,other={tmp_path}/other"]) == 0
    plain, nothing, other = (json.loads((tmp_path / file).read_text()) for file in (
        "out.json", "out-nothing.json", "out-other.json"))
    assert other["adapter"] == ["other", f"{tmp_path}/other"] and "adapter" not in plain

    def said(record):
        return [float(number) for sample in record["samples"]["choose"] for ((number, _),) in sample["resps"]]

    np.testing.assert_allclose(said(nothing), said(plain), rtol=1e-5)
    assert np.abs(np.subtract(said(other), said(plain))).min() > 0.01
    for name in names.split(",")[1:]:
        found, same, unlike = (record["samples"][name][0]["resps"] for record in (plain, nothing, other))
        assert found == same != unlike


@pytest.mark.slow
def test_an_answer_ends_with_its_turn_and_a_text_may_begin_with_nothing(workdir):
    """Whatever the task's own stop texts are."""
    run, state = jt.load_model(workdir)
    words = tokenizer_of(workdir)
    plain = HarnessModel(run, state, words)
    request = [SimpleNamespace(args=("It was the", {"until": [], "max_gen_toks": 8}))]
    (whole,), = [plain.generate_until(request)]
    chat = SimpleNamespace(ends=lambda: [ord(whole[2])])
    assert HarnessModel(run, state, words, chat=chat).generate_until(request) == [whole[:whole.index(whole[2])]]
    assert len(plain.generate_until([SimpleNamespace(args=("", {"until": [], "max_gen_toks": 3}))])) == 1


@pytest.mark.slow
def test_a_conversation_is_asked_as_the_template_has_it(workdir):
    run, state = jt.load_model(workdir)
    words = tokenizer_of(workdir)
    model = HarnessModel(run, state, words, chat=chat_messages.chat_of(workdir, {}, words, "plain"))
    text = model.apply_chat_template([{"role": "user", "content": "hello"}])
    assert text == "user: hello\nassistant: " and model.tok_encode(text) == list(text.encode())


@pytest.mark.parametrize(("words", "message"), [
    *slow(
        (["--tasks=chose"], "--tasks: there is no task 'chose'; see lm-eval ls tasks, or name the folder of your own"),
        (["--tasks=choose", "--adapters=a=nowhere"],
         "adapters: a: nowhere is not a folder of adapters in PEFT's format"),
        (["--tasks=choose", "--step=7"], "--step: "),
        (["--tasks=go_on", "--gen_kwargs=max_gen_toks=64"],
         "max_gen_toks: 64 leaves no room for a prompt in model.max_"),
    ),
    *exhaustive(
        (["--tasks=choose", "--include=nowhere"], "--include: nowhere is not a folder; name the one with the"),
        (["--tasks=choose", "--watch", "--step=3"], "--step: --watch evaluates all new checkpoints; remove it"),
        (["--tasks=choose", "--watch", "--adapters=a=b"],
         "--adapters: --watch evaluates all new checkpoints; remove"),
        (["--tasks=choose", "--adapters=a=b,a=c"],
         "--adapters: 'a=b,a=c' is not a list of different names with folders"),
        (["--tasks=choose", "--adapters=a/b=c"],
         "--adapters: {'a/b': 'c'} is not valid; files have these names: without"),
        (["--tasks=choose", "--batch_size=0"], "--batch_size: 0 is not valid; give 1 or more"),
        (["--tasks=choose", "--config.model.num_layers=3"],
         "--config.model.num_layers: it cannot be changed after training"),
        (["--tasks=choose", "--config.observe.trackers=wandb"],
         "--config.observe.trackers: it is read with --watch only; add that"),
        (["--tasks=choose", "--limit=-1"], "--limit: -1.0 is not valid; give a number above 0"),
        (["--tasks=choose", "--gen_kwargs=temperature"],
         "--gen_kwargs: 'temperature' is not valid; give KEY=VALUE,..."),
        (["--tasks=moved"], "--tasks: their data cannot be read (Unable to find "),
        (["--tasks=choose", "--num_fewshot=100"], "--tasks: the harness refuses this ("),
        (["--tasks=choose", "--chat_template=plain"], "--chat_template: 'plain' is not valid; add --chat"),
    ),
])
def test_mistakes_are_told_in_one_line(words, message, workdir, tasks, capsys):
    words = words if any(word.startswith("--include") for word in words) else [*words, f"--include={tasks}"]
    assert evaluate_command.main([f"{workdir}", *words]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith(message), told
