"""The flags of all commands: the same thing has the same name, and what a script needs is there."""

import argparse
import contextlib
import importlib
import io
import re
from collections import defaultdict
from pathlib import Path

import pytest

import jaxtrain.commands
from jaxtrain.commands import COMMANDS
from jaxtrain.commands.flags import RENAMED, Parser
from jaxtrain.errors import UserError

# The name that a thing has in every command: other names for it, which no command may use.
CONCEPTS = {
    "output": "to out outfile output_file output_dir html svg png save write destination url",
    "dry_run": "dryrun rehearse simulate what_if show_only",
    "json": "as_json jsonl machine_readable",
    "overwrite": "force replace clobber",
    "workdir": "folder dir run_dir rundir logdir log_dir",
    "input": "inputs source sources data files",
    "seed": "random_seed rng rng_seed",
    "step": "checkpoint_step at_step iteration",
    "steps": "num_steps max_steps iterations iters",
    "ema": "averaged use_ema",
    "dtype": "weights_dtype torch_dtype",
    "batch_size": "batch bs",
    "global_batch_size": "global_batch",
    "seq_len": "sequence_length context_length",
    "timeout": "seconds time_limit max_seconds deadline",
    "workers": "num_workers threads procs",
    "processes": "full nprocs", "min_processes": "least fewest",
    "num_processes": "world_size", "process_id": "rank", "coordinator": "master coordinator_address",
    "text_field": "field text_column text_key", "audio_field": "audio_column", "image_field": "image_column",
    "tokenizer": "tokenizer_file tokenizer_path", "vocab_size": "vocabulary",
    "filters": "cleaners", "label": "labels target_label", "depth": "max_depth", "name": "run_name title",
    "targets": "targets_file calibration", "licence_of": "license_of", "adapters": "lora loras",
}
FIRST = {  # what a command is about comes first
    "CONFIG": "train launch inspect plan bench coordinates prove compile",
    "WORKDIR": "generate transcribe evaluate export top report goodput profile scaling elastic runs-show runs-compare "
               "runs-tag runs-reproduce checkpoint-list checkpoint-verify checkpoint-restore-to jobs-show jobs-logs "
               "jobs-why jobs-pause jobs-resume jobs-cancel jobs-requeue adapters-export diloco-status",
    "WORKDIR STEP [WORKDIR2] STEP": "checkpoint-diff",
    "MODEL": "merge adapters-merge quantize", "CORPUS": "publish croissant", "ROOT": "runs-list runs-gc jobs-list",
    "SWEEP": "sweep", "FOLDER": "adapters-list serve_training serve_sampler", "STORE": "adapters-add",
    "CORPUS_OR_RUN": "data-trace", "RUN_A": "bisect", "NAME": "configs runs-schema",
    "": "supervise simulate prepare train_tokenizer dashboards calibrate schedules doctor diloco-keys diloco-serve "
        "prepare_sequences-audio prepare_sequences-events prepare_sequences-images",
}
# All others print what scripts read as JSON objects, by --json.
NO_TABLE = {
    "train": "its figures are lines of metrics.jsonl and events.jsonl",
    "supervise": "its decisions are lines of events.jsonl",
    "launch": "one sentence with the job, or the files that would be submitted; jobs show --json describes the job",
    "jobs-logs": "what the job printed", "jobs-why": "what the engine says, as text",
    "jobs-pause": "one sentence", "jobs-resume": "one sentence", "jobs-cancel": "one sentence",
    "jobs-requeue": "one sentence",
    "serve_training": "the address", "serve_sampler": "the address", "diloco-serve": "its log is journal.jsonl",
    "diloco-keys": "names of files", "dashboards": "names of files", "croissant": "the name of a JSON file",
    "runs-schema": "a JSON Schema in any case", "report": "the name of a page",
    "train_tokenizer": "one sentence", "publish": "one sentence",
    "export": "one sentence; export.json in the folder has the facts", "merge": "one sentence",
    "quantize": "one sentence", "adapters-add": "one sentence; adapters list --json has it", "adapters-merge":
    "one sentence", "adapters-export": "one sentence", "checkpoint-restore-to": "one sentence",
}
REHEARSED = ("export merge publish prepare launch sweep calibrate runs-gc checkpoint-restore-to "
             "prepare_sequences-audio prepare_sequences-events prepare_sequences-images")
REPLACING = "compile export merge quantize adapters-export adapters-merge train_tokenizer"


@pytest.fixture(scope="module")
def parsers():
    """The parser of each command and of each of its subcommands, by name."""
    made, init = [], Parser.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parser, "__init__", lambda self, *given, **keys: (made.append(self),
                                                                        init(self, *given, **keys))[1])
        for name in COMMANDS:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                importlib.import_module(f"jaxtrain.commands.{name}").main(["--help"])
    whole = {parser.prog.removeprefix("jaxtrain ").replace(" ", "-"): parser for parser in made}
    return {name: parser for name, parser in whole.items()
            if not any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)}


def flags_of(parser):
    return {action.option_strings[0].removeprefix("--"): action for action in parser._actions
            if action.option_strings and not isinstance(action, argparse._HelpAction)}


def test_one_thing_has_one_name(parsers):
    used = {f"{command} --{name}" for command, parser in parsers.items() for name in flags_of(parser)}
    wrong = [f"{command} --{other}: call it --{name}" for name, others in CONCEPTS.items() for other in others.split()
             for command in parsers if f"{command} --{other}" in used]
    assert wrong == []
    names = {flag.partition(" --")[2] for flag in used}
    assert [name for name in CONCEPTS if name not in names] == [], "no command has this flag any more"


def test_one_name_has_one_kind_of_value(parsers):
    """Flags of `launch` that are keys of a job's file are read as that file is, whatever they are."""
    kinds = defaultdict(lambda: defaultdict(list))
    for command, parser in parsers.items():
        for name, action in flags_of(parser).items():
            if action.metavar != "VALUE":
                kind = "switch" if action.nargs == 0 else getattr(action.type or str, "__name__", "str")
                kinds[name]["str" if kind in ("<lambda>", "Path") else kind].append(command)
    assert {name: dict(found) for name, found in kinds.items() if len(found) > 1} == {}


def test_what_a_command_is_about_comes_first(parsers):
    found = defaultdict(set)
    for command, parser in parsers.items():
        words = [action.metavar or action.dest for action in parser._actions if not action.option_strings]
        found[words[0] if words else ""].add(command)
    assert found == {what: set(commands.split()) for what, commands in FIRST.items()}


@pytest.mark.parametrize(("flag", "commands"), {"dry_run": REHEARSED, "overwrite": REPLACING}.items())
def test_what_writes_can_be_asked(parsers, flag, commands):
    assert {name for name, parser in parsers.items() if flag in flags_of(parser)} == set(commands.split())


def test_what_prints_a_table_prints_json_too(parsers):
    having = {name for name, parser in parsers.items() if "json" in flags_of(parser)}
    assert parsers.keys() - having == NO_TABLE.keys(), "add --json (flags.add_json), or say here why there is no table"
    switches = {name for name in having if flags_of(parsers[name])["json"].nargs == 0}
    assert switches == having


def test_json_is_printed_by_one_function():
    """It has full precision, is whole and valid, and nothing else is printed with it."""
    found = [path.stem for path in Path(jaxtrain.commands.__file__).parent.glob("*.py")
             if re.search(r"(?:print|tell)\(json\.dumps", path.read_text())]
    assert sorted(found) == ["runs", "train"], "--print_config and a schema are JSON in any case"


def test_names_of_before_are_answered_with_those_of_now(parsers):
    for old, new in RENAMED.items():
        having = [parser for parser in parsers.values() if {old, new} & flags_of(parser).keys() == {new}]
        assert having, f"--{old}: no command has --{new}"
        with pytest.raises(UserError) as wrong:
            having[0].parse_known_args([f"--{old.replace('_', '-')}=x"])
        assert f"{wrong.value}".endswith(f": it has another name now; write --{new}")
