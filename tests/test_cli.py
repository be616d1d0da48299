"""The command line: its flags, what it prints, and the files that every run leaves."""

import argparse
import contextlib
import gc
import importlib
import importlib.metadata
import inspect
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain import cli
from jaxtrain.commands import COMMANDS, GROUPS
from jaxtrain.commands.flags import Parser, command, workdir_of
from jaxtrain.commands.train import training_flags
from jaxtrain.config.load import load_config
from jaxtrain.errors import UserError
from jaxtrain.main import main
from jaxtrain.plan import targets
from tests.tiny import tiny_flags
from tests.wording import unclear

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once
TINY = f"{ROOT}/configs/gpt.py:tiny"
STEP = ["step", "cross_entropy", "perplexity", "grad_norm", "grad_norm_z", "learning_rate", "loss", "loss_z", "skipped",
        "skipped_in_a_row", "spike", "tokens", "unknown_ids", "step_time_s", "idle_s", "data_wait_s", "tokens_per_s",
        "goodput"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    keys = ["model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32",
            "data.global_batch_size=8", "train.steps=4", "train.eval_every=2", "train.sample_tokens=8",
            "observe.trackers=tensorboard", "checkpoint.every=2"]
    return tiny_flags(tmp_path_factory, keys)


@pytest.fixture(scope="module")
def ran(flags, tmp_path_factory):
    """A workdir after one whole run from another current folder, with what was printed.

    Its length is given in epochs, and is that of `flags`.
    """
    folder, err = tmp_path_factory.mktemp("ran"), io.StringIO()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    gc.disable()  # as while a process of its own imports
    length = ["--config.train.epochs=0.055", *(flag for flag in flags if "train.steps" not in flag)]
    with contextlib.chdir(folder), contextlib.redirect_stderr(err):
        assert main(length) == 0
    assert gc.isenabled()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    return folder / "runs" / "gpt-tiny", err.getvalue()  # the default workdir


@pytest.fixture
def said(capsys, monkeypatch):
    """A function that returns a command's output, its exit status and the parsers of its command line."""
    parsers, init = [], Parser.__init__
    monkeypatch.setattr(Parser, "__init__", lambda self, *given, **keys: (parsers.append(self),
                                                                               init(self, *given, **keys))[1])
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    handler = signal.getsignal(signal.SIGTERM)

    def say(do, words):
        parsers.clear()
        try:
            status = do(words)
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        return status or 0, out, err, [*parsers]

    yield say
    signal.signal(signal.SIGTERM, handler)


def main_of(name):
    return importlib.import_module(f"jaxtrain.commands.{name}").main


@pytest.mark.filterwarnings("ignore:.*prior to execution:RuntimeWarning")  # tests have imported it before
@pytest.mark.parametrize("name", COMMANDS)
def test_help(name, said):
    status, out, err, parsers = said(cli.main, [name, "--help"])
    assert (status, err) == (0, "")
    line = COMMANDS[name]
    assert line in " ".join(out.split()) and (inspect.getmodule(main_of(name)).__doc__ or "").startswith(f"{line}\n")
    assert out.startswith(f"usage: jaxtrain {name} ")
    for parser in parsers:
        shown = parser.format_help()
        assert re.search(rf"^examples?:\n  {re.escape(parser.prog)}\b", shown, re.M), shown
        bare = [action.dest for action in parser._actions if not (action.help or getattr(action, "choices", None))]
        assert not bare, f"{parser.prog}: no help for {bare}"
        assert unclear(" ".join(shown.split())) == []


def test_few_modules_run_by_themselves():
    """They are programs that commands start, the peer of `jaxtrain bench`, a page's, and the ways in."""
    inner = {"jaxtrain.doctor.file_systems", "jaxtrain.doctor.probe", "jaxtrain.bench.reference.plain_jax",
             "jaxtrain.config.key_reference", "jaxtrain.launch.local_job", "jaxtrain.launch.ray_driver", "jaxtrain.cli",
             "jaxtrain.data.chat.template_worker", "jaxtrain.tuning.environments.worker",
             "jaxtrain.bisection.other_code",
             "jaxtrain"}
    entrances = {"jaxtrain.main", "jaxtrain.supervise", "jaxtrain.bench"}
    runs = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
            for path in (ROOT / "jaxtrain").rglob("*.py") if "\nif __name__ ==" in path.read_text()}
    assert runs == inner | entrances


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]], ids=str)
def test_list_of_commands(words, said):
    status, out, err, _ = said(cli.main, words)
    assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= 108
    assert len(out.splitlines()) <= 62, "one screen"
    for title, lines in GROUPS.items():
        listed = [f"  {name:<19}{line}" for name, line in lines.items()]
        assert "\n".join(["", f"{title}:", *listed, ""]) in out
    assert sum(map(len, GROUPS.values())) == len(COMMANDS), "each once"


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(flag, said):
    status, out, err, _ = said(cli.main, [flag])
    assert (status, err) == (0, "")
    assert re.fullmatch(r"jaxtrain (\d[\w.+]*|\(not installed\))( \([\w.-]+\))?, JAX \d[\d.]*, Python \d[\d.]*\n", out)


def config_of(words):
    """Return what `jaxtrain train` reads of a command line: the config, its overrides and the flags."""
    flags, overrides = training_flags(words)
    return flags.config, overrides, flags


@pytest.mark.parametrize(("config", "workdir"), {
    "configs/gpt.py": "gpt", "configs/gpt": "gpt", "configs/gpt.py:tiny": "gpt-tiny",
    "configs/finetune.py:lora:models/smol": "finetune-lora-models-smol",
    "configs/finetune.py:all:models/smol/": "finetune-all-models-smol",
    "configs/finetune.py:lora:/data/other/smol": "finetune-lora-data-other-smol",
    "configs/finetune.py:lora:../smol": "finetune-lora-..-smol",
    "configs/finetune.py:lora:hf:Org/smol@v2": "finetune-lora-hf-Org-smol@v2",
    "hf:Org/smol": "Org-smol", "hf:Other/smol": "Other-smol",
    "runs/first/config.json": "first-config", "mine.json": "mine",
}.items())
def test_each_config_has_a_default_workdir_of_its_own(config, workdir):
    assert workdir_of(training_flags([config])[0]) == Path("runs", workdir)


@pytest.mark.parametrize("words", [["a.py:tiny", "--workdir=w"], ["--workdir=w", "a.py:tiny"], ["--config=a.py:tiny"],
                                   ["--config.train.steps=5", "a.py:tiny"], ["--config", "a.py:tiny", "a.py:tiny"]])
def test_a_config_is_the_first_word_or_a_flag(words):
    assert config_of(words)[0] == "a.py:tiny"


def test_the_value_of_a_key_may_have_spaces():
    flags, overrides = training_flags(["--config.data.mixture={'a': 1}", "configs/gpt.py"])
    assert flags.config == "configs/gpt.py" and overrides == {"data.mixture": "{'a': 1}"}
    with pytest.raises(UserError, match=r"^--config.train.steps: it has no value; write --config.train.steps=VALUE"):
        training_flags(["configs/gpt.py", "--config.train.steps", "5"])


def test_flags_may_have_dashes():
    _, overrides, flags = config_of(["a.py", "--print-config=diff", "--may-change=train.steps",
                                          "--num-processes", "2", "--config.optimizer.learning-rate=1",
                                          "--config.data.mixture.my-text.weight=2"])
    assert (flags.print_config, flags.may_change, flags.num_processes) == ("diff", ["train.steps"], 2)
    assert overrides == {"optimizer.learning_rate": "1", "data.mixture.my-text.weight": "2"}
    parser = Parser()
    parser.add_argument("--output")
    parser.add_argument("--dry_run", action=argparse.BooleanOptionalAction)
    for words, output, dry in ((["--output=x"], "x", None), (["--no-dry-run"], None, False),
                               (["--no-dry_run", "--output=--to"], "--to", False)):
        assert vars(parser.parse_args(words)) == {"output": output, "dry_run": dry}
    parser.add_argument("words", nargs="*")
    assert parser.parse_args(["--output=x", "--", "--dry-run"]).words == ["--dry-run"], "what follows -- is not ours"


@pytest.mark.parametrize(("words", "told"), [
    ([], "CONFIG: it is missing; give a config, such as gpt or configs/gpt.py"),
    (["a.py", "--config=b.py"], "CONFIG: two are given, a.py and b.py; give one"),
    (["--config=a.py", "--config.mesh.data", "-1"],
     "--config.mesh.data: it has no value; write --config.mesh.data=VALUE"),
    (["a.py", "configs/b.py:tiny"], "configs/b.py:tiny: there is no such flag; give one config, in front of the flags "
                                    "and without dashes, such as configs/gpt.py:tiny"),
    (["--configs/b.py:tiny"], "--configs/b.py:tiny: there is no such flag; give one config, in front of the flags and "
                              "without dashes, such as configs/gpt.py:tiny"),
    (["--config.configs/b.py:tiny"], "--config.configs/b.py:tiny: there is no such key; give one config, in front of "
                                     "the flags and without dashes, such as configs/gpt.py:tiny"),
    (["a.py", "--train.steps=5"], "--train.steps=5: there is no such flag; write --config.train.steps=5"),
    (["a.py", "train.steps=5"], "train.steps=5: there is no such flag; write --config.train.steps=5"),
    (["a.py", "--train.steps", "5"], "--train.steps: there is no such flag; write --config.train.steps=VALUE"),
    (["a.py", "--work-dir=w"], "--work-dir=w: there is no such flag; did you mean '--workdir'?"),
    (["a.py", "steps"], "steps: there is no such flag; write flags as --NAME=VALUE, and keys of the config as "
                        "--config.SECTION.KEY=VALUE"),
])
def test_what_to_write_instead(words, told):
    with pytest.raises(UserError) as wrong:
        training_flags(words)
    assert f"{wrong.value}" == told


@pytest.mark.parametrize(("words", "told"), [
    (["trian", "--config=x"], "jaxtrain: there is no command 'trian'; did you mean 'train'?"),
    (["check-point"], "jaxtrain: there is no command 'check-point'; did you mean 'checkpoint'?"),
    (["--config=x"], "--config=x: a command comes before its flags; write jaxtrain train --config=x"),
])
def test_unknown_command(words, told, said):
    assert said(cli.main, words)[:3] == (2, "", f"{told}\n")


def test_warnings_have_no_line_of_code(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    command()(lambda argv: None)([])
    assert warnings.formatwarning("mesh.stage: why", UserWarning, "file.py", 3) == "warning: mesh.stage: why\n"


def test_the_flags_of_a_run_may_be_missing(said):
    words = ["elastic", "runs/none", "--min_processes=1", "--processes=2"]
    told = "CONFIG: it is missing; give a config, such as gpt or configs/gpt.py\n"
    assert said(main_of("elastic"), words[1:])[:3] == (2, "", told)


def test_the_command_itself(tmp_path):
    """A process of its own answers without JAX, and finds modules of the current folder, as `python -m` does."""
    def ran(code, *words):
        script = f"import sys; sys.path.pop(0); from jaxtrain.cli import main; {code}"
        return subprocess.run([sys.executable, "-c", script, *words], cwd=tmp_path, capture_output=True, text=True,
                              timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)})

    listed = ran("main([]); sys.exit('jax' in sys.modules)")
    module = subprocess.run([sys.executable, "-m", "jaxtrain"], cwd=ROOT, capture_output=True, text=True)
    assert module.stdout == listed.stdout, module.stderr
    assert listed.returncode == 0 and "trained models:" in listed.stdout, listed.stderr
    every = """
from jaxtrain.commands import COMMANDS
for name in COMMANDS:
    try:
        main([name, "--help"])
    except SystemExit as ended:
        assert not ended.code
    assert "jax" not in sys.modules, name"""
    helps = ran(every)
    assert helps.returncode == 0, helps.stderr
    (tmp_path / "text").write_text("a text\n" * 9)
    (tmp_path / "own.py").write_text("def step(document):\n    return document\n")
    prepared = ran("sys.exit(main())", "prepare", "--input=text", "--output=corpus", "--filters", "own:step")
    assert prepared.returncode == 0 and (tmp_path / "corpus" / "manifest.json").exists(), prepared.stderr


@pytest.mark.slow
def test_platforms_that_are_not_here_are_one_line(tmp_path):
    for name, why in (("cuda", ""), ("nonsense", r" \(Unable to initialize backend 'nonsense'.*\)")):
        done = subprocess.run([sys.executable, "-m", "jaxtrain.main", f"--config={TINY}", f"--workdir={tmp_path}"],
                              text=True, capture_output=True, env={**os.environ, "JAX_PLATFORMS": name}, cwd=ROOT)
        assert done.returncode == 2 and re.fullmatch(
            rf"JAX_PLATFORMS: '{name}' names devices that JAX cannot use here{why}; unset it, or install .*\n",
            done.stderr), done.stderr


@pytest.mark.parametrize(("flag", "why"), [
    ("--xla_nonsense=1", "this jaxlib does not know --xla_nonsense and ends every program; leave it out of XLA_FLAGS"),
    ("--xla_force_host_platform_device_count=x", "this jaxlib ends when it reads them (")])
def test_flags_that_xla_does_not_take_are_one_line(tmp_path, flag, why):
    done = subprocess.run([sys.executable, "-m", "jaxtrain.main", f"--config={TINY}", f"--workdir={tmp_path}"],
                          text=True, capture_output=True, env={**os.environ, "XLA_FLAGS": flag}, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.startswith(f"XLA_FLAGS: {why}"), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_it_is_found_beside_a_folder_of_its_name(tmp_path):
    """The folder that a clone lies in is such: an installed path wins over a folder without __init__.py."""
    try:
        importlib.metadata.distribution("jaxtrain")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jaxtrain is not installed here")
    (tmp_path / "jaxtrain").mkdir()
    done = subprocess.run([sys.executable, "-c", "import jaxtrain; jaxtrain.build"], cwd=tmp_path, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr


def test_gpus_may_pin_what_the_host_has(capsys, monkeypatch):
    name = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
    monkeypatch.setenv(name, "1")
    assert main([f"--config={TINY}", "--print_config"]) == 0
    assert os.environ[name] == "1", "who sets it knows why"
    monkeypatch.delenv(name)
    assert main([f"--config={TINY}", "--print_config"]) == 0
    assert int(os.environ[name]) == max(64, targets.host_memory() >> 30)


def test_print_config(capsys):
    changed = ["--config.train.steps=7", "--config.mesh.overrides.mlp=none"]
    assert main([f"--config={TINY}", *changed, "--print_config"]) == 0
    wanted = load_config(TINY, {"train.steps": 7, "mesh.overrides.mlp": "none"}).to_dict()
    assert json.loads(capsys.readouterr().out) == wanted
    assert main([f"--config={TINY}", *changed, "--config.data.seed=0", "--print_config=diff"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "train.steps": 7, "train.eval_every": 2, "checkpoint.every": 2, "mesh.overrides": {"mlp": "none"}}


def test_print_config_may_be_read_in_part():
    command = f"{sys.executable} -m jaxtrain.main --config={TINY} --print_config | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], text=True, capture_output=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_metrics(flags, ran):
    lines = [json.loads(line) for line in (ran[0] / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 4, 4]
    steps, evals = ([line for line in lines if ("eval_loss" in line) == kind] for kind in (False, True))
    saved = [line.pop("checkpoint_blocked_s", None) for line in steps]  # on the line after a save
    assert saved[2] > 0 and saved[0] == saved[1] == saved[3] is None
    assert all(sorted(line) == sorted(STEP) for line in steps)  # no mfu: a CPU has no known peak
    assert all(sorted(line) == ["eval_bits_per_byte", "eval_loss", "eval_perplexity", "step"] for line in evals)
    assert [line["tokens"] for line in steps] == [256, 512, 768, 1024]
    assert steps[0]["step_time_s"] is None  # it holds the compilation
    for line in steps[1:]:
        assert line["tokens_per_s"] == pytest.approx(256 / line["step_time_s"])
    losses = [line["loss"] for line in steps]
    assert losses == sorted(losses, reverse=True) and abs(losses[0] - math.log(320)) < 0.5
    # All of float32's digits: each number is one, and rounded to six digits it would be another.
    assert all(float(np.float32(loss)) == loss for loss in losses)
    assert any(float(np.float32(f"{loss:.6g}")) != loss for loss in losses)
    assert all(line["eval_perplexity"] == pytest.approx(math.exp(line["eval_loss"])) for line in evals)
    assert all(line["eval_bits_per_byte"] == pytest.approx(line["eval_loss"] / math.log(2), rel=0.02) for line in evals)


def test_files(flags, ran):
    workdir, _ = ran
    resolved = load_config(TINY, dict(flag.removeprefix("--config.").split("=") for flag in flags[1:]))
    assert json.loads((workdir / "config.json").read_text()) == resolved.to_dict()
    run = json.loads((workdir / "run.json").read_text())
    assert run["config_hash"] == resolved.hash() and len(run["data_manifest_hash"]) == 64
    assert run["mesh"] == {"data": 8, "fsdp": 1, "stage": 1, "context": 1, "expert": 1, "tensor": 1}
    assert run["device_kind"] == "cpu" and run["process_count"] == 1 and run["packages"]["jax"] == jax.__version__
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["2", "4"]
    assert {path.name for path in workdir.iterdir()} == {
        "checkpoints", "config.json", "events.jsonl", "heartbeats", "ledger", "lock", "metrics.jsonl", "run.json",
        "tensorboard", "tokenizer", "trackers"}


def test_what_is_told(ran):
    workdir, err = ran
    assert "gpt2, 24,032 parameters, computing in float32, on cpu (data=8)\n" in err
    assert "; documents are joined end to end and cut into rows of 32 tokens\n4 steps of 8 x 32 tokens, " in err
    assert err.index("\ngoodput ") < err.index("\ndone: step 4, loss ") and "jaxtrain export" in err.splitlines()[-1]
    assert "step 4/4  loss " in err and "step 4/4  evaluation loss " in err
    assert len(err.split("a sample of what the model writes now:\n")[1].rstrip("\n")) > 0
    assert str(workdir) not in err and "Traceback" not in err


def test_tensorboard(ran):
    pytest.importorskip("tensorboardX")
    (events,) = (ran[0] / "tensorboard").glob("events.out.tfevents.*")
    content = events.read_bytes()
    assert all(name in content for name in (b"loss", b"grad_norm", b"eval_loss", b"tokens_per_s"))


def test_epochs_are_steps_once_the_data_are_read(ran):
    config = json.loads((ran[0] / "config.json").read_text())
    assert (config["train"]["steps"], config["train"]["epochs"]) == (4, 0) and "4 steps of 8 x 32" in ran[1]


def test_the_list_of_runs_has_the_name_of_the_config(ran, capsys):
    assert main_of("runs")(["list", str(ran[0].parent)]) == 0
    assert "gpt.py:tiny" in capsys.readouterr().out


def test_steps_zero(flags, tmp_path, capsys):
    assert main([*flags, f"--workdir={tmp_path}", "--config.train.steps=0", "--config.optimizer.warmup_steps=0"]) == 2
    assert capsys.readouterr().err == "train.steps: a run of 0 steps trains nothing; give 1 or more\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_a_constant_schedule_may_go_on(flags, tmp_path, capsys):
    """Six steps in two commands are six steps in one."""
    constant = [*flags, "--config.optimizer.schedule=constant", "--config.train.eval_every=0"]
    for workdir, steps in (("two", 4), ("two", 6), ("one", 6)):
        assert main([*constant, f"--config.train.steps={steps}", f"--workdir={tmp_path}/{workdir}"]) == 0
    losses = [{line["step"]: line["loss"] for line in map(json.loads, (tmp_path / name / "metrics.jsonl").open())
               if "loss" in line} for name in ("one", "two")]
    assert losses[0] == losses[1] and list(losses[0]) == [1, 2, 3, 4, 5, 6]
    shutil.rmtree(tmp_path / "one" / "checkpoints")
    capsys.readouterr()
    assert main([*constant, "--config.train.steps=6", f"--workdir={tmp_path}/one"]) == 0  # all of it again
    assert "resumed" not in capsys.readouterr().err
    assert sum("loss" in line for line in map(json.loads, (tmp_path / "one" / "metrics.jsonl").open())) == 6
