"""Measure a config's training speed on this machine, and where the time goes.

    jaxtrain bench --config=configs/gpt.py --steps=20 --profile
    jaxtrain bench --config=configs/gpt.py --steps=20 --compare=step,plain
    jaxtrain bench --config=configs/gpt.py:tiny --steps=10 --sweep train.remat=none,full train.unroll=1,0
    jaxtrain bench --render docs/measurements/cpu.jsonl

Trains on packed batches of the config's own data, with its data loader, and writes no checkpoints. Exit status 0; 1: it
ran out of memory, or all runs of a sweep failed; 2: a user error, reported in one line; 130: stopped by Ctrl-C.
"""

import argparse
import re
import sys

from jaxtrain.base import exit_statuses
from jaxtrain.bench.measured_run import measured, prepare_environment, shown
from jaxtrain.commands.flags import (
    add_config,
    add_json,
    add_process_flags,
    command,
    need_config,
    overrides_of,
    parser_of,
    tell_json,
)
from jaxtrain.errors import UserError, say
from jaxtrain.redaction import redacted


@command()
def main(argv: list[str] | None) -> None:
    """Measure, sweep or render, as the flags say."""
    argv = sys.argv[1:] if argv is None else argv
    flags, words = parser().parse_known_args(argv)
    overrides = overrides_of(words, vars(flags))
    if flags.render and flags.json:
        raise UserError("--json", "the files of --render are JSON", "read these")
    if flags.render:
        from jaxtrain.bench import tables

        if flags.into:
            say(f"{tables.fill(flags.into, flags.render)} tables written into {flags.into}")
        else:
            print(tables.render(flags.render), end="")
        return
    if flags.into:
        raise UserError("--into", "it needs --render", "give --render FILE... too")
    need_config(flags)
    for name in ("steps", "warmup"):
        if getattr(flags, name) < 1:
            raise UserError(f"--{name}", f"{getattr(flags, name)} is too few", "give 1 or more")
    if flags.timeout <= 0:
        raise UserError("--timeout", f"{flags.timeout:g} seconds is too short", "give more than 0")
    if flags.label and not re.fullmatch(r"\S+", flags.label):
        raise UserError("--label", f"{flags.label!r} is not one word", "leave out the spaces")
    if flags.output:
        from jaxtrain.bench import records

        records.writable(flags.output)
    prepare_environment(shared="torch" in flags.compare)
    if flags.sweep:
        from jaxtrain.bench import sweep

        if flags.num_processes:
            raise UserError("--sweep", "it starts its own processes", "leave --num_processes out")
        if flags.compare or flags.name:
            raise UserError("--sweep", f"it ranks runs, and {'--compare' if flags.compare else '--name'} takes one run",
                            "leave one of them out")
        found = sweep.sweep(_others(argv, flags.sweep), flags.sweep, flags.output, flags.timeout)
        if flags.json:
            tell_json(*found)
        else:
            print(sweep.ranked(found), end="")
        if all("failed" in record for record in found):
            raise SystemExit(exit_statuses.NO)
        return
    from jaxtrain.bench import records
    from jaxtrain.distributed import processes

    names = _compared(flags)
    record = measured(flags.config, overrides, flags.steps, flags.warmup, compared=names, profile=flags.profile,
                      targets=flags.targets)
    name = flags.name or " ".join([flags.config, *(f"{key}={value}" for key, value in redacted(overrides).items())])
    record = {"what": record["what"], "label": flags.label, "name": name,
              **records.about(records.command_line("-m jaxtrain.bench", argv)), **record}
    if processes.process() == 0:
        if "failed" not in record:
            if flags.json:
                tell_json(record)
            else:
                print(shown(record), end="", flush=True)
        if flags.output:
            records.append(flags.output, record)
    if "failed" in record:
        say(record["failed"])
        raise SystemExit(exit_statuses.NO)


def _compared(flags: argparse.Namespace) -> list[str]:
    """Connect to the other processes, if any; return what is compared, or refuse flags that do not go with that."""
    from jaxtrain import compile_cache
    from jaxtrain.bench import contenders
    from jaxtrain.distributed import processes

    names = contenders.named(flags.compare)
    if names and flags.profile:
        raise UserError("--profile", "a comparison cannot be profiled", "leave one of them out")
    if names and flags.targets:
        raise UserError("--targets", "a comparison makes no predictions", "leave one of them out")
    compile_cache.enable_compilation_cache()
    processes.initialize(flags.coordinator, flags.num_processes, flags.process_id)
    if names and processes.processes() > 1:
        raise UserError("--compare", "several processes cannot be compared", "compare in one process")
    return names


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = parser_of("bench", __doc__)
    add_config(made)
    made.add_argument("--steps", type=int, default=50, help="steps to measure; default 50")
    made.add_argument("--warmup", type=int, default=5, help="unmeasured warmup steps; default 5")
    made.add_argument("--profile", action="store_true",
                      help="also profile a few steps: time by kind of operation and by kernel")
    made.add_argument("--compare", default="", metavar="NAME,...",
                      help="compare with other implementations of the same model, in alternation: step, plain, torch, "
                           "torch.compile,  "
                           "torch.causal (explained in docs/measuring.md)")
    made.add_argument("--sweep", nargs="+", default=[], metavar="KEY=V1,V2",
                      help="measure every combination of these keys' values, one process each, and rank them")
    made.add_argument("--timeout", type=float, default=1800,
                      help="time limit of each process of a sweep in seconds; default 1800")
    add_process_flags(made)
    made.add_argument("--targets", metavar="FILE", help="measurements of jaxtrain calibrate, for the predictions")
    made.add_argument("--output", metavar="FILE", help="append the measurement to this file as a line of JSON")
    add_json(made, "print each measurement as a JSON object, as --output has it")
    made.add_argument("--name", help="name of the measurement in tables; default: the config and its changes")
    made.add_argument("--label", help="name of the table for the measurement, one word; see --into")
    made.add_argument("--render", nargs="+", metavar="FILE", help="print tables of the measurements in --output files")
    made.add_argument("--into", metavar="DOCUMENT",
                      help="with --render: write the tables into this document, between lines '<!-- rendered: KIND "
                           "LABEL -->' and '<!-- end -->'; KIND is run, memory, compare, profile or figures")
    made.group("what is measured", "steps", "warmup", "profile", "compare", "sweep", "timeout", "targets")
    made.group("records and tables", "output", "json", "name", "label", "render", "into")
    return made


def _others(argv: list[str], swept: list[str]) -> list[str]:
    """Return the flags without those of a sweep, for each of its processes."""
    own, skip = [], False
    for word in argv:
        if word.startswith("-"):
            skip = word.partition("=")[0] in ("--sweep", "--output", "--timeout")
        if not (skip or word in swept or word == "--json"):
            own.append(word)
    return own
