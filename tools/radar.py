"""Say what a new JAX, libtpu or CUDA plug-in changes in compiled steps, without a GPU or TPU, and which option did it.

    python -m tools.radar record --cases='*_2_layers_*' --to=new.jsonl
    python -m tools.radar compare docs/measurements/radar/jax-0.11.2.jsonl docs/measurements/radar/jax-0.12.0.1.jsonl
    python -m tools.radar blame --case=8b_2_layers_h100x8 old.jsonl new.jsonl

`record` compiles cases of docs/measurements/hlo.json, and smaller ones, with the compilers that are installed, and
appends a line for each. `compare` says what changed, the most important first, and ends with status 1 if something
became worse. `blame` runs in the new environment: it compiles the case again with some of the options set back whose
values differ, and names the fewest that undo the change. `page` writes docs/radar.md's tables from recorded lines.
See docs/radar.md.
"""

import argparse
import json
import sys
from pathlib import Path

from jaxtrain.errors import UserError, say
from tools.release_radar import blame, cases, changes, recording

RECORDED = "a file that `record` wrote"


def main() -> int:
    """Run one of the commands; a user's mistake is one sentence and status 2."""
    flags = _parser().parse_args()
    try:
        return flags.run(flags)
    except UserError as error:
        say(error)
        return 2


def record(flags: argparse.Namespace) -> int:
    """Compile cases, and append a line for each."""
    wanted = cases.chosen(flags.cases)
    wanted = [case.with_layers(flags.layers) for case in wanted] if flags.layers else wanted
    if flags.missing and flags.to.exists():
        there = recording.read(flags.to).cases
        wanted = [case for case in wanted if case.name not in there]

    def tell(case: cases.Case, made: dict) -> None:
        said = made.get("refused") or made.get("stopped")
        said = said or f"{made['step_ms']:.1f} ms simulated, {made['peak_gb']:.2f} GB"
        print(f"{case.name}: {said} ({made['wall_s']:.0f} s)", flush=True)

    limit = recording.Limits(flags.seconds, flags.memory)
    recording.record(wanted, flags.to, flags.options, limit, flags.jobs, tell)
    return 0


def compare(flags: argparse.Namespace) -> int:
    """Print what changed from one file to another."""
    old, new = recording.read(flags.old), recording.read(flags.new)
    found = changes.compare(old.cases, new.cases)
    print("\n".join(changes.sentences(found, old, new)))
    return int(any(change.worse for change in found))


def find(flags: argparse.Namespace) -> int:
    """Print which options are to blame for a case's change."""
    old, new, case = recording.read(flags.old), recording.read(flags.new), cases.named(flags.case)
    if recording.versions() != new.versions:
        raise UserError("NEW", f"it is of {_said(new.versions)}, and here is {_said(recording.versions())}",
                        "run this with the Python that recorded it")
    limit = recording.Limits(flags.seconds, flags.memory)
    given = new.cases.get(case.name, {}).get("given", {})

    def compile_with(options):
        print(f"compiling with {', '.join(f'{name}={value}' for name, value in options.items()) or 'nothing'} set back",
              file=sys.stderr, flush=True)
        return recording.compiled(case.with_options({**given, **options}), blame.flags_with(options, old, new), limit)

    verdict = blame.blame(old, new, case.name, case.platform, compile_with, flags.figure, flags.candidates)
    print("\n".join(verdict.sentences()))
    if flags.to:
        recording.append(flags.to, {"old": _about(old), "new": _about(new), **verdict.line()})
    return 0


def write_page(flags: argparse.Namespace) -> int:
    """Write the tables of docs/radar.md from the recorded lines."""
    from tools.release_radar import page

    page.PAGE.write_text(page.rendered(page.PAGE.read_text()))
    return 0


def alone(flags: argparse.Namespace) -> int:
    """Compile the case that stdin describes, and print its figures."""
    from tools.release_radar import compiling  # imports JAX

    print(f"\n{compiling.MARK}{json.dumps(compiling.figures(cases.Case(**json.load(sys.stdin))))}")
    return 0


def _about(lines: recording.Lines) -> dict:
    return {"versions": lines.versions, "xla_flags": lines.environment["xla_flags"]}


def _said(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _options(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if any(not equals for _, equals, _ in pairs):
        raise argparse.ArgumentTypeError("write NAME=VALUE,NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    one = commands.add_parser("record", help="compile cases here, and append a line for each")
    one.add_argument("--cases", required=True, help="names or patterns, with commas between: 8b_2_layers_*,tiny_cpux8")
    one.add_argument("--to", required=True, type=Path, help="the file of lines")
    one.add_argument("--layers", type=int, default=0, help="compile each case with so many layers")
    one.add_argument("--options", type=_options, default={}, help="options of the compiler: NAME=VALUE,NAME=VALUE")
    one.add_argument("--jobs", type=int, default=1, help="cases that are compiled side by side; default: 1")
    one.add_argument("--missing", action="store_true", help="leave out cases that the file has")
    one.set_defaults(run=record)

    two = commands.add_parser("compare", help="say what changed")
    two.set_defaults(run=compare)

    three = commands.add_parser("blame", help="say which options changed it")
    three.add_argument("--case", required=True, help="the case's name")
    three.add_argument("--figure", default="", choices=changes.FIGURES, help="default: the one that matters most")
    three.add_argument("--candidates", type=_options, default={}, help="further options with their old values, such as "
                       "libtpu's, whose defaults cannot be read: NAME=VALUE,NAME=VALUE")
    three.add_argument("--to", type=Path, help="append the verdict to this file")
    three.set_defaults(run=find)

    for command in (one, three):
        command.add_argument("--seconds", type=float, default=900, help="the most that one compile may take")
        command.add_argument("--memory", type=float, default=12, help="GB that one compile may take")
    for command in (two, three):
        command.add_argument("old", type=Path, metavar="OLD", help=RECORDED)
        command.add_argument("new", type=Path, metavar="NEW", help=RECORDED)
    commands.add_parser("page", help="write the tables of docs/radar.md").set_defaults(run=write_page)
    commands.add_parser("alone").set_defaults(run=alone)
    return parser


if __name__ == "__main__":
    sys.exit(main())
