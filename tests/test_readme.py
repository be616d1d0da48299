"""Every command and every Python block that the documentation shows is run, made small."""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.commands import COMMANDS
from tests.tiny import QUICKLY, virtual_devices
from tools.release import executed_pages

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = [path for folder in ("configs", "examples", "tools", "jaxtrain")
        for path in sorted((ROOT / folder).rglob("*.py"))]
COMMAND = re.compile(r"^\s*`{0,2}((?:[A-Z_]+=\S+ )*(?:\S*/)?python3? (?:-m jaxtrain|tools/|examples/)[^`#\n]*)", re.M)
SUBCOMMAND = re.compile(rf"^(\s*`{{0,2}}(?:[A-Z_]+=\S+ )*)(\S*/)?jaxtrain ({'|'.join(COMMANDS)})(?= )", re.M)
TEMPLATE = re.compile(r"[\[\]<>]|\.\.\.|\b[A-Z]{4,}\b(?![.=])|DIR\b")
SMALL = ["--config.train.steps=2", "--config.optimizer.warmup_steps=1", "--config.train.eval_every=0",
         "--config.train.eval_batches=1", "--config.checkpoint.every=0"]
QUICK = re.compile(r"--print_config")
# These differ from another one in the config alone, and tests/test_configs.py lowers or trains the tiny variant of
# each; tests/test_examples.py runs the notebooks, and tests/bench the benchmark.
ALIKE = re.compile(r"configs/\w+\.py --config\.data\.source=/path/to/text$|jaxtrain plan .*llama3_8b|"
                   r"tools/release/run_notebooks|jaxtrain\.bench --config")
TRIED = re.compile(r"examples/(reinforce|sft)|launch configs/gpt\.py:124m .*--dry_run")  # though others like it are not
LONG = (*((page, 0) for page in ("README.md", "planner.md", "api.md", "training.md", "observe.md")),
        ("data-sequences.md", 0), ("data-trace.md", 0), *(("objectives.md", number) for number in range(6)))
CONSOLE = re.compile(r"^```console\n\$ .venv/bin/jaxtrain (.*)\n((?s:.*?))^```", re.M)
PYTHON = re.compile(r"^```python\n(?!# \S+\.py\n)(.*?)^```", re.M | re.S)
FILE = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```", re.M | re.S)  # a file to write, not a script to run
SETUP = re.compile(r"^python3 -m venv \.venv && \.venv/bin/pip install -q -e \S+ && (\.venv/bin/python .*)$", re.M)


def module_of(command: str) -> str:
    """The words behind `python -m` that run a command."""
    return {"train": "jaxtrain.main", "bench": "jaxtrain.bench"}.get(command, f"jaxtrain {command}")


def shown_on(path: Path) -> dict[str, str]:
    """The commands of a page, by what they are whichever Python runs them."""
    found: dict[str, str] = {}
    text = SUBCOMMAND.sub(lambda found: f"{found[1]}{found[2] or ''}python -m {module_of(found[3])}", path.read_text())
    for command in [*SETUP.findall(text), *COMMAND.findall(text)]:
        command = command.split("  ")[0]  # what stands apart explains
        is_template = TEMPLATE.search(re.sub(r"^([A-Z_]+=\S+ )*", "", command))
        if not is_template and not any(name in command for name, _ in FILE.findall(text)):
            found.setdefault(key_of(command), command.strip())
    return found


def key_of(command: str) -> str:
    """The command, whichever Python runs it."""
    return re.sub(r"\S*python3?", "python", command.strip(), count=1)


def shown() -> list[str]:
    """Every command, once, in the order of the documentation."""
    found: dict[str, str] = {}
    for path in DOCS + CODE:
        for key, command in shown_on(path).items():
            found.setdefault(key, command)
    return list(found.values())


def small(command: str, workdirs: Path) -> tuple[list[str], dict[str, str]]:
    """The same command on this interpreter, with fewer steps and, for a large model, its tiny variant."""
    words = shlex.split(command)
    environment = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = f"{QUICKLY} {value}" if name == "XLA_FLAGS" else value
    words = [sys.executable, *(word.replace("/path/to/text", str(ROOT / "jaxtrain")) for word in words[1:])]
    # What documentation writes to corpora/ and models/ lies beside the workdirs.
    words = [re.sub(r"(^|=|:)(corpora|models)/", rf"\1{workdirs}/", word) for word in words]
    words = [re.sub(r"(^|=|:)runs/tour(?=/|$)", rf"\1{workdirs}/tour", word) for word in words]
    # A sixth of the text; the module that is run keeps its name.
    words[3:] = [re.sub(r"^(--input=|)jaxtrain$", r"\1jaxtrain/data", word) for word in words[3:]]
    # A config that comes first is the same as --config=CONFIG (tests/test_cli.py).
    words = [re.sub(r"^(?=configs/\w+\.py)", "--config=", word) for word in words]
    if words[1:4] == ["-m", "jaxtrain", "plan"]:
        words = [re.sub(r"^(--config=.*\.py)$", r"\1:tiny", word) for word in words
                 if not word.startswith("--config.data.seq_len=")]  # longer than what tiny models read
        if "--explain" not in words:
            words = [word.replace("h100x8", "h100x2") for word in words]  # few layouts
    if words[1:4] == ["-m", "jaxtrain", "prove"]:
        words = [*(word for word in words if not word.startswith(("--meshes=", "--steps="))), "--meshes=2", "--steps=1",
                 f"--output={workdirs / 'proofs'}"]
    if words[1:4] == ["-m", "jaxtrain", "simulate"]:
        words += ["--runs=2", "--days=3"]
    if words[1:3] == ["-m", "jaxtrain.bench"]:
        words = [re.sub(r"^(--config=.*\.py)$", r"\1:tiny", word) for word in words] + ["--steps=2", "--warmup=1"]
        words = [re.sub(r"^(train\.unroll=1),0$", r"\1", word) for word in words]  # each value is a process
    words = [re.sub(r"^(--widths=\d+),.*,(\d+)$", r"\1,\2", word) for word in words]  # the slope is between these
    if words[2:3] == ["jaxtrain.main"] or words[2:4] == ["jaxtrain", "supervise"]:
        where = [i for i, word in enumerate(words) if word.startswith("--config=")]
        for i in where:
            if not words[i].endswith(":tiny"):
                words[i] = re.sub(r"\.py(:\w+)?$", ".py:tiny", words[i])
        samples = 8 if "--workdir=runs/first" in words else 0  # a text is the same after any training
        words += [] if any("--print_config" in word for word in words) else [
            *SMALL, f"--config.train.sample_tokens={samples}"]
        named = [i for i, word in enumerate(words) if word.startswith("--workdir=")]
        for i in named:
            if not words[i].startswith(f"--workdir={workdirs}/tour/"):
                words[i] = f"--workdir={workdirs / words[i].rpartition('/')[2]}"
        words += [] if named else [f"--workdir={workdirs / re.sub(r'[^a-z0-9]+', '-', command)}"]
        words += [f"--config.mesh.{axis}={1 if axis != 'data' else -1}" for axis in ("data", "fsdp", "tensor")
                  if where and ":tiny" in words[where[0]] and "configs/gpt" not in words[where[0]]]
    return words, environment


@pytest.fixture(scope="module")
def run(forked, tmp_path_factory):
    """A function that runs a command; where the same training was run already, it gets a copy of its results."""
    kept = {}

    def once(words: list[str], environment: dict[str, str]) -> None:
        workdir = next((Path(word[10:]) for word in words if word.startswith("--workdir=")), None)
        key = None
        if words[1:3] == ["-m", "jaxtrain.main"] and not workdir.exists():
            flags = dict(word.partition("=")[::2] for word in words[3:])  # the last one counts
            key = frozenset((flags | environment).items() - {("--workdir", str(workdir))})
        if key in kept:
            shutil.copytree(kept[key], workdir)
            return
        done = forked(words[1:], ROOT, {**os.environ, "XLA_FLAGS": QUICKLY, **environment}, timeout=300)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        if key and workdir.exists():
            kept[key] = shutil.copytree(workdir, tmp_path_factory.mktemp("kept") / "run")

    return once


def pages_of(executed: set) -> dict[Path, int]:
    """The pages of which all was executed that tests of this file execute, and how many commands and blocks that is."""
    runnable = {key_of(command) for chain in chains() for command in chain.values[0]}
    found = {}
    for path in DOCS:
        text = path.read_text()
        wanted = {*shown_on(path)} & runnable | {(path.name, number) for number in range(len(PYTHON.findall(text)))}
        wanted |= {command for command, _ in CONSOLE.findall(text)}
        if wanted and wanted <= executed:
            found[path] = len(wanted)
    return found


@pytest.fixture(scope="module")
def executed():
    """The commands and blocks that ran without a mistake; with JAXTRAIN_EXECUTED, its pages are recorded in the end."""
    found: set = set()
    yield found
    if os.environ.get("JAXTRAIN_EXECUTED"):
        executed_pages.record(pages_of(found))


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def test_readme_begins_with_the_two_commands_and_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 120
    first = [line for line in lines if line.startswith("python3 -m venv")]
    assert len(first) == 2 and "jaxtrain.main" in first[0] and "pytest" in first[1]
    assert lines.index(first[1]) < 10


def chains() -> list:
    """Commands that run by themselves, and those that follow each other with what the ones before made in a folder.

    But for a few they are among the long tests; those that are like another one are among the exhaustive ones.
    """
    def made(command):
        return next((folder for folder in ("corpora/", "models/", "runs/tour") if folder in command), "")

    # These have tests of their own, take hours, or need the Hugging Face Hub.
    slow = ("hf:Qwen", "pytest", "tools/benchmarks", "tools/device", "tools/release/compare_evaluation",
            "tools/release/mutants", "tools/release/proof_mutants", "tools/release/bisection_mutants",
            "draw_pictures.py report",
            "python examples/", "jaxtrain launch", "jaxtrain jobs", "jaxtrain sweep", "jaxtrain compile", "--compiled=",
            "jaxtrain bisect", "data trace configs/")
    commands = [command for command in shown() if re.search(TRIED, command) or not any(
        word in command for word in slow)]
    groups = [list(group) for _, group in itertools.groupby(commands, key=made)]
    found = [chain for group in groups for chain in ([group] if made(group[0]) else [[one] for one in group])]
    tiers = ((QUICK, ()), (ALIKE, pytest.mark.exhaustive), (re.compile(""), pytest.mark.slow))
    return [pytest.param(chain, id=chain[0], marks=next(marks for kind, marks in tiers if kind.search(chain[0])))
            for chain in found]


@pytest.mark.parametrize("commands", chains())
def test_shown_commands_run(commands, workdirs, run, executed):
    for command in commands:
        run(*small(command, workdirs))
        executed.add(key_of(command))


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in shown() if "pytest" in c])
def test_shown_test_command_collects(command, run):
    run([*small(command, Path())[0], __file__, "--collect-only", "-p", "no:cacheprovider"], {})


@pytest.mark.parametrize(("command", "output"), [
    pytest.param(*shown, marks=pytest.mark.slow if "sweep" in shown[0] else ()) for path in DOCS
    for shown in CONSOLE.findall(path.read_text())])
def test_shown_output_is_what_the_command_prints(command, output, executed):
    words = [sys.executable, "-m", "jaxtrain", *shlex.split(command)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout == output, done.stderr[-3000:]
    executed.add(command)


@pytest.mark.parametrize("path,number", [
    pytest.param(path, number, marks=pytest.mark.slow if (path.name, number) in LONG else ())
    for path in DOCS for number in range(len(PYTHON.findall(path.read_text())))],
    ids=lambda value: value.name if isinstance(value, Path) else str(value))
def test_shown_python_runs(path, number, run, executed):
    block = PYTHON.findall(path.read_text())[number].replace("h100x8", "h100x2")  # few layouts
    run([sys.executable, "-c", block], {"XLA_FLAGS": virtual_devices(2)})
    executed.add((path.name, number))
