"""A user's mistake is one line that names the key, the reason and the fix; status 2; nothing compiled, nothing left."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxtrain.checkpoint import CheckpointManager
from jaxtrain.config.load import load_config
from jaxtrain.data import load_corpus
from jaxtrain.main import main
from jaxtrain.run import Run
from jaxtrain.train_step.sharded_step import ShardedStep
from tests.odd_files import device, fifo
from tests.odd_files import text as text_of

ROOT = Path(__file__).parents[1]
TINY = f"{ROOT}/configs/gpt.py:tiny"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"line {n} of a text that is long enough\n" for n in range(2000)))
    return file


@pytest.fixture
def refused(tmp_path, text, monkeypatch, capsys):
    """Run main, expect a refusal, return its line."""
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    before = jax.config.jax_compilation_cache_dir
    for place, name in ((ShardedStep, "compiled"), (Run, "_jitted_init"), (CheckpointManager, "save")):
        monkeypatch.setattr(place, name, property(lambda self: pytest.fail("too late: the run has begun")))

    def run(*flags, config=TINY, workdir=tmp_path / "work"):
        capsys.readouterr()
        there = {path.name for path in Path(workdir).glob("*")} if Path(workdir).is_dir() else set()
        data = () if any("data.source" in flag for flag in flags) else (f"--config.data.source={text}",)
        assert main([f"--config={config}", f"--workdir={workdir}", *data, *flags]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.endswith("\n"), err
        left = {path.name for path in Path(workdir).glob("*")} if Path(workdir).is_dir() else set()
        assert left - there <= {"config.json", "run.json", "heartbeats", "lock"}
        return err.rstrip("\n")

    yield run
    jax.config.update("jax_compilation_cache_dir", before)


MISTAKES = {
    "a typo in a key": ("model.num_layer=3", "model.num_layer: there is no such key; did you mean 'num_layers'?"),
    "a typo in a section": ("modle.num_layers=3", "modle.num_layers: there is no such key; did you mean "
                            "'model.num_layers'?"),
    "another framework's word": ("mesh.ddp=8", "mesh.ddp: there is no such key; did you mean 'data'?"),
    "another framework's stage": ("mesh.zero3=8", "mesh.zero3: there is no such key; did you mean 'fsdp'?"),
    "an empty source": ("data.source=", "data.source: it is empty; name a folder or file of text, or a prepared "
                        "corpus"),
    "fewer than no steps": ("train.steps=-5", "train.steps: -5 is negative; give 0 or more"),
    "no section": ("steps=3", "steps: there is no such key; did you mean 'train.steps'?"),
    "neither section nor key": ("xyz.q=3", "xyz.q: there is no such key; known: checkpoint, compression, data, "
                                "diloco, evaluation, lora, mesh, model, observe, optimizer, pipeline, preference, "
                                "resilience, rl, sparsity, train"),
    "a word for a mesh": ("mesh=foo", "mesh: it is a section, not a key; give mesh.KEY=VALUE, mesh=auto or mesh=hsdp"),
    "a section for a key": ("model=3", "model: it is a section, not a key; give model.KEY=VALUE"),
    "text for a number": ("model.num_layers=many", "model.num_layers: 'many' is not a whole number; give a "
                        "whole number"),
    "half a layer": ("model.num_layers=2.5", "model.num_layers: '2.5' is not a whole number; give a whole number"),
    "not a number": ("optimizer.learning_rate=nan", "optimizer.learning_rate: 'nan' is not a finite number; give a "
                     "finite number"),
    "one for true": ("train.progress=1", "train.progress: '1' is not true or false; give true or false"),
    "a negative seed": ("data.seed=-1", "data.seed: -1 is negative; use 0 or more"),
    "heads over tensor": ("model.num_heads=2 mesh.tensor=4", "model.num_kv_heads: 2 does not divide over mesh axes "
                          "tensor=4 (axis 'kv_heads' of blocks/layer/attention/k/bias); make it a multiple of 4 or "
                          "change the mesh, or leave it whole by mesh.overrides.kv_heads=none and "
                          "mesh.overrides.act_kv_heads=none"),
    "devices over the mesh": ("mesh.tensor=3", "mesh: tensor=3 does not divide the 8 devices; choose sizes "
                              "whose product divides 8"),
    "a mesh too large": ("mesh.data=4 mesh.tensor=4", "mesh: data=4 x tensor=4 needs 16 devices and there are 8; set "
                         "one axis to -1, or make the product of the axes equal the device count"),
    "a batch over the mesh": ("data.global_batch_size=12", "data.global_batch_size: 12 does not divide over 8 batch "
                              "shards x train.accumulation=1; make it a multiple of 8"),
    "a batch over accumulation": ("train.accumulation=3", "data.global_batch_size: 16 does not divide into "
                                  "train.accumulation=3 micro-batches; try 18"),
    "a rule for nothing": ("mesh.overrides.embd=tensor", "mesh.overrides.embd: no model has this logical axis; did you "
                           "mean 'embed'?"),
    "a rule that is not text": ("mesh.overrides={'embed':3}", "mesh.overrides.embed: 3 is not text; give 'axis', 'a+b' "
                               "or 'none'"),
    "a missing path": ("data.source=/no/such", "data.source: '/no/such' does not exist; name a folder or file of UTF-8 "
                       "text, or use 'stdlib'"),
    "an empty folder": ("data.source=empty", "data.source: 'empty' holds no text (binary, hidden and empty files do "
                        "not count); name a folder or file of UTF-8 text, or use 'stdlib'"),
    "too little text": ("data.source=short.txt", "data.source: 11 tokens are too short for one row of data.seq_len=64 "
                        "and its last target; give more text or a smaller data.seq_len"),
    "rows too long": ("data.seq_len=128", "data.seq_len: 128 exceeds model.max_seq_len=64; lower it or raise "
                      "model.max_seq_len"),
    "rows too long for the text": ("data.seq_len=100000 model.max_seq_len=100000", "data.source: 74971 tokens are too "
                                   "short for one row of data.seq_len=100000 and its last target; give more text or a "
                                   "smaller data.seq_len"),
    "a vocabulary too small": ("model.vocab_size=256", "model.vocab_size: 256 is less than the tokenizer's 257; set it "
                               "to 257 or more"),
    "no such model": ("model.name=lama", "model.name: there is no model 'lama'; did you mean 'llama'?"),
    "no such precision": ("train.precision=bfloat", "train.precision: 'bfloat' is not supported; did you mean "
                          "'bfloat16'?"),
    "no such backend here": ("train.attention=cudnn", "train.attention: the cudnn backend cannot do this: it runs on "
                             "NVIDIA GPUs only; use 'auto' or 'xla'"),
    "no such metric": ("checkpoint.best=accuracy", "checkpoint.best: there is no metric 'accuracy'; known: eval_loss, "
                       "eval_perplexity, eval_bits_per_byte, cross_entropy, grad_norm, grad_norm_z, learning_rate, "
                       "loss, loss_z, perplexity, skipped, skipped_in_a_row, spike, "
                       "unknown_ids"),
    "an unwritable cache": ("data.cache_dir=short.txt", "data.cache_dir: short.txt/data cannot be written (Not a "
                            "directory); name a writable folder with room, here or in $JAXTRAIN_CACHE"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_config(refused, mistake, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("some text\nand more\n")
    overrides, expected = MISTAKES[mistake]
    assert refused(*(f"--config.{word}" for word in overrides.split())) == expected


@pytest.mark.parametrize("flag, line", [
    ("--work_dir=x", "--work_dir=x: there is no such flag; did you mean '--workdir'?"),
    ("--lr=1", "--lr=1: there is no such flag; did you mean '--config.optimizer.learning_rate'?"),
    ("--epochs=1", "--epochs=1: there is no such flag; train.epochs is the length of a run in passes over its data; "
     "data.mixture.NAME.epochs limits one source of a mixture"),
    ("--xyzzy", "--xyzzy: there is no such flag; see --help"),
    ("--config.model.num_layers", "--config.model.num_layers: it has no value; write --config.model.num_layers=VALUE"),
    ("--config=", "CONFIG: it is missing; give a config, such as gpt or configs/gpt.py"),
    ("--process_id=x", "command line: argument --process_id: invalid int value: 'x'; see --help"),
    ("--process_id=0", "--coordinator: several processes need --coordinator, --num_processes and --process_id; give "
     "all three (or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID)"),
    ("--coordinator=localhost:1 --num_processes=2 --process_id=2", "--process_id: 2 is not below --num_processes=2; "
     "number them from 0"),
])
def test_flags(refused, flag, line):
    assert refused(*flag.split()) == line


@pytest.mark.parametrize("content, line", {
    "def get_config(variant=None): return 1 +": "{file} raised SyntaxError: invalid syntax ({file}, line 1); see its "
                                                "line 1",
    "import no_such_package": "{file} raised ModuleNotFoundError: No module named 'no_such_package'; see its line 1",
    "def get_config():\n    return {}['x']": "{file} raised KeyError: 'x'; see its line 2",
    "def get_config(): pass": "get_config of {file} returned None; return a ConfigDict with sections",
    "x = 1": "{file} has no get_config function; define get_config(variant=None)",
}.items())
def test_config_file(refused, tmp_path, content, line):
    (tmp_path / "mine.py").write_text(content)
    assert refused(config="mine.py") == "--config: " + line.format(file="mine.py")


def test_config_path_and_variant(refused, tmp_path):
    fix = "give the name of a config such as gpt, or its path"
    for name, content, meant in (("run", {"model": {}}, "give run/config.json, the config of its run"),
                                 ("published", {"model_type": "gpt2"}, "give hf:published")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
        assert refused(config=name) == f"--config: {name} is a folder; {meant}"
    assert refused(config="no/such.py") == f"--config: there is no file no/such.py; {fix}"
    assert refused(config="no/such.py:tiny") == f"--config: there is no file no/such.py; {fix}"
    assert refused(config=f"{ROOT}/configs/gpt.py:tyni") == (
        "--config: gpt.py has no variant 'tyni': known are tiny, cpu, accelerator, 124m; see " f"{ROOT}/configs/gpt.py")


def test_config_that_is_no_mapping(refused, tmp_path):
    (tmp_path / "mine.py").write_text("def get_config(): return {'model': 3}")
    assert refused(config="mine.py") == "model: 3 is not a section; give a mapping from keys to values"


def test_corrupt_cache(refused, tmp_path, text):
    folder = load_corpus(load_config(TINY, {"data.source": str(text), "data.cache_dir": str(tmp_path)}).data).path
    content = bytearray((folder / "train.bin").read_bytes())
    content[100] ^= 1
    (folder / "train.bin").write_bytes(content)
    assert refused(f"--config.data.cache_dir={tmp_path}") == (
        f"data.cache_dir: {folder}/train.bin is corrupt or missing; delete {folder}, it is rebuilt")


def test_workdir_of_another_run(refused, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "config.json").write_text('{"model": {"num_layers": 7}}')
    (tmp_path / "work" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert refused() == (f"--workdir: {tmp_path}/work holds a run with model.num_layers=7, this config has 2; give "
                         "another --workdir or --config.model.num_layers=7")


def test_unwritable_workdir(refused, tmp_path, text):
    assert refused(workdir=text / "work") == (
        f"--workdir: {text}/work cannot be written (Not a directory); give a folder that can be")


def test_a_workdir_that_no_file_system_takes(tmp_path, text, capsys):
    assert main([f"--config={TINY}", f"--workdir={tmp_path / ('a' * 300)}", f"--config.data.source={text}"]) == 2
    assert "cannot be written (File name too long)" in capsys.readouterr().err


def test_signal_handlers_are_left_alone(refused):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    refused("--config.mesh.tensor=3")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("flags, line", [
    ([f"--config={TINY}", "--config.model.num_layer=3"],
     "model.num_layer: there is no such key; did you mean 'num_layers'?"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (["--confg=x"], "--confg=x: there is no such flag; did you mean '--config'?"),
        ([f"--config={TINY}", "--config.data.source=/no/such"],
         "data.source: '/no/such' does not exist; name a folder or file of UTF-8 text, or use 'stdlib'"))),
])
def test_as_a_command(tmp_path, flags, line):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAXTRAIN_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-m", "jaxtrain.main", *flags], cwd=tmp_path, env=environment, text=True,
                          capture_output=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line + "\n")
    assert not list(tmp_path.glob("runs/*/metrics.jsonl")) and not list(tmp_path.glob("runs/*/checkpoints"))


@pytest.mark.parametrize("name, make, fix", [
    pytest.param("config.json", fifo, "give another --workdir", marks=pytest.mark.slow),
    pytest.param("run.json", text_of("[" * 100_000), "give another --workdir", marks=pytest.mark.exhaustive),
    pytest.param("skipped_batches.json", device, "correct it, or delete it", marks=pytest.mark.slow)])
def test_a_file_of_the_workdir_that_is_something_else(tmp_path, text, name, make, fix):
    (tmp_path / "work").mkdir()
    make(tmp_path / "work" / name)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAXTRAIN_CACHE": str(tmp_path / "cache")}
    flags = [f"--config={TINY}", f"--workdir={tmp_path}/work", f"--config.data.source={text}"]
    done = subprocess.run([sys.executable, "-m", "jaxtrain.main", *flags], env=environment, text=True,
                          capture_output=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith(f"--workdir: {tmp_path}/work/{name} ") and done.stderr.endswith(f"; {fix}\n")
